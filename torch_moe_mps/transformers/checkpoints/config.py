"""The quantisation in the config of a checkpoint: quant_method "moe_mps"."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...ops._checks import Check
from ...quantization import Format
from ..experts import NAME
from ..interface import projections
from .recipe import SAME, Recipe, recipe_of
from .targets import Target, kinds_of


class QuantizationConfig(QuantizationConfigMixin):
    """How the weights of a checkpoint are quantised, or shall be when they are loaded.

    Args:
        bits, group_size, mode: as in `torch_moe_mps.quantization.quantize`, the usual format.
        modules: {name: {bits, group_size, mode}} of what a checkpoint has quantised: experts modules, or
            one of their parameters, linear layers, embeddings. None in a checkpoint: experts, in the usual
            format. Names of a larger or a smaller model are understood.
        linear_bits, embedding_bits, keep, overrides: as in `accelerate`, for dense checkpoints.
        source: the quantisation of a checkpoint that transformers dequantises while ours quantises: FP8.
        absent: names of parts of the model, beside its language model, that a checkpoint does not have.
        global_scales: names of matrices of experts that have a scale for each expert, see global_scales.py.
        mlx: whether MLX wrote the checkpoint: what is quantised in it is read from its tensors.

    Raises: ValueError for a format that does not exist.
    """

    def __init__(
        self,
        bits: int | None = None,
        group_size: int | None = None,
        mode: str = "affine",
        modules: Mapping[str, Mapping[str, Any]] | None = None,
        linear_bits: int | str | None = SAME,
        embedding_bits: int | str | None = SAME,
        keep: Collection[str] = (),
        overrides: Mapping[str, Any] | None = None,
        source: Mapping[str, Any] | None = None,
        absent: Collection[str] = (),
        global_scales: Collection[str] = (),
        mlx: bool = False,
        **unused: Any,
    ):
        self.quant_method = NAME
        self.bits, self.group_size, self.mode = Format(bits, group_size, mode).to_dict().values()
        if modules is not None and not isinstance(modules, Mapping):
            raise ValueError(
                f"moe_mps: modules must be {{name: {{bits, group_size, mode}}}}, got {modules!r}"
            )
        for name, format in (modules or {}).items():
            if not isinstance(format, Mapping) or not set(format) <= {"bits", "group_size", "mode"}:
                raise ValueError(
                    f"moe_mps: modules[{name!r}] must be {{bits, group_size, mode}}, got {format!r}"
                )
        self.modules = modules and {name: Format(**format).to_dict() for name, format in modules.items()}
        self.linear_bits, self.embedding_bits = linear_bits, embedding_bits
        self.keep, self.overrides, self.source = keep, overrides, source
        self.absent, self.global_scales, self.mlx = [*absent], [*global_scales], mlx
        self.recipe()  # its errors come now

    def get(self, key: str, default: Any = None) -> Any:
        """As from the dict in config.json, for which transformers takes the config of a loaded model."""
        return getattr(self, key, default)

    def recipe(self) -> Recipe:
        """What to do with a dense checkpoint."""
        usual = Format(self.bits, self.group_size, self.mode)
        return recipe_of(usual, self.linear_bits, self.embedding_bits, self.keep, self.overrides)

    def to_dict(self) -> dict[str, Any]:
        names = ("quant_method", "bits", "group_size", "mode", "modules")
        rare = {"absent": self.absent, "global_scales": self.global_scales}
        return {name: getattr(self, name) for name in names} | {k: v for k, v in rare.items() if v}

    def targets(self, model: nn.Module) -> dict[str, Target]:
        """{name: target} of the modules that are quantised in a checkpoint of the model.

        Raises: ValueError for a name that the model does not have.
        """
        kinds = kinds_of(model)
        found: dict[str, Target] = {}
        usual = Format(self.bits, self.group_size, self.mode)
        if self.modules is None:
            formats = {name: usual for name, (kind, _) in kinds.items() if kind == "experts"}
        else:
            formats = {
                _same_module(stored, kinds): Format(**format) for stored, format in self.modules.items()
            }
        for name, format in formats.items():
            if name in kinds:
                kind, module = kinds[name]
                names = projections(module) if kind == "experts" else ("weight",)
                target = found.setdefault(name, Target(name, module, kind, {}))
                target.formats = dict.fromkeys(names, format) | target.formats
            else:
                owner, _, parameter = name.rpartition(".")
                target = found.setdefault(owner, Target(owner, kinds[owner][1], "experts", {}))
                target.formats[parameter] = format
        for target in found.values():
            _check_complete(target)
        return found


def is_mlx(stored: Mapping[str, Any]) -> bool:
    """Whether MLX wrote the quantisation of a config; its entry names no method."""
    return "quant_method" not in stored and "bits" in stored and "group_size" in stored


def _check_complete(target: Target) -> None:
    if target.kind == "experts" and set(target.formats) != set(projections(target.module)):
        missing = next(p for p in projections(target.module) if p not in target.formats)
        Check("load").fail(f"{target.name}.{missing}", "quantised as the other matrices are", "no format")


def _same_module(stored: str, kinds: Mapping[str, tuple[str, nn.Module]]) -> str:
    """The name in this model of what may have been saved from a larger or a smaller one."""
    names = [*kinds]
    for name, (kind, module) in kinds.items():
        if kind == "experts":
            names += [f"{name}.{projection}" for projection in projections(module)]
    if stored in names:
        return stored
    same = [name for name in names if f".{name}".endswith(f".{stored}") or f".{stored}".endswith(f".{name}")]
    if len(same) != 1:
        kind = "experts" if "experts" in stored else "linears"
        has = ", ".join(n for n, (k, _) in kinds.items() if k == kind) or "none"
        raise ValueError(f"moe_mps: the checkpoint has quantised {kind} {stored}, but the model has {has}")
    return same[0]
