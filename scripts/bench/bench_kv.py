#!/usr/bin/env python
"""Measures what fewer bits of a KV cache cost, token by token: the table of docs/quality_kv.md.

    python scripts/bench/train_moe.py texts build/moe
    python scripts/bench/train_moe.py train build/moe --size long
    python scripts/bench/bench_kv.py build/moe/model build/moe/held.bin --device cuda --json build/kv.json

A model answers a text by its own samples, and a row of the batch for each format of the cache reads these
tokens. Each row's next token is compared with that of a cache in float32: the KL divergence in nats, and how
often the likeliest token is the same, over the last quarter of the tokens before each mark. Errors accumulate
as they do in a conversation, since each row's keys and values come from what it read in its own cache.

`--outliers` multiplies channels of the keys by factors of up to --outliers, and divides those of the queries:
the same model in float32, with keys as the norms of published models make them.
`--numbers` asks for numbers that lie in a text of so many tokens, and counts the exact answers.
"""

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paths  # noqa: F401
import torch
from torch import Tensor
from train_moe import Statements
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicLayer

TILE = 128
PROMPT = 256  # tokens
SCALE_BITS = 16
LEAST_DEVIATION = 0.01  # of a tile's root mean square: a channel that all tokens have alike is no unit
LEAST_CHANNEL = 0.03  # of the root mean square of the deviations of a tile's channels

Round = Callable[[Tensor], Tensor]  # [..., TILE, D] -> the values that the cache would give


def affine(x: Tensor, bits: int, dim: int, group: int) -> Tensor:
    """Values of codes between a group's least and largest, whose scale and zero point have 16 bits."""
    x = x.transpose(dim, -1)
    groups = x.unflatten(-1, (-1, min(group, x.shape[-1])))
    low, high = groups.amin(-1, True), groups.amax(-1, True)
    scale = ((high - low) / (2**bits - 1)).half().float()
    low = low.half().float()
    codes = ((groups - low) / scale.clamp_min(1e-12)).round().clamp(0, 2**bits - 1)
    return (codes * scale + low).flatten(-2).transpose(dim, -1)


@functools.cache
def hadamard(width: int, device: torch.device) -> Tensor:
    """The normalised Hadamard matrix of a power of two, which is its own inverse."""
    result = torch.ones(1, 1, device=device)
    while len(result) < width:
        result = torch.cat((torch.cat((result, result), 1), torch.cat((result, -result), 1)))
    return result / width**0.5


def balanced(x: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Factors of rows and of columns that leave both with equal deviations, found by turns."""
    rows, columns = torch.ones_like(x[..., :1]), torch.ones_like(x[..., :1, :])
    least = LEAST_DEVIATION * x.square().mean((-2, -1), keepdim=True).sqrt().clamp_min(1e-20)
    for _ in range(iterations):
        columns = (x / rows).std(-2, keepdim=True).maximum(least)
        rows = (x / columns).std(-1, keepdim=True).clamp_min(LEAST_DEVIATION)
    return rows, columns


def rotated(function: Round) -> Round:
    """`function` between a rotation of the head's width and its inverse."""

    def turn(x: Tensor) -> Tensor:
        matrix = hadamard(x.shape[-1], x.device)
        return function(x @ matrix) @ matrix

    return turn


def tiled(bits: int, iterations: int) -> Round:
    """A tile of 128 tokens: a factor for each token, a scale and a zero point for each channel."""

    def quantize(x: Tensor) -> Tensor:
        rows, _ = balanced(x, iterations) if iterations else (torch.ones_like(x[..., :1]), None)
        rows = rows.half().float()
        return affine(x / rows, bits, -2, TILE) * rows

    return quantize


def tokenwise(bits: int, iterations: int) -> Round:
    """A tile of 128 tokens: a factor for each channel, a scale and a zero point for each token."""

    def quantize(x: Tensor) -> Tensor:
        _, columns = balanced(x, iterations)
        columns = columns.half().float()
        return affine(x / columns, bits, -1, x.shape[-1]) * columns

    return quantize


def with_factors(bits: int) -> Round:
    """A tile of 128 tokens as it is built: a token's factor is the root of its mean square."""

    def quantize(x: Tensor) -> Tensor:
        factors = x.square().mean(-1, keepdim=True).sqrt().half().float()
        factors = torch.where(factors == 0, 1.0, factors)
        return affine(x / factors, bits, -2, TILE) * factors

    return quantize


def by_channels(bits: int, centred: bool, x: Tensor, tile: Tensor) -> Tensor:
    """Groups along the head, of channels in the units of those of a `tile` before these tokens."""
    means = tile.mean(-2, keepdim=True) if centred else torch.zeros_like(tile[..., :1, :])
    units = (tile - means).square().mean(-2, keepdim=True).sqrt()
    least = LEAST_CHANNEL * units.square().mean(-1, keepdim=True).sqrt()
    means, units = means.half().float(), units.maximum(least).clamp_min(1e-4).half().float()
    return affine((x - means) / units, bits, -1, x.shape[-1]) * units + means


def along(bits: int, group: int) -> Round:
    """Groups along the head: a token's codes need no other token's."""
    return lambda x: affine(x, bits, -1, group)


@functools.cache
def rounding(kind: Callable[..., Round], turn: bool, *arguments: int) -> Round:
    """The same function for the same arguments."""
    return rotated(kind(*arguments)) if turn else kind(*arguments)


class Format(NamedTuple):
    """How keys and values are rounded, and the bits that an element of each has for a head of 128."""

    keys: Callable[..., Tensor] | None  # a Round, or one that also gets the tile of `units`
    values: Callable[..., Tensor] | None
    bits: tuple[float, float]
    sinks: int = 0  # tokens at the beginning that stay as they are
    tile: int = TILE  # the last tokens stay as they are until so many are there
    units: str | None = None  # the tile whose channels give the units: "first" or "previous"


def per_token(bits: tuple[int, int], groups: tuple[int, int], turn: bool = False, **more: int) -> Format:
    keys, values = (rounding(along, turn, *each) for each in zip(bits, groups, strict=True))
    share = tuple(each + 2 * SCALE_BITS / group for each, group in zip(bits, groups, strict=True))
    return Format(keys, values, share, **{"tile": 1, **more})  # type: ignore[arg-type]


def in_tiles(bits: tuple[int, int], iterations: int, turn: bool = True, **more: Any) -> Format:
    factors = (2 if not iterations else 3) * SCALE_BITS / TILE
    keys, values = (rounding(tiled, turn, each, iterations) for each in bits)
    kinds = {"keys": keys, "values": values, "bits": tuple(each + factors for each in bits)}
    return Format(**{**kinds, "sinks": TILE, **more})


def as_built(keys: int, values: int) -> Format:
    """The cache of `--kv-bits 4` and `k4v2`."""
    bits = (keys + 2 * SCALE_BITS / TILE, values + 3 * SCALE_BITS / TILE)
    return Format(rounding(tiled, False, keys, 0), with_factors(values), bits, sinks=TILE)


def in_units(units: str, keys: Callable[..., Tensor], values: Callable[..., Tensor]) -> Format:
    """4 bits, a scale and a zero point for each token, of channels in units of an earlier tile."""
    share = 4 + 2 * SCALE_BITS / 128
    return Format(keys, values, (share, share), sinks=TILE, tile=1, units=units)


def as_half(x: Tensor) -> Tensor:
    return x.bfloat16().float()


FORMATS = {
    "float32": Format(None, None, (32, 32)),
    "16": Format(as_half, as_half, (16, 16), tile=1),
    "8": per_token((8, 8), (128, 128)),
    "4": per_token((4, 4), (32, 32)),
    "4 rotated, groups of 32": per_token((4, 4), (32, 32), turn=True),
    "4 rotated": per_token((4, 4), (128, 128), turn=True),
    "4 rotated, sinks and tail": per_token((4, 4), (128, 128), turn=True, sinks=TILE, tile=TILE),
    "8/4": per_token((8, 4), (128, 128)),
    "8/4 rotated": per_token((8, 4), (128, 128), turn=True),
    "tiles 4/4, not rotated, no factors": in_tiles((4, 4), 0, turn=False),
    "tiles 4/4, no factors": in_tiles((4, 4), 0),
    "tiles 4/4, 1 iteration": in_tiles((4, 4), 1),
    "tiles 4/4, 4 iterations": in_tiles((4, 4), 4),
    "tiles 4/4": in_tiles((4, 4), 16),
    "tiles 4/4, not rotated": in_tiles((4, 4), 16, turn=False),
    "tiles 4/4, no sinks": in_tiles((4, 4), 16, sinks=0),
    "tiles 4/4, values by tokens": in_tiles((4, 4), 16, values=rotated(tokenwise(4, 16))),
    "tiles 4/4, values rotated": in_tiles((4, 4), 16, keys=tiled(4, 16)),
    "tiles 4/2, not rotated": in_tiles((4, 2), 16, turn=False),
    "tiles 4/2, values rotated": in_tiles((4, 2), 16, keys=tiled(4, 16)),
    "tiles 4/2, not rotated, no factors": in_tiles((4, 2), 0, turn=False),
    "tiles 4/2": in_tiles((4, 2), 16),
    "tiles 4/2, 1 iteration": in_tiles((4, 2), 1),
    "tiles 4/2, values by tokens": in_tiles((4, 2), 16, values=rotated(tokenwise(2, 16))),
    "4/2 rotated, groups of 32": per_token((4, 2), (128, 32), turn=True),
    "tiles 4/4, as built": as_built(4, 4),
    "tiles 4/2, as built": as_built(4, 2),
    "channels of the first tile, 4/4": in_units(
        "first", functools.partial(by_channels, 4, False), lambda x, tile: affine(x, 4, -1, 128)
    ),
    "channels of the previous tile, 4/4": in_units(
        "previous", *2 * [functools.partial(by_channels, 4, True)]
    ),
}  # fmt: skip


class Layer(DynamicLayer):
    """Keys and values of float32 in which a row of the batch has what its format gives."""

    def __init__(self, formats: list[Format], length: int):
        super().__init__()
        self.formats, self.room, self.tokens = formats, length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, width = key_states.shape
        self.buffers = key_states.new_zeros((2, batch, heads, self.room, width))
        self.device, self.dtype, self.is_initialized = key_states.device, key_states.dtype, True

    def get_seq_length(self) -> int:
        return self.tokens

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before, self.tokens = self.tokens, self.tokens + key_states.shape[2]
        self.buffers[0, :, :, before : self.tokens] = key_states
        self.buffers[1, :, :, before : self.tokens] = value_states
        keys, values = self.buffers[:, :, :, : self.tokens]
        if self.tokens - before > 1:  # a prompt reads its own keys as they are
            keys, values = keys.clone(), values.clone()
        self.seal(before)
        return keys, values

    def seal(self, before: int) -> None:
        """Rounds the tiles that are full now and were not `before`; the rows repeat the formats."""
        for row, each in enumerate(self.formats):
            start = max(before // each.tile * each.tile, each.sinks)
            end = self.tokens // each.tile * each.tile
            if start >= end:
                continue
            states = self.buffers[:, row :: len(self.formats)]
            if each.units is None:
                part = states[:, :, :, start:end]
                part.copy_(rounded(each, part.unflatten(3, (-1, each.tile))).flatten(3, 4))
                continue
            for own in range(start // TILE * TILE, end, TILE):
                first = 0 if each.units == "first" else own - TILE
                part = states[:, :, :, max(start, own) : min(own + TILE, end)]
                part.copy_(rounded(each, part, states[:, :, :, first : first + TILE]))


def rounded(format_: Format, states: Tensor, *tile: Tensor) -> Tensor:
    """Keys and values [2, ..., D] as the cache would give them."""
    if format_.keys is format_.values:
        return states if format_.keys is None else format_.keys(states, *tile)
    functions = (format_.keys, format_.values)
    return torch.stack(
        [
            one[0] if function is None else function(*one)
            for function, *one in zip(functions, states, *tile, strict=True)
        ]
    )


def cache_of(model: Any, formats: list[Format], length: int) -> Cache:
    return Cache(layers=[Layer(formats, length) for _ in range(model.config.num_hidden_layers)])


def run_experts(model: Any, implementation: str) -> None:
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation(implementation)


def give_outliers(model: Any, largest: float) -> None:
    """Multiplies channels of the keys by factors up to `largest`, and divides those of the queries."""
    generator = torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        attention = layer.self_attn
        width = attention.head_dim
        half = torch.rand(width // 2, generator=generator).pow(6)  # few are large
        factors = (1 + (largest - 1) * half).repeat(2).to(attention.k_proj.weight)
        if hasattr(attention, "k_norm"):
            attention.k_norm.weight.data *= factors
            attention.q_norm.weight.data /= factors
        else:
            for linear, own in ((attention.k_proj, factors), (attention.q_proj, 1 / factors)):
                rows = linear.weight.data
                rows *= own.repeat(len(rows) // width)[:, None]


@torch.no_grad()
def decoded(model: Any, texts: Tensor, formats: list[Format], marks: list[int]) -> list[dict[str, Any]]:
    """For each mark: KL divergence and equal tops of each format, means of all texts [N, T]."""
    count, prompt = texts.shape
    cache = cache_of(model, formats, marks[-1] + 1)
    ids = texts.repeat_interleave(len(formats), 0)
    generator = torch.Generator(texts.device).manual_seed(0)
    shape = (marks[-1] - prompt, len(formats))
    divergence, equal = (torch.zeros(shape, device=texts.device) for _ in range(2))
    logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
    run_experts(model, "batched_mm")  # a row of the batch has one token
    for step in range(shape[0]):
        found = logits[:, -1].float().log_softmax(-1).unflatten(0, (count, -1))
        exact = found[:, :1]
        divergence[step] = (exact.exp() * (exact - found)).sum(-1).mean(0)
        equal[step] = (exact.argmax(-1) == found.argmax(-1)).float().mean(0)
        tokens = torch.multinomial(exact[:, 0].exp(), 1, generator=generator)
        ids = tokens.repeat_interleave(len(formats), 0)
        logits = model(input_ids=ids, past_key_values=cache).logits
    run_experts(model, "eager")
    parts = {mark: slice(mark - mark // 4 - prompt, mark - prompt) for mark in marks}
    return [
        {
            "tokens": mark,
            "divergence": divergence[part].mean(0).tolist(),
            "equal": equal[part].mean(0).tolist(),
        }
        for mark, part in parts.items()
    ]


@torch.no_grad()
def numbers(
    model: Any, tokens: Tensor, statements: Statements, formats: list[Format], count: int
) -> list[int]:
    """How many of `count` numbers in one text each format copies exactly, at any distance."""
    generator = torch.Generator().manual_seed(2)
    begins, answers = statements.draw(count, generator)
    whole = torch.cat((begins, answers, statements.end.expand(count, -1)), 1).to(tokens)
    places = torch.randperm(len(tokens) // 64, generator=generator)[:count]
    text = tokens.clone()
    for sentence, place in zip(whole, places.tolist(), strict=True):
        text[place * 64 : place * 64 + len(sentence)] = sentence
    cache = cache_of(model, formats, len(text) + TILE)
    for chunk in text.split(1024):
        model(input_ids=chunk.expand(len(formats), -1), past_key_values=cache, logits_to_keep=1)
    right = [0] * len(formats)
    for begin, answer in zip(begins.to(tokens), answers.tolist(), strict=True):
        ids, given = begin.expand(len(formats), -1), []
        for _ in range(len(answer)):
            ids = model(input_ids=ids, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
            given.append(ids)
        said = torch.cat(given, 1).tolist()
        right = [each + (one == answer) for each, one in zip(right, said, strict=True)]
        for layer in cache.layers:
            layer.tokens = len(text)
    return right


def table(found: dict[str, Any]) -> str:
    marks = found["marks"]
    heads = ["cache", "of 16 bits", *(f"KL at {each['tokens']}" for each in marks), "equal top", "numbers"]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for row, name in enumerate(found["formats"]):
        share = f"{sum(FORMATS[name].bits) / 32:.3f}"
        kl = [f"{each['divergence'][row]:.6f}" for each in marks]
        right = f"{found['numbers'][row]}" if found["numbers"] else ""
        lines.append([name, share, *kl, f"{marks[-1]['equal'][row]:.3f}", right])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, help="a folder of transformers, or a GGUF file")
    add("texts", type=Path, help="tokens as uint16, as train_moe.py writes them")
    add("--device", default="cpu")
    add("--marks", type=int, nargs="+", default=[512, 4096, 16384])
    add("--prompts", type=int, default=2, help="texts that are answered at once (2)")
    add("--format", action="append", default=[], choices=FORMATS, help="repeatable (all)")
    add("--outliers", type=float, help="the largest factor of a channel of the keys")
    add("--numbers", type=int, default=0, metavar="TOKENS", help="of the text that numbers lie in")
    add("--json", type=Path)
    options = parser.parse_args()
    names = list(dict.fromkeys(["float32", *(options.format or FORMATS)]))
    formats = [FORMATS[name] for name in names]
    torch.manual_seed(0)
    file = {"gguf_file": options.model.name} if options.model.suffix == ".gguf" else {}
    folder = options.model.parent if file else options.model
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **file)
    model = model.to(options.device).eval()
    run_experts(model, "eager")
    tokenizer = AutoTokenizer.from_pretrained(folder, **file)
    if options.outliers:
        give_outliers(model, options.outliers)
    held = torch.from_numpy(np.fromfile(options.texts, dtype=np.uint16).astype(np.int64)).to(options.device)
    texts = torch.stack([held[at * 4096 : at * 4096 + PROMPT] for at in range(options.prompts)])
    marks = decoded(model, texts, formats, options.marks)
    right = []
    if options.numbers:
        text = held[-options.numbers // TILE * TILE :]
        right = numbers(model, text, Statements(tokenizer), formats, 32)
    found = {"formats": names, "outliers": options.outliers, "marks": marks, "numbers": right}
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
