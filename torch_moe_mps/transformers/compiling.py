"""Makes a model on mps ready for its first token: checks torch, aligns weights, compiles Metal libraries."""

import itertools
import sys
import time
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn

from .._extension import host_library, torch_version
from .._limits import KV_FORMATS
from .._versions import TORCH
from ..macs import refusal
from ..models.basics.interface import (
    codes_of,
    count_of,
    experts_in,
    is_experts,
    is_quantized,
    on_disk_of,
    weights_in,
    weights_of_experts,
)
from ..models.basics.state import KVBits, kv_bits_of
from ..models.modules.linears import formats_in
from ..ops._samples import FAMILY_OF
from ..ops.families.attention import CACHE_BITS
from ..selfcheck import tuner
from ..selfcheck.calls import DTYPES
from ..selfcheck.libraries import compile_side_by_side

SOFTMAX_HEADS = ("head_dim", "head_dim"), ("qk_head_dim", "v_head_dim")  # attributes of modules
WIDTHS = (64, 128, 256, 512)  # elements of values, the most that a library of attention takes
EXPERTS_OF_LANE = (2, 4, 8, 16, 32)  # the most that a library of routing takes
# The libraries of operators that do not run that of their family.
LIBRARY_OF = {
    "layer_norm": "norms_layer",
    "fused_residual_layer_norm": "norms_layer",
    "rms_norm_gated": "norms_gated",
    "router_logits": "routing_logits",
    **dict.fromkeys(("fused_norm_add", "fused_norm_add_scalar"), "norms_residual"),
    **dict.fromkeys(("fused_residual_norm", "fused_residual_norm_scalar"), "norms_residual"),
}
# {library of operators: that of what captured steps, or calls with 256 keys or more, run in addition}
FURTHER = {
    "norms": "norms_residual",
    "gated_delta_rule": "norms_gated",
    "routing": "routing_logits",
    "attention": "attention_merge",
}
OLDEST_TORCH = tuple(map(int, TORCH[0].split(".")))


def require_torch(function: str, model: nn.Module) -> None:
    """Raise the one-line error for a model on mps where torch's own operators are wrong, or abort."""
    if not any(weight.device.type == "mps" for weight in weights_in(model)):
        return
    if torch_version() < OLDEST_TORCH:
        raise RuntimeError(
            f"moe_mps::{function}: torch must be {TORCH[0]} or newer for a model on mps, got "
            f"{torch.__version__}: its own attention and linear layers give wrong results there "
            "(pytorch#174861, #180776, #195910)"
        )
    if reason := refusal():
        raise RuntimeError(f"moe_mps::{function}: {reason}")


def align_weights(model: nn.Module) -> None:
    """Lay weights on mps out as the kernels read them, or every call would copy them: packed ones on 16
    bytes, and dense experts whose inputs come first, as in gpt-oss, with the inputs of a row side by side."""
    for module in model.modules():
        experts = experts_in(module)
        is_placed = on_disk_of(module) is not None  # where it is read to must not move
        for parameter in () if experts is None or is_placed else experts.transposed(module):
            if parameter.device.type == "mps" and parameter.is_contiguous():
                parameter.data = parameter.data.mT.contiguous().mT
        for codes in codes_of(module).values():
            offset = codes.storage_offset() * codes.element_size()
            if codes.device.type == "mps" and codes.dtype == torch.int32 and offset % 16:
                codes.data = codes.data.clone()


def compile_kernels(model: nn.Module, operators: Collection[str] = (), strict: bool = True) -> str | None:
    """Compile what a model on mps will run: see libraries_of and compile_libraries."""
    if host_library() is None:
        return None
    return compile_libraries(libraries_of(model, operators), strict)


def compile_libraries(names: Iterable[str], strict: bool) -> str | None:
    """Compile libraries side by side. Returns: one line about it; None if nothing was left to do.

    With `strict` nothing is compared behind it: a library that does not compile raises RuntimeError with
    Metal's message.
    """
    new = [name for name in names if not torch.ops.moe_mps._is_built(name)]
    if not new:
        return None
    started = time.perf_counter()
    print(f"torch_moe_mps: compiling {len(new)} Metal libraries", file=sys.stderr, flush=True)
    findings = compile_side_by_side(new)
    if strict and findings:
        raise RuntimeError(findings[0].message)
    seconds = time.perf_counter() - started
    line = f"{len(new)} Metal libraries compiled in {seconds:.1f} s: {', '.join(new)}"
    print(f"torch_moe_mps: {line}", file=sys.stderr)
    return line


def tensor_libraries_of(model: nn.Module) -> list[str]:
    """The names of the libraries that would multiply the model's weights on mps on tensor units."""
    used: set[str] = set()
    for module, dtype in _on_mps(model):
        weights = [str(format) for format in formats_in(module).values()]
        if is_experts(module) and not is_quantized(module):
            weights = ["dense"]
        used.update(f"tensor_units_{name}_{dtype}" for name in weights)
    return [name for name in torch.ops.moe_mps._libraries(tensor_units=True) if name in used]


def libraries_of(model: nn.Module, operators: Collection[str] = ()) -> list[str]:
    """The libraries that the accelerated modules on mps run, for their weights and for `operators`, which
    were put in place of others.
    """
    files, found = _files_of(model, operators), set[str]()
    parts = ["", "joined_", "few_", "prompts_", *(["heads_"] if "heads" in files else [])]
    parts += ["variants_"] if tuner.is_wanted() else []
    for module, dtype in _on_mps(model):
        weights = {*_libraries_of_weights(module, dtype, parts)}
        if not weights:
            continue
        found |= weights
        found.update(f"{file}_{dtype}" for file in files)
        if "router_logits" in operators:
            found.update(f"{file}_f32" for file in files if file.removeprefix("routing_").isdigit())
        bits = kv_bits_of(model)
        if bits is not None and any(file.startswith("attention_") for file in files):
            found.update(cache_libraries(model, dtype, bits))
    return [name for name in torch.ops.moe_mps._libraries() if name in found]


def _libraries_of_weights(module: nn.Module, dtype: str, parts: Iterable[str]) -> Iterator[str]:
    """Libraries that multiply the weights of experts, and of quantised layers."""
    for format in formats_in(module).values():
        yield from (f"quantized_{part}{format}_{dtype}" for part in parts)
    if (experts := experts_in(module)) is not None:
        yield from (f"bucket_{ids}" for ids in experts.code.types_of_ids)
        if not experts.is_packed:
            yield f"experts_{dtype}"


def _files_of(model: nn.Module, operators: Collection[str]) -> set[str]:
    """Libraries of operators, without dtypes."""
    files = {LIBRARY_OF.get(name, FAMILY_OF[name]) for name in operators}
    further = {FURTHER[file] for file in files & FURTHER.keys()}
    widths = attention_widths(model) if "attention" in files else []
    if "rope" in files:
        further |= {f"attention_turned_{width}" for width in widths}
    routing = routing_libraries(_numbers_of_experts(model)) if "routing" in files else []
    return files | further | {*routing, *(f"attention_{width}" for width in widths)}


def _numbers_of_experts(model: nn.Module) -> set[int]:
    return {count_of(module) for module, _ in _on_mps(model) if is_experts(module)}


def routing_libraries(experts: Iterable[int]) -> list[str]:
    """The names, without a dtype, of the libraries of routers that choose among so many experts."""
    widths = {next((n for n in EXPERTS_OF_LANE if 32 * n >= count), None) for count in experts}
    return [f"routing_{width}" for width in widths if width is not None]


def head_widths(model: nn.Module, keys: str, values: str) -> set[tuple[int, int]]:
    """Widths of heads of keys and of values, as far as modules have attributes of these names."""
    pairs = ((getattr(module, keys, None), getattr(module, values, None)) for module in model.modules())
    return {(k, v) for k, v in pairs if isinstance(k, int) and isinstance(v, int)}


def attention_widths(model: nn.Module) -> list[int]:
    """Widths of the attention libraries for heads that modules name; others compile at their first call."""
    values = [v for names in SOFTMAX_HEADS for _, v in head_widths(model, *names) if v <= WIDTHS[-1]]
    return sorted({min(width for width in WIDTHS if v <= width) for v in values})


def cache_libraries(model: nn.Module, dtype: str, bits: KVBits) -> list[str]:
    """The names of the libraries that write and read keys and values of so many bits; none for 16."""
    writes, reads = "write_cache", ["attention_{}_affine8"]
    if bits in KV_FORMATS:  # latents share the bits of keys
        key_bits, value_bits = KV_FORMATS[bits]
        formats = dict.fromkeys((f"k{key_bits}v{value_bits}", f"k{key_bits}v{key_bits}"))
        writes, reads = "tiles_seal", [f"tiles_{{}}_{name}" for name in formats]
    elif bits != CACHE_BITS:
        return []
    widths = attention_widths(model)
    return [f"{writes}_{dtype}", *(f"{file.format(width)}_{dtype}" for file in reads for width in widths)]


def _on_mps(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """(module, dtype of its activations) of the modules with parameters of their own on mps, and of experts.

    The dtype comes from the module's weights or scales, or else from the model.
    """
    for module in model.modules():
        weights = weights_of_experts(module) if is_experts(module) else [*weights_in(module, recurse=False)]
        if weights and weights[0].device.type == "mps":
            every = itertools.chain(weights, model.parameters())
            dtype = next((DTYPES[p.dtype] for p in every if p.dtype in DTYPES), None)
            if dtype is not None:
                yield module, dtype
