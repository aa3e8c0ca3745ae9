"""Models whose experts are quantised in place."""

from collections.abc import Mapping

from torch import nn

from ..quantization import Format
from .interface import experts_of, is_quantized
from .packing import quantize_modules
from .report import QuantizationReport


def quantize_experts(
    model: nn.Module,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str = "affine",
    *,
    modules: Mapping[str, nn.Module] | None = None,
    progress: bool = True,
) -> QuantizationReport:
    """Quantise the experts of a transformers model in place, layer by layer.

    The dense weights of a layer are freed before the next one is quantised, so the peak is the dense model
    plus one quantised layer. All checks come first: on their errors the model is unchanged.

    The modules run as experts implementation "moe_mps" from then on, for inference only. save_pretrained of
    `model`, and of the models of transformers within, keeps them quantised.

    Args:
        model: any module; experts are recognised by the interface of transformers' experts implementations.
        bits, group_size, mode: see Format.
        modules: the experts modules to quantise, by name; None means all of the model.
        progress: show a bar where tqdm is installed.

    Returns: a report with the relative error of each parameter, and what was left dense.

    Raises: ValueError for a format or a shape that does not fit; for weights that are not finite, offloaded,
        distributed or under an adapter of PEFT; and for a model with another quantisation method.
    """
    format = Format(bits, group_size, mode)
    try:
        return quantize_modules(model, experts_of(model) if modules is None else modules, format, progress)
    finally:  # a model that was interrupted works, and can be saved
        keep_when_saving(model)


def keep_when_saving(model: nn.Module) -> None:
    """Lets the models of transformers in `model` save what is quantised, and load it again."""
    modules = list(model.modules())
    if any(map(is_quantized, modules)) and any(hasattr(module, "save_pretrained") for module in modules):
        from .saving import mark_quantized  # which needs transformers; quantising a plain module does not

        mark_quantized(model)
