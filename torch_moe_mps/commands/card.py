"""The model card of a converted checkpoint."""

import shlex
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from .. import __version__

CARD = "README.md"
# What holds for the converted model, too.
_KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag", "base_model")

_OURS = """```
pip install 'torch-moe-mps[serve]'
torch-moe-mps chat {word}
```

```python
import torch_moe_mps
model = torch_moe_mps.from_pretrained("{name}", device_map="mps")
```"""
_MLX = """```
mlx_lm.chat --model {word}
```"""


def model_card(name: str, source: str, base: str | None, layout: str, report: str) -> str:
    """README.md of a folder called `name`.

    Args:
        source: the folder that was converted, whose card says what still holds.
        base: the name of the model on the Hub; None for a folder.
        layout: "moe_mps" or "mlx".
        report: what the conversion printed.
    """
    found: dict[str, Any] = {}
    if (Path(source) / CARD).exists():
        before = ModelCard.load(Path(source) / CARD, ignore_metadata_errors=True).data.to_dict()
        found = {key: before[key] for key in _KEPT if before.get(key) is not None}
    if base is not None:
        found["base_model"] = base
    if "base_model" in found:
        found["base_model_relation"] = "quantized"
    library = "mlx" if layout == "mlx" else "transformers"
    data = ModelCardData(library_name=library, tags=[library, "torch-moe-mps"], **found)
    of = f" of [{found['base_model']}](https://huggingface.co/{found['base_model']})" if base else ""
    use = (_MLX if layout == "mlx" else _OURS).format(name=name, word=shlex.quote(name))
    errors = f"\n```\n{report}\n```\n" if report else ""
    return f"""---
{data.to_yaml()}
---

# {name}

The weights{of}, written by `torch-moe-mps convert` {__version__}.

{use}
{errors}"""
