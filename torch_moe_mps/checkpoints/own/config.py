"""The quantisation in the config of a checkpoint.

    "quantization_config": {
      "library": "torch_moe_mps",
      "modules": {"lm_head": "affine6_64", "model.layers.*.mlp.experts": "affine4_64", ...}
    }

A * is any number: equal layers share a line. There is no "quant_method": transformers without this package
would ignore an unknown method and fill quantised weights with random values; without a method it raises an
error.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from ...models.basics.report import any_layer
from ...models.modules.experts import NAME
from ...models.upstream.weights import QuantizationConfigMixin
from ...ops._checks import Check
from ...quantization import Format
from ..quantize.recipe import ARGUMENTS, Recipe, recipe_of, requested_recipe
from ..quantize.target import Target, paths_of, quantizable

LIBRARY = "torch_moe_mps"


class QuantizationConfig(QuantizationConfigMixin):
    """Quantisation of a checkpoint's weights, as stored or as applied by loading.

    Args:
        bits, group_size, mode: as in `torch_moe_mps.quantization.quantize`: the default format.
        modules: {name: format} of what a checkpoint has quantised: experts modules, or one of their
            parameters, linear layers, embeddings. A format is a name such as "affine4_64", or {bits,
            group_size, mode}. None in a checkpoint: experts, in the default format. Names of a larger or a
            smaller model are understood.
        gguf: path of a GGUF file whose blocks stay packed.
        dequantized_gguf: path of a GGUF file whose weights are dequantised while we quantise.
        wanted: arguments of a recipe for the dense weights of a quantised checkpoint.
        may_leave: True leaves packed weights for which the recipe has another format; False refuses it.
        ordered: names of the linear layers, quantised in a checkpoint, that take their inputs in an order.
        absent: names of parts of the model, beside its language model, that a checkpoint does not have.
        mlx: the quantisation of a checkpoint that MLX wrote; {} if that is dense.
        other: the quantisation of a checkpoint that another library wrote.
        importance: an Importance, for weights quantised while loading.
        others: linear_bits, embedding_bits, keep and overrides for dense checkpoints, as in `accelerate`. All
            else, which other programs may have added to a config, is ignored.

    Raises: ValueError for a format that does not exist.
    """

    def __init__(
        self,
        bits: int | None = None,
        group_size: int | None = None,
        mode: str | None = None,
        modules: Mapping[str, Any] | None = None,
        gguf: str | None = None,
        dequantized_gguf: str | None = None,
        wanted: Mapping[str, Any] | None = None,
        may_leave: bool = False,
        ordered: Collection[str] = (),
        absent: Collection[str] = (),
        mlx: Mapping[str, Any] | None = None,
        other: Mapping[str, Any] | None = None,
        importance: Any = None,
        **others: Any,
    ):
        self.quant_method = NAME
        self.usual = Format(bits, group_size, mode or "affine")
        if modules is not None and not isinstance(modules, Mapping):
            raise ValueError(f"moe_mps: modules must be {{name: format}}, got {modules!r}")
        for key, names in (("ordered", ordered), ("absent", absent)):
            if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"moe_mps: {key} must be a list of names, got {names!r}")
        self.modules = modules and {name: _format_of(name, value) for name, value in modules.items()}
        self.exceptions = {name: others[name] for name in ARGUMENTS if name in others}
        self.gguf, self.dequantized_gguf = gguf, dequantized_gguf
        self.absent, self.mlx, self.other = [*absent], mlx, other
        self.ordered = [*ordered]
        self.wanted, self.may_leave, self.importance = wanted, may_leave, importance
        self.recipe()  # its errors are raised now

    def get(self, key: str, default: Any = None) -> Any:
        """An entry, as of a dict: transformers treats the config of a loaded model as one."""
        return getattr(self, key, default)

    def recipe(self) -> Recipe:
        """Recipe for the weights that are dense."""
        asked = None if self.wanted is None else requested_recipe(**self.wanted)
        return asked or recipe_of(self.usual, **self.exceptions)

    def arguments(self) -> dict[str, Any]:
        """Arguments of a recipe for the weights that are dense."""
        return self.usual.to_dict() | self.exceptions

    def formats(self) -> set[Format]:
        """All formats of a quantised checkpoint."""
        return {self.usual} if self.modules is None else {*self.modules.values()}

    def to_dict(self) -> dict[str, Any]:
        """Entry of config.json for a model that is quantised."""
        modules = {name: str(format) for name, format in (self.modules or {}).items()}
        lists = {"ordered": self.ordered, "absent": self.absent}
        return {"library": LIBRARY, "modules": modules} | {
            key: names for key, names in lists.items() if names
        }

    def targets(self, model: nn.Module) -> dict[str, Target]:
        """{name: target} of the modules that are quantised in a checkpoint of the model.

        Raises: ValueError for a name that the model does not have.
        """
        every = quantizable(model)
        for name, format in self._formats(model, every).items():
            if name in every:
                target = every[name]
                target.formats = dict.fromkeys(target.parameters, format) | target.formats
            else:
                owner, _, parameter = name.rpartition(".")
                every[owner].formats[parameter] = format
        for name in [name for stored in self.ordered for name in _named(stored, every, False)]:
            every[name].has_order = True
        result = {name: target for name, target in every.items() if target.formats}
        for target in result.values():
            for parameter in target.parameters:
                if parameter not in target.formats:
                    expected = "quantised as the other matrices are"
                    Check("load").fail(target.path(parameter), expected, "no format")
        return result

    def _formats(self, model: nn.Module, every: Mapping[str, Target]) -> dict[str, Format]:
        """{name of a module or parameter in the model: its format}."""
        if self.modules is None:
            return {name: self.usual for name, target in every.items() if target.kind == "experts"}
        # A class without a head, or with another, has only the modules that it shares with the saved one.
        same = type(model).__name__ in (getattr(model.config, "architectures", None) or ())
        formats: dict[str, Format] = {}
        for stored, format in self.modules.items():
            names = _named(stored, every, False) or _named(_renamed(stored, model), every, same)
            formats.update((name, format) for name in names)
        return formats


def is_mlx(stored: Mapping[str, Any]) -> bool:
    """True if MLX wrote the quantisation of a config, which names no method."""
    return "quant_method" not in stored and "bits" in stored and "group_size" in stored


def is_ours(stored: Any) -> bool:
    """True if this package wrote the quantisation of a config."""
    ours = isinstance(stored, QuantizationConfig)
    return ours or (isinstance(stored, Mapping) and stored.get("library") == LIBRARY)


def together(names: Collection[str], everything: Iterable[str]) -> list[str]:
    """The names for config.json: `layers.*.x` if `names` has the x of every layer in `everything`."""
    others = {any_layer(name) for name in {*everything} - {*names}}
    return [*dict.fromkeys(name if any_layer(name) in others else any_layer(name) for name in names)]


def _format_of(name: str, value: Any) -> Format:
    """The format that a config names, or describes. Raises: ValueError."""
    if isinstance(value, Format):
        return value
    if isinstance(value, str):
        return Format.named(value)
    if not isinstance(value, Mapping) or not set(value) <= {"bits", "group_size", "mode"}:
        raise ValueError(
            f"moe_mps: modules[{name!r}] must be a format or {{bits, group_size, mode}}, got {value!r}"
        )
    return Format(**value)


def _named(stored: str, every: Mapping[str, Target], required: bool) -> list[str]:
    """Names in this model for a name saved from a larger or smaller one."""
    gated = [name for name, target in every.items() if target.kind == "experts" and target.experts.has_gate]
    names = dict.fromkeys([*every, *paths_of(every), *(f"{name}.up_proj" for name in gated)])
    parts = stored.split(".")
    result = [name for name in names if _same_end(parts, name.split("."))]
    same = [name for name in result if name.count(".") == stored.count(".")] or result
    outside = {(name.count("."), *name.split(".")[: -len(parts)]) for name in same}
    if len(outside) != 1 and (result or required):
        kind = "experts" if "experts" in stored else "linears"
        has = ", ".join(name for name, target in every.items() if target.kind == kind) or "none"
        raise ValueError(f"moe_mps: the checkpoint has quantised {kind} {stored}, but the model has {has}")
    return same


def _renamed(stored: str, model: Any) -> str:
    """The name that transformers gives a module of the checkpoint: a part of a model may have others."""
    # Still incomplete when transformers' quantizers, and with them ours, are imported.
    from ...models.upstream.weights import get_model_conversion_mapping

    name = f"{stored}."
    for conversion in get_model_conversion_mapping(model):
        name = conversion.rename_source_key(name)[0]
    return name.removesuffix(".")


def _same_end(stored: list[str], name: list[str]) -> bool:
    """True if the shorter of two names is a suffix of the other."""
    pairs = zip(reversed(stored), reversed(name), strict=False)
    return all(ours == theirs or (ours == "*" and theirs.isdigit()) for ours, theirs in pairs)
