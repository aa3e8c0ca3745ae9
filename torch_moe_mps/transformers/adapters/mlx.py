"""Adapters in the layout of mlx-lm: a pair of matrices for each module, of one rank and scale for all."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peft import PeftModel
from peft.tuners.lora import layer
from peft.utils import load_peft_weights
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from ..checkpoints.mlx.names import Names
from .lora import refuse

_CONFIG, _WEIGHTS = "adapter_config.json", "adapters.safetensors"


def write_mlx_adapter(adapter: str, model: Any, folder: Path) -> None:
    """Writes an adapter of PEFT into a folder for `mlx_lm.load(adapter_path=...)`.

    Args:
        adapter: a folder.
        model: the dense model, on the meta device; it has the adapter's layers behind this.

    Raises: ValueError for an adapter that mlx-lm cannot have.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # copies to the meta device do nothing
        adapted = PeftModel.from_pretrained(model, adapter, low_cpu_mem_usage=True)
    config: Any = adapted.peft_config["default"]
    if config.use_dora or config.bias != "none" or config.modules_to_save:
        refuse("an adapter for --to mlx", "LoRA of matrices alone", "DoRA, biases or whole modules")
    stored = load_peft_weights(adapter, device="cpu")
    result = dict(_pairs(adapted.get_base_model(), stored, Names(model)))
    rank = max(len(a) if a.dim() == 2 else a.shape[1] for a, _ in result.values())
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in result.items():
        missing = rank - b.shape[-1]
        a, b = pad(a, (0, 0, 0, missing)), pad(b, (0, missing))  # ranks that are zeros
        is_stack = a.dim() == 3
        tensors[f"{name}.lora_a"] = (a if is_stack else a.T).contiguous()
        tensors[f"{name}.lora_b"] = (b if is_stack else b.T).contiguous()
    keys = {name.partition(".layers.")[2].partition(".")[2] for name in result}
    about = {
        "fine_tune_type": "lora",
        "num_layers": model.config.get_text_config().num_hidden_layers,
        "lora_parameters": {"rank": rank, "scale": 1.0, "dropout": 0.0, "keys": sorted(keys)},
    }
    folder.mkdir()
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "mlx"})
    (folder / _CONFIG).write_text(json.dumps(about, indent=2) + "\n")


def _pairs(
    model: Any, stored: dict[str, Tensor], names: Names
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """(mlx-lm's name of a module, A [(E,) r, in] and B [(E,) out, r] with the scale in it)."""
    for path, module in model.named_modules():
        if not isinstance(module, layer.LoraLayer) or "default" not in module.lora_A:
            continue
        name = path.removesuffix(".base_layer")  # two stacks of experts are one inside of the other
        a, b = (stored[f"base_model.model.{path}.{part}.weight"].float() for part in ("lora_A", "lora_B"))
        b = b * module.scaling["default"]
        if isinstance(module, layer.ParamWrapper):
            yield from _of_experts(name, module, a, b, names)
            continue
        result = names.of(f"{name}.weight")
        if len(result) != 1 or names.is_halved(f"{name}.weight") or ".layers." not in result[0]:
            refuse("an adapter for --to mlx", "over layers that mlx-lm has as one matrix", f"one over {name}")
        yield result[0].removesuffix(".weight"), (a, b)


def _of_experts(
    name: str, module: Any, a: Tensor, b: Tensor, names: Names
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    experts = module.get_base_layer()
    parts = names.of_experts(name, experts)[module.parameter_name]
    if experts.is_transposed or (len(parts) > 1 and not experts.is_concatenated):
        refuse("an adapter for --to mlx", "over experts whose matrices are [out, in]", f"one over {name}")
    count = module.num_experts
    a, b = a.unflatten(0, (count, -1)), b.unflatten(1, (-1, count)).permute(2, 0, 1)
    for part, rows in zip(parts, b.chunk(len(parts), 1), strict=True):
        yield part, (a, rows)
