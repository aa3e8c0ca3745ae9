"""Checks that a quantised checkpoint has everything that the model needs."""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...models.modules.linears import OrderedLinear, formats_in
from ...ops._checks import Check
from ...ops._formats import INFINITE_E8M0, Format
from ..quantize.weights import quantized_names
from .files import tensors_in

DENSE = ("F16", "BF16", "F32", "F64")  # names that safetensors has


def check_files(model: nn.Module, files: Sequence[str] | None) -> None:
    """Raises: ValueError for a tensor in the files whose shape or dtype differs from the model's."""
    state = model.state_dict()
    for file, name, dtype, shape in tensors_in(file for file in files or () if file.endswith(".safetensors")):
        stored, place = (dtype, shape), f" in {file}"
        if (packed := state.get(f"{name.removesuffix('_blocks')}_packed")) is not None:  # gpt-oss has them
            *rows, columns = packed.shape
            check_tensor(name, stored, ["U8"], [(*rows, columns // 4, 16)], place)
        elif name in state:
            dtypes = DENSE if state[name].is_floating_point() else [dtype]
            check_tensor(name, stored, dtypes, [tuple(state[name].shape)], place)


def check_tensor(
    name: str,
    stored: tuple[str, tuple[int, ...]],
    dtypes: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    place: str = "",
) -> None:
    """Checks a tensor's dtype and shape in a file.

    Raises: ValueError if they are not among the declared ones.
    """
    dtype, shape = stored
    if dtype not in dtypes:
        Check("load").fail(name, f"of {' or '.join(dtypes)}", f"{dtype}{place}")
    if shape not in shapes:
        Check("load").fail(name, f"of shape {shapes[0]}", f"{shape}{place}")


def check_loaded(model: PreTrainedModel, loaded: Callable[[str], bool]) -> None:
    """Checks the modules whose names are `loaded`.

    Raises: ValueError for a tensor that the checkpoint lacks, or has in a wrong dtype.

    transformers leaves missing tensors uninitialised, or fills them with random values, and only logs their
    names. A head that the saved model did not have may be new.
    """
    check = Check("from_pretrained")
    whole = type(model).__name__ in (getattr(model.config, "architectures", None) or ())
    optional = may_lack(model)
    base = set(model.base_model.modules())
    for name, tensor in model.state_dict(keep_vars=True).items():
        path, _, last = name.rpartition(".")
        if not loaded(path):
            continue
        module = model.get_submodule(path)
        missing = not getattr(tensor, "_is_hf_initialized", False)
        if missing and (whole or module in base) and not optional(name):
            check.fail(name, "in the checkpoint", "no such tensor")
        dtypes = _dtypes_of(module)
        if last in dtypes:
            check.dtype(name, tensor, dtypes[last])
        elif last == "order" and isinstance(module, OrderedLinear):
            columns = torch.arange(module.in_features, dtype=torch.int32, device=tensor.device)
            if not torch.equal(tensor.sort().values, columns):
                check.fail(name, f"the numbers from 0 to {module.in_features - 1}", "others")
        elif isinstance(tensor, nn.Parameter) and not tensor.is_floating_point():
            check.fail(name, "of a floating-point dtype", str(tensor.dtype).removeprefix("torch."))


@torch.no_grad()
def check_scales(model: nn.Module, loaded: Callable[[str], bool]) -> None:
    """Checks the scales and biases of the quantised modules whose names are `loaded`.

    Raises: ValueError for NaN or infinity, as in a damaged file.

    Synchronizes once for all tensors.
    """
    result: dict[torch.device, dict[str, Tensor]] = {}
    for path, module in model.named_modules():
        for parameter, format in formats_in(module).items() if loaded(path) else ():
            for part in quantized_names(parameter)[1:]:
                tensor = getattr(module, part, None)
                finite = None if tensor is None or tensor.is_meta else _all_finite(tensor, format)
                if finite is not None:
                    result.setdefault(finite.device, {})[f"{path}.{part}"] = finite
    for of_device in result.values():
        told = torch.stack([*of_device.values()]).tolist()
        for name, finite in zip(of_device, told, strict=True):
            if not finite:
                Check("from_pretrained").fail(name, "finite", "NaN or inf")


def _all_finite(scales: Tensor, format: Format) -> Tensor | None:
    """True if all scales and biases are finite, a bool of no dimension; None if no code is NaN or inf.

    It sums them, which no range of scales exceeds.
    """
    if scales.numel() == 0 or (scales.dtype == torch.uint8 and format.scale_type != "e8m0"):
        return None
    if scales.dtype == torch.uint8:
        return scales.amax() < INFINITE_E8M0
    if not scales.is_floating_point():
        scales = scales.view(torch.float16 if scales.dtype == torch.int16 else torch.float32)
    return scales.sum(dtype=torch.float32).isfinite()


def may_lack(model: PreTrainedModel) -> Callable[[str], bool]:
    """Predicate of parameter names that a checkpoint may lack."""
    patterns = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def _dtypes_of(module: nn.Module) -> dict[str, tuple[torch.dtype, ...]]:
    """{name of a quantised tensor: the dtypes that are allowed}."""
    allowed: dict[str, tuple[torch.dtype, ...]] = {}
    for parameter, format in formats_in(module).items():
        packed, scales, biases = quantized_names(parameter)
        allowed |= {packed: (torch.int32,), scales: format.scale_dtypes, biases: format.zero_dtypes}
    return allowed
