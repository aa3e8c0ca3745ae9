"""The cards of a converted checkpoint and of an adapter."""

import argparse
import json
import os
import shlex
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from .. import __version__
from .._install import is_from_index
from .._text import split_gguf
from ..transformers.checkpoints.own.config import is_ours

CARD = "README.md"
_TAG = "torch-moe-mps"
_MEASURED = "\n## Measured\n\n"
# Entries that hold for the converted model, too.
_KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag", "base_model")

_OURS = """{install}
torch-moe-mps chat {argument}
```

```python
import torch_moe_mps
model = torch_moe_mps.from_pretrained("{name}", device_map="mps")
```"""
_FROM_PYPI = """```
pip install 'torch-moe-mps[serve]'"""
_FROM_SOURCES = """With torch_moe_mps, which its README installs from a checkout:

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
    begin = _FROM_PYPI if is_from_index() else _FROM_SOURCES
    use = (_MLX if layout == "mlx" else _OURS).format(name=name, argument=shlex.quote(name), install=begin)
    errors = f"\n```\n{report}\n```\n" if report else ""
    return f"""---
{data.to_yaml()}
---

# {name}

The weights{of}, written by `torch-moe-mps convert` {__version__}.

{use}
{errors}"""


def use_of_adapter(folder: str, model: str, options: argparse.Namespace) -> str:
    """Command that prompts the model with a trained adapter."""
    own = ("--bits", "--group-size")
    given = [(name, getattr(options, name[2:].replace("-", "_"))) for name in own]
    asked = [part for name, value in given if value is not None for part in (name, str(value))]
    question = ("--adapter", folder, "-p", "Who are you?")
    return shlex.join(("torch-moe-mps", "generate", model, *asked, *question))


def adapter_card(
    name: str, options: argparse.Namespace, about: dict[str, Any], examples: int, tokens: int
) -> str:
    """README.md of a folder called `name` with an adapter.

    Args:
        options: of the command that trained it.
        about: its records: the curve, and the loss of held-out lines before and after.
        examples, tokens: of its training data.
    """
    is_here = Path(options.model).exists()
    model = Path(options.model).name if is_here else options.model  # no folder of this machine is named
    of_the_hub = {} if is_here else {"base_model": split_gguf(options.model)[0]}
    data = ModelCardData(library_name="peft", tags=["lora", _TAG], **of_the_hub)
    use = use_of_adapter(name, model, options)
    rows = [
        ("data", f"{Path(options.data).name}: {examples} lines, {tokens:,} tokens"),
        ("rank", f"{options.rank}, of experts {options.expert_rank}"),
        (
            "steps",
            f"{about['curve'][-1]['step']} of {options.batch} lines, learning rate {options.learning_rate:g}",
        ),
        ("loss of training, last", f"{about['curve'][-1]['loss']:.4f}"),
    ]
    if "after" in about:
        rows.append(("loss of held-out lines", f"{about['before']:.4f} before, {about['after']:.4f} after"))
    table = "\n".join(f"| {what} | {value} |" for what, value in rows)
    return f"""---
{data.to_yaml()}
---

# {name}

A LoRA adapter for {model}, trained by `torch-moe-mps finetune` {__version__}.

```
{use}
```

| | |
| --- | --- |
{table}

![Loss of training](loss.svg)
"""


def keep_figures(folder: str, about: str, figures: str) -> None:
    """Adds measured figures to the config.json and the card of a checkpoint that this package wrote.

    Args:
        folder: of any model; none of another program is changed.
        about: what was measured; its figures from an earlier time are replaced.
    """
    config, card = Path(folder) / "config.json", Path(folder) / CARD
    written = [path for path in (config, card) if path.is_file() and os.access(path, os.W_OK)]
    kept = []
    if config in written:
        about_model = json.loads(config.read_text())
        stored = about_model.get("quantization_config")
        if is_ours(stored):
            stored["measured"] = {**stored.get("measured", {}), about: figures}
            config.write_text(json.dumps(about_model, indent=2, sort_keys=True) + "\n")
            kept.append(config.name)
    if card in written:
        text = card.read_text()
        if f"\n- {_TAG}\n" in text:
            text, _, before = text.partition(_MEASURED)
            lines = [line for line in before.splitlines() if not line.startswith(f"- {about}: ")]
            lines.append(f"- {about}: {figures}")
            card.write_text(text.rstrip() + "\n" + _MEASURED + "\n".join(lines) + "\n")
            kept.append(card.name)
    if kept:
        print(f"kept in {folder}: {' and '.join(kept)}")
