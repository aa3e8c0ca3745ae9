"""Recipes: the weights of a model that are quantised, and their formats."""

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from ...quantization import Format, requested_format

SAME = "same"
# Format of embeddings and the output head unless asked otherwise: 6 bits where they are a tenth of the
# weights and the rest is in fewer. Of SmolLM2-135M in 4 bits, of which they are a fifth, KL falls
# from 0.11 to 0.06 for 7 MB; of 30 billion weights they are 2 %.
AUTO = "auto"
# Linear layers beside experts, which every token reads, have 6 bits, too, where they are at most a tenth:
# they make half of the loss of a trained Mixture of Experts in 4 bits, in 4 % of its weights
# (docs/quality_moe.md).
AUTO_BITS, SHARE = 6, 0.1
KINDS = {"experts": "experts", "linears": "linear layers", "embeddings": "embeddings and output head"}


@dataclass(frozen=True)
class Recipe:
    """A format for each kind of weight, and exceptions by the name of the weight.

    Args:
        experts, linears, embeddings: the format of each kind; None keeps it dense. The output head counts as
            an embedding.
        overrides: {pattern: format or None}; the last pattern that fits a name decides. A pattern is a name
            or its end, with * and ?: "lm_head", "*.v_proj", "layers.0.*", "experts.down_proj".
        large_embeddings: the format of embeddings that are a tenth of the weights; None is no other.
        small_linears: the format of linear layers that are at most a tenth of the weights, beside experts;
            None is no other.
        notes: lines of a report about kinds that have another format because of their share.
    """

    experts: Format | None
    linears: Format | None = None
    embeddings: Format | None = None
    overrides: Mapping[str, Format | None] = field(default_factory=dict)
    large_embeddings: Format | None = None
    small_linears: Format | None = None
    notes: tuple[str, ...] = ()

    def format_of(self, names: Collection[str], kind: str) -> Format | None:
        """The format of the weight with these names, which is one of "experts", "linears" or "embeddings"."""
        for pattern, format in reversed(list(self.overrides.items())):
            if any(fits(pattern, name) for name in names):
                return format
        return getattr(self, kind)

    def formats(self) -> dict[str, set[Format]]:
        """{kind of weight: the formats that weights of this kind may get}"""
        return {kind: {f for f in (getattr(self, kind), *self.overrides.values()) if f} for kind in KINDS}

    def of_sizes(self, sizes: Mapping[str, int]) -> "Recipe":
        """Recipe for a model with these numbers of weights of each kind."""
        total = sum(sizes.values())
        changed: dict[str, Any] = {}
        if self.large_embeddings and sizes["embeddings"] >= SHARE * total > 0:
            changed["embeddings"] = self.large_embeddings
        if self.small_linears and sizes["experts"] and sizes["linears"] <= SHARE * total:
            changed["linears"] = self.small_linears
        notes = (
            f"{KINDS[kind]} in {format}, as they are {sizes[kind] / total:.0%} of the weights "
            f'("same" as {kind[:-1]} bits: in {self.experts})'
            for kind, format in changed.items()
        )
        return replace(self, **changed, notes=(*notes,))

    def check_patterns(self, names: Collection[str]) -> None:
        """Raises: ValueError for a pattern that fits none of the names, which are the model's."""
        for pattern in self.overrides:
            if not any(fits(pattern, name) for name in names):
                wrong = f"the pattern {pattern!r} fits no weight that can be quantised"
                raise ValueError(f"moe_mps::quantize: {wrong}")


def fits(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def requested_recipe(
    bits: int | None = None,
    group_size: int | None = None,
    mode: str | None = None,
    *,
    linear_bits: int | str | None = AUTO,
    embedding_bits: int | str | None = AUTO,
    keep: Collection[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Recipe | None:
    """Recipe requested by the arguments of `accelerate`, or None.

    Args:
        bits, group_size, mode: the format of the experts, and of everything without a format of its own.
        linear_bits: bits of the linear layers in mode "affine"; "same" as the experts; None is dense. "auto"
            is 6 in mode "affine" with fewer bits where they are at most a tenth of the weights, beside
            experts, and "same" elsewhere.
        embedding_bits: the same for embeddings and the output head. "auto" is 6 in mode "affine" with fewer
            bits where they are a tenth of the weights, as in small models, and "same" elsewhere.
        keep: names of weights that stay dense, with * and ?, or their ends: "lm_head", "*.v_proj".
        overrides: {name or pattern: bits, {bits, group_size, mode}, or False for dense}; the last that fits
            decides. "layers.0.*experts.down_proj" means one of the matrices of experts.

    Routers always stay dense.

    Raises: ValueError for a format that does not exist, and for any argument without bits or a mode.
    """
    usual = requested_format(bits, group_size, mode)
    if usual is None:
        arguments = {"keep": bool(keep), "overrides": bool(overrides)}
        arguments |= {"linear_bits": linear_bits != AUTO, "embedding_bits": embedding_bits != AUTO}
        for argument, is_given in arguments.items():
            if is_given:
                raise ValueError(f"moe_mps::quantize: {argument} needs bits or a mode, got neither")
        return None
    exceptions = {
        pattern: _format(f"overrides[{pattern!r}]", value, usual)
        for pattern, value in (overrides or {}).items()
    }
    exceptions |= dict.fromkeys([keep] if isinstance(keep, str) else keep)
    more = usual.is_affine or usual.integers is not None
    auto = _format("bits", AUTO_BITS, usual) if more and usual.bits < AUTO_BITS else None
    bits_of = {"linear_bits": linear_bits, "embedding_bits": embedding_bits}
    linears, embeddings = (_format(name, SAME if b == AUTO else b, usual) for name, b in bits_of.items())
    large, small = (auto if bits == AUTO else None for bits in (embedding_bits, linear_bits))
    return Recipe(usual, linears, embeddings, exceptions, large, small)


# The arguments of `from_pretrained`, of QuantizationConfig and of a file with a recipe, too.
ARGUMENTS = tuple(inspect.signature(requested_recipe).parameters)


def recipe_of(usual: Format, **exceptions: Any) -> Recipe:
    """The recipe that uses one format, with the other arguments of `requested_recipe`."""
    recipe = requested_recipe(**usual.to_dict(), **exceptions)
    assert recipe is not None
    return recipe


def _format(argument: str, value: Any, usual: Format) -> Format | None:
    """The format for an argument: bits, a mapping with bits, False or None for dense, or "same"."""
    if value is None or value is False:
        return None
    if isinstance(value, Format):
        return value
    if value == SAME:
        return usual
    if isinstance(value, Mapping):
        known = {"bits", "group_size", "mode"}
        if not set(value) <= known:
            wrong = ", ".join(sorted(set(value) - known))
            raise ValueError(
                f"moe_mps::quantize: {argument} must have bits, group_size and mode, got {wrong}"
            )
        return usual.replaced(value.get("bits"), value.get("group_size"), value.get("mode"))
    if type(value) is int:
        group_size = usual.group_size if usual.mode == "affine" else None
        return Format(value, group_size, "affine")
    raise ValueError(f"moe_mps::quantize: {argument} must be bits, a format or None, got {value!r}")
