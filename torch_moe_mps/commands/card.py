"""The card of a converted checkpoint."""

import shlex
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from .. import __version__

CARD = "README.md"
_TAG = "torch-moe-mps"
# Entries that hold for the converted model, too.
_KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag", "base_model")

_OURS = """With torch_moe_mps, as its README installs it:

```
torch-moe-mps chat {argument}
```

```python
import torch_moe_mps
model = torch_moe_mps.from_pretrained("{name}", device_map="mps")
```"""
_MLX = """```
mlx_lm.chat --model {argument}
```"""


def model_card(name: str, source: str, base: str | None, layout: str, report: str) -> str:
    """README.md of a folder called `name`.

    Args:
        source: the folder that was converted, whose card says what still holds.
        base: the name of the model on the Hub; None for a folder.
        layout: "moe_mps" or "mlx".
        report: what the conversion printed.
    """
    result: dict[str, Any] = {}
    if (Path(source) / CARD).exists():
        before = ModelCard.load(Path(source) / CARD, ignore_metadata_errors=True).data.to_dict()
        result = {key: before[key] for key in _KEPT if before.get(key) is not None}
    if base is not None:
        result["base_model"] = base
    if "base_model" in result:
        result["base_model_relation"] = "quantized"
    library = "mlx" if layout == "mlx" else "transformers"
    data = ModelCardData(library_name=library, tags=[library, _TAG], **result)
    of = f" of [{result['base_model']}](https://huggingface.co/{result['base_model']})" if base else ""
    use = (_MLX if layout == "mlx" else _OURS).format(name=name, argument=shlex.quote(name))
    errors = f"\n```\n{report}\n```\n" if report else ""
    return f"""---
{data.to_yaml()}
---

# {name}

The weights{of}, written by `torch-moe-mps convert` {__version__}.

{use}
{errors}"""
