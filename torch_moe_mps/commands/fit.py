"""`fit NAME`: which Macs hold a model in which number of bits, and how fast it can be at most.

config.json is enough: a model on the meta device has the shapes of the weights and of the KV cache.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._limits import KV_BITS, LARGEST_CHUNK
from .._text import aligned, fitted, unit_of
from ..checkpoints.absent import leave_out
from ..checkpoints.layouts.files import checkpoint_files
from ..checkpoints.mtp import bytes_of_mtp, empty_mtp
from ..checkpoints.own.config import QuantizationConfig
from ..checkpoints.quantize.decision import weights_of
from ..checkpoints.quantize.recipe import (
    SAME,
    Recipe,
    recipe_of,
    requested_recipe,
)
from ..checkpoints.quantize.sizes import (
    bytes_a_token,
    bytes_of_experts,
    prompt_bytes,
    quantized_sizes,
    total_bytes,
)
from ..checkpoints.quantize.target import Target
from ..checkpoints.quantizer import layout_of
from ..checkpoints.source import Source
from ..macs import BANDWIDTHS, GIB, MEMORIES, Mac, this_mac, wired_limit
from ..models.programs import KVCache
from ..ops._checks import Check
from ..pipeline.loop import find_loop
from ..pipeline.shares import shares_that_fit
from ..quantization import Format
from ..serving.prefix_cache.memory import LONGEST
from ..serving.speculative import LOOKUP
from ..transformers import experts_of
from . import residency
from .recipes import NAMED, arguments_of_recipe
from .results import write_json
from .sources import context_of, folder_of, skeleton_of

BITS = (8, 6, 5, 4, 3, 2)
_RECOMMENDED = (8, 6, 4)  # the ones that quality hardly suffers from (docs/quality.md)
_WIDE, _DENSE, _STORED = "32 bit", "16 bit", "as it is"
_CHECK = Check("fit")
# {--kv-bits: how a line names a cache with them}
_IN_BITS = {4: " in 4 bits", "k4v2": " with keys in 4 bits and values in 2", 8: " in 8 bits", 16: ""}
Caches = Mapping[int | str, KVCache]


_READ_IN_PLACE = (
    "With --experts-memory the experts are read from the GGUF file itself, and no other file is written; "
    "with --bits or --recipe they need a file of their own."
)


@dataclass
class Size:
    """A model in one format: its name, bytes of all weights, bytes of weights that a token reads.

    `quantized` has the bytes of each weight that is quantised, `targets` what they are of, and `drafts`
    the bytes of MTP layers beside it.
    """

    name: str
    weights: int
    token: int
    quantized: Mapping[torch.Tensor, int]
    targets: Sequence[Target] = ()
    speculative: int = 0

    def of(self, module: nn.Module) -> int:
        return bytes_of_experts(module, self.quantized)


def run(options: argparse.Namespace) -> None:
    """Raises: ValueError, OSError with a one-line message."""
    mac = this_mac() if options.mac else None
    folder = folder_of(options.model, options.revision, weights=False)
    source, model = skeleton_of(options, folder)
    stored = stored_targets(source, model, folder)
    sizes = sizes_of(model, options.group_size)
    if stored is not None:
        sizes.insert(0, _size(_STORED, model, stored))
    names = list(NAMED) if experts_of(model) else []  # elsewhere they are numbers of bits
    if options.recipe is not None and options.recipe not in names:
        sizes.insert(0, of_recipe(model, options.recipe, options.group_size))
    sizes += [of_recipe(model, name, options.group_size) for name in names]
    caches = KVCache.by_bits(model)
    with_mtp = _with_mtp(options, model, folder, sizes, caches)
    if options.macs is not None:
        text, data = spread(model, sizes, options.macs, _of_bits(caches, options.kv_bits))
    else:
        name = options.model
        text, data = report(name, model, sizes, options.context, mac, options.kv_bits, caches, with_mtp)
        if source.gguf is not None and "on_disk" in data:
            text = f"{text}\n\n{_in_terminal([_READ_IN_PLACE])}"
    print(text)
    write_json(options.json, {"model": options.model, "kv_bits": options.kv_bits, **data})


def report(
    name: str,
    model: Any,
    sizes: Sequence[Size],
    context: int,
    mac: Mac | None,
    kv_bits: int | str,
    caches: Caches | None,
    with_mtp: Caches | None,
) -> tuple[str, dict[str, Any]]:
    """The tables, for all Macs or for one, and the numbers in them."""
    cache = _of_bits(caches, kv_bits)
    prompt, total = prompt_bytes(model, LARGEST_CHUNK), sum(p.numel() for p in model.parameters())
    longest = context_of(model.config)
    limits = _limits(mac)
    by_bits = {
        bits: {
            mac_name: [
                _context(_of_bits(with_mtp, bits), limit - prompt - s.weights - s.speculative, longest)
                for s in sizes
            ]
            for mac_name, limit in limits
        }
        for bits in KV_BITS
    }
    contexts = by_bits[kv_bits]
    usual = next((s for s in sizes if s.name in (_STORED, "4 bit")), sizes[0])
    bandwidth = None if mac is None else mac.bandwidth
    on_disk, numbers = residency.table(model, [usual] if mac is None else sizes, limits, bandwidth)
    bounds, numbers_of_bounds = _of_bounds(mac, cache, context, sizes)
    lines = [
        *_recommended(name, sizes, contexts, min(context, longest)),
        "",
        f"{type(model).__name__}, {total / 1e9:.2f} billion weights",
        *_of_cache(cache, kv_bits),
        f"a prompt takes at most {prompt / 1e9:.3f} GB for {LARGEST_CHUNK:,} tokens, which are read at once",
        *("", *_of_sizes(sizes, total)),
        *("", *_of_contexts(sizes, limits, contexts)),
        *_of_kv_bits(sizes, caches, by_bits),
        *("", _more_for_the_gpu(mac)),
        *(*on_disk, "", *bounds),
    ]
    names = [size.name for size in sizes]
    data = {
        "weights": total,
        "kv_cache": None if cache is None else _bytes_of(cache),
        "kv_cache_by_kv_bits": {str(bits): _bytes_of(each) for bits, each in (caches or {}).items()},
        "prompt": {"tokens": LARGEST_CHUNK, "bytes": prompt},
        "sizes": _numbers_of_sizes(sizes),
        "macs": [
            {
                "name": mac_name,
                "gpu": limit,
                "contexts": dict(zip(names, contexts[mac_name], strict=True)),
                "contexts_by_kv_bits": {
                    str(bits): dict(zip(names, fits[mac_name], strict=True)) for bits, fits in by_bits.items()
                },
            }
            for mac_name, limit in limits
        ],
    }
    return _in_terminal(lines), data | numbers_of_bounds | numbers


def _in_terminal(lines: Sequence[str]) -> str:
    """The lines within the terminal's width; a command stays one line, so that it can be pasted."""
    parts = [part for line in lines for part in line.split("\n")]
    commands = ("sudo ", "torch-moe-mps ")
    return "\n".join(
        shown for part in parts for shown in ([part] if part.startswith(commands) else fitted([part]))
    )


def _recommended(
    name: str, sizes: Sequence[Size], contexts: Mapping[str, Sequence[int | bool | None]], context: int
) -> list[str]:
    """Lines that recommend the most bits with which each Mac holds the context at nearly full quality."""
    stored = [size for size in sizes if size.name == _STORED]
    asked = {f"{bits} bit": f"--bits {bits}" for bits in _RECOMMENDED} | {"small": "--recipe small"}
    places = {size.name: i for i, size in enumerate(sizes) if size.name in asked or size in stored}
    formats = [_STORED] if stored else [each for each in asked if each in places]
    least: dict[str, str] = {}  # {Mac: the first format that fits it and no smaller one}
    for format in formats:
        if (mac := _smallest(contexts, places[format], context)) is not None:
            least.setdefault(mac, format)
    tokens = f"a context of {context:,} tokens"
    if not least:
        lowest = "it" if stored else f"it in {min(_RECOMMENDED)} bits"
        return [f"Recommended: more memory; none of these Macs holds {lowest} with {tokens}, see below"]
    macs = ", ".join(
        f"{'as it is' if stored else format} {'on' if mac.startswith('this') else 'from'} {mac}"
        for mac, format in least.items()
    )
    lines = [f"Recommended, with {tokens}: {macs}"]
    if not stored:
        lines.append(f"torch-moe-mps convert {name} DST {asked[next(iter(least.values()))]}")
    return lines


def _smallest(contexts: Mapping[str, Sequence[int | bool | None]], place: int, context: int) -> str | None:
    """The smallest Mac that holds the context with the size at a place; None if none does."""
    return next((mac for mac, fits in contexts.items() if _holds(fits[place], context)), None)


def _holds(fits: int | bool | None, context: int) -> bool:
    return fits is None or fits is True or (fits is not False and fits >= context)


def _limits(mac: Mac | None) -> list[tuple[str, int]]:
    """Names of all Macs, or of one, and the bytes that macOS lets the GPU have."""
    if mac is not None:
        return [(f"this Mac, {mac.memory // GIB} GB", mac.limit)]
    return [(f"{gib} GB", wired_limit(gib)) for gib in MEMORIES]


def _of_sizes(sizes: Sequence[Size], total: int) -> list[str]:
    """The table of a model's sizes, and the lines about recipes and drafting layers."""
    size, unit = unit_of(total)
    cells = [[s.name, f"{s.weights / size:.1f}", f"{s.token / size:.2f}"] for s in sizes]
    lines = aligned([["weights", unit, f"{unit} read for a token"], *cells], 1)
    if any(s.name in NAMED for s in sizes):
        lines += ["", f"{', '.join(NAMED)}: convert --recipe NAME"]
    if _has_mtp(sizes):
        drafts = ", ".join(f"{s.speculative / size:.2f} ({s.name})" for s in sizes)
        lines += ["", f"chat and serve load layers of the checkpoint for drafts, of {drafts} {unit};"]
        lines += [f"contexts below have room for that and its cache. --speculative {LOOKUP} takes no memory."]
    return lines


def _numbers_of_sizes(sizes: Sequence[Size]) -> list[dict[str, Any]]:
    return [
        {"name": s.name, "bytes": s.weights, "bytes_a_token": s.token}
        | ({"speculative": s.speculative} if _has_mtp(sizes) else {})
        for s in sizes
    ]


def _has_mtp(sizes: Sequence[Size]) -> bool:
    return any(s.speculative for s in sizes)


def _of_contexts(
    sizes: Sequence[Size],
    limits: Sequence[tuple[str, int]],
    contexts: Mapping[str, Sequence[int | bool | None]],
) -> list[str]:
    """The table of the contexts that fit on each Mac."""
    cells = [[name, f"{limit / 1e9:.1f}", *map(_in_words, contexts[name])] for name, limit in limits]
    lines = ["Context that fits what macOS lets the GPU have, in tokens, with room to grow:"]
    return [*lines, *aligned([["Mac", "GPU's GB", *(size.name for size in sizes)], *cells], 1)]


def _of_kv_bits(
    sizes: Sequence[Size],
    caches: Caches | None,
    contexts: Mapping[int | str, Mapping[str, Sequence[int | bool | None]]],
) -> list[str]:
    """The table of the contexts that fit with each --kv-bits, of the largest weights where these differ."""
    if caches is None or not caches[16].token:
        return []
    order = sorted(caches, key=lambda bits: -caches[bits].token)
    rows = [["GB for each 1,000 tokens", "", *(f"{caches[bits].token * 1000 / 1e9:.3f}" for bits in order)]]
    for mac in contexts[16]:
        fits = [[contexts[bits][mac][place] for bits in order] for place in range(len(sizes))]
        places = [place for place in range(len(sizes)) if len({*map(_in_words, fits[place])}) > 1]
        if places:
            place = max(places, key=lambda place: sizes[place].weights)
            rows.append([mac, sizes[place].name, *map(_in_words, fits[place])])
    lines = ["", "Context that fits by --kv-bits, for the largest weights where it differs, in tokens:"]
    return [*lines, *aligned([["--kv-bits", "weights", *map(str, order)], *rows], 2)]


def _of_bounds(
    mac: Mac | None, cache: KVCache | None, context: int, sizes: Sequence[Size]
) -> tuple[list[str], dict[str, Any]]:
    """Upper bounds of tokens/s by the bandwidth of memory, and the numbers in them."""
    chips = _chips(mac)
    if not chips and mac is not None:
        return [f"The memory bandwidth of the {mac.chip} is not known here."], {}
    names = [size.name for size in sizes]
    bounds = {name: [bound(size, cache, context, gbs) for size in sizes] for name, gbs in chips}
    cells = [[name, *(f"{value:.0f}" for value in values)] for name, values in bounds.items()]
    lines = [
        f"Upper bound of tokens/s at a context of {context:,} tokens. No measurement:",
        "nothing can be faster, because each token reads these weights and the KV cache;",
        "real speed is lower.",
        *aligned([["chip", *names], *cells], 1),
    ]
    return lines, {"bounds": {name: dict(zip(names, values, strict=True)) for name, values in bounds.items()}}


def _with_mtp(
    options: argparse.Namespace, model: Any, folder: str, sizes: Sequence[Size], caches: Caches | None
) -> Caches | None:
    """The caches of the model and of its MTP layers, which draft; adds their bytes to the sizes."""
    layers = empty_mtp(model, folder)
    if layers is None or options.macs is not None:
        return caches
    for size in sizes:
        size.speculative = bytes_of_mtp(layers, model, size.targets)
    return KVCache.by_bits(model, len(layers.layers))


def _of_bits(caches: Caches | None, kv_bits: int | str) -> KVCache | None:
    return None if caches is None else caches[kv_bits]


def _of_cache(cache: KVCache | None, kv_bits: int | str) -> list[str]:
    if cache is None:
        return ["KV cache: unknown; the model's code does not run on shapes alone"]
    per_thousand = f"{cache.token * 1000 / 1e9:.3f} GB for each 1,000 tokens of context"
    lines = [f"KV cache{_IN_BITS[kv_bits]}: {per_thousand}"]
    if rest := _rest_of(cache):
        of_drafts = f", and {cache.beside / 1e9:.3f} GB where drafts are taken back" if cache.beside else ""
        what = "sliding windows, states and tokens in 16 bits" if cache.tile else "sliding windows and states"
        lines.append(f"beside it, {what} take at most {rest / 1e9:.3f} GB{of_drafts}")
    return lines


def _bytes_of(cache: KVCache) -> dict[str, int]:
    return {"bytes_a_token": cache.token, "rest": _rest_of(cache), "speculative": cache.beside}


def _rest_of(cache: KVCache) -> int:
    """Bytes of the longest context that do not grow with each token."""
    return cache.at(LONGEST) - cache.token * LONGEST


def _chips(mac: Mac | None) -> list[tuple[str, float]]:
    """Names and GB/s of all chips, or of the one of a Mac, where that is known."""
    if mac is None:
        return [(f"{name}, {gbs:.0f} GB/s", gbs) for name, gbs in BANDWIDTHS.items()]
    known = mac.bandwidth
    return [] if known is None else [(f"{mac.chip}, {known:.0f} GB/s", known)]


def _more_for_the_gpu(mac: Mac | None) -> str:
    """Line on how to raise macOS's limit of GPU memory."""
    if mac is not None and mac.memory - 8 * GIB <= mac.limit:
        return "macOS lets the GPU have all but 8 GiB, which other programs need."
    here = "$(( $(sysctl -n hw.memsize) / 1048576 - 8192 ))"  # computed on the Mac where it is pasted
    limit = here if mac is None else (mac.memory - 8 * GIB) >> 20
    command = f"sudo sysctl iogpu.wired_limit_mb={limit}"
    return f"This lets the GPU have all but 8 GiB until the next start:\n{command}"


def spread(
    model: Any, sizes: Sequence[Size], macs: Sequence[int], cache: KVCache | None
) -> tuple[str, dict[str, Any]]:
    """The table for several Macs that share the layers, and its numbers; `macs` has the GB of each.

    Raises: ValueError for a model whose layers cannot be spread.
    """
    prompt = prompt_bytes(model, LARGEST_CHUNK)
    limits, longest = [wired_limit(gib) - prompt for gib in macs], context_of(model.config)
    layers = model.get_submodule(find_loop(model).layers)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        shares, parts, room = shares_that_fit(model, layers, size.of, size.weights, limits)
        context = _context(cache, room, longest)
        rows.append({"name": size.name, "layers": shares, "bytes": parts, "context": context})
    cells = [
        [row["name"], _sum(row["layers"]), _in_gb(row["bytes"]), _in_words(row["context"])] for row in rows
    ]
    gpu = _in_gb(map(wired_limit, macs))
    lines = [
        f"{type(model).__name__} on Macs of {_sum(macs)} GB, {gpu} GB for the GPU (docs/distributed.md)",
        f"a prompt takes at most {prompt / 1e9:.3f} GB of it on each",
        "",
    ]
    table = aligned([["weights", "layers", "GB", "context that fits"], *cells], 1)
    return _in_terminal([*lines, *table]), {"macs": [*macs], "spread": rows}


def _sum(parts: Iterable[object]) -> str:
    return " + ".join(map(str, parts))


def _in_gb(sizes: Iterable[int]) -> str:
    return _sum(f"{size / 1e9:.1f}" for size in sizes)


def bound(size: Size, cache: KVCache | None, context: int, bandwidth: float) -> float:
    """Tokens a second that a memory bandwidth in GB/s allows."""
    return bandwidth * 1e9 / (size.token + (cache.at(context) if cache else 0))


def sizes_of(model: Any, group_size: int | None) -> list[Size]:
    """The dense model in 16 bits, if its weights are float32 in 32 as well, and in each number of bits."""
    formats = [Format(bits, group_size) for bits in BITS]
    wide = [weight for weight in model.parameters() if weight.dtype is torch.float32 is model.dtype]
    return [
        *([_size(_WIDE, model, ())] if wide else []),
        _sized(_DENSE, model, {weight: 2 * weight.numel() for weight in wide}),
        *(_size(f"{format.bits} bit", model, _targets(model, recipe_of(format))) for format in formats),
    ]


def stored_targets(source: Source, model: Any, folder: str) -> Iterable[Target] | None:
    """Quantised weights of a checkpoint loaded unchanged; parts that it lacks are left out of the model.

    None for a checkpoint that loads in 16 bits, and for another library's without its files.
    """
    stored = source.quantization(None)
    if stored is None:
        return None
    told_by_files = bool({"mlx", "other", "gguf"} & stored.keys())
    files = _files(folder) if told_by_files else []
    if files or not told_by_files:
        layout = layout_of(QuantizationConfig(**stored), model, files)
        leave_out(model, layout.absent)
        return layout.targets.values()
    if not stored.get("mlx"):
        return None
    usual: dict[str, Any] = {key: stored["mlx"].get(key) for key in ("bits", "group_size", "mode")}
    return _targets(model, requested_recipe(**usual, linear_bits=SAME, embedding_bits=SAME))


def _files(folder: str) -> list[str]:
    """Files of the weights, or a GGUF file itself; none where not all of them are there."""
    if Path(folder).is_file():
        return [folder]
    try:
        return [str(file) for file in checkpoint_files(folder)]
    except ValueError:
        return []


def of_recipe(model: Any, recipe: str, group_size: int | None) -> Size:
    """The model with a mixed recipe, or one in a file."""
    arguments = arguments_of_recipe(recipe, model, group_size=group_size)
    asked = requested_recipe(**arguments) or Recipe(None)
    return _size(Path(recipe).stem, model, _targets(model, asked))


def _targets(model: Any, recipe: Any) -> Iterable[Target]:
    targets = weights_of(model, recipe).targets.values()
    for target in targets:
        target.check_columns(_CHECK)
    return targets


def _size(name: str, model: Any, targets: Iterable[Target]) -> Size:
    targets = [*targets]
    return replace(_sized(name, model, quantized_sizes(targets)), targets=targets)


def _sized(name: str, model: Any, after: Mapping[torch.Tensor, int]) -> Size:
    """The model with the bytes of some weights."""
    return Size(name, total_bytes(model, after), bytes_a_token(model, after), after)


def _context(cache: KVCache | None, room: int, longest: int) -> int | bool | None:
    """Number of tokens that fit, at most the model's context; None for any number.

    Of an unknown cache whether the weights fit.
    """
    if room < 0 or cache is None:
        return room >= 0
    tokens = cache.tokens_in(room, longest)
    return None if tokens == LONGEST else tokens


def _in_words(context: int | bool | None) -> str:
    if context is None:
        return "any"
    if isinstance(context, bool):
        return "fits" if context else "-"
    return f"{context:,}"
