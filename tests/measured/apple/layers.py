"""What the layers of real models spend on what is behind them: attention over a cache, or a recurrence."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from simulator.apple.count import Limit
from simulator.apple.facts import Gpu
from simulator.apple.recorder import measure
from torch import Tensor

from torch_moe_mps.ops._checks import dtype_name

KEYS = (4096, 32768)
_LIMIT = Limit(groups=4, slots=3e6)
_PROMPT = 64  # tokens of a prompt that are run: a recurrence takes as long for all


def _values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="mps")


def _operators() -> Any:
    return torch.ops.moe_mps


def _matrices(heads: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor, str]:
    """int4 in groups of 64."""
    scales = [_values(heads, rows, columns // 64) for _ in range(2)]
    return _values(heads, rows, columns // 8, dtype=torch.int32), *scales, "affine4_64"


@dataclass(frozen=True)
class Latent:
    """Queries that absorb W_k, attention to latents, outputs that W_v projects."""

    model: str
    heads: int
    nope: int
    value: int
    latent: int = 512
    rotary: int = 64

    @property
    def name(self) -> str:
        return f"latent attention, {self.heads} heads"

    def token(self, keys: int) -> Iterator[Callable[[], object]]:
        ops, width = _operators(), self.latent + self.rotary
        own, tail = _values(1, 1, self.heads, self.nope), _values(1, 1, self.heads, self.rotary)
        first, last = (_matrices(self.heads, rows, self.latent) for rows in (self.nope, self.value))
        query, memory = _values(1, self.heads, 1, width), _values(1, 1, keys, width)
        sums = _values(1, 1, self.heads, self.latent, dtype=torch.float32)
        yield lambda: ops._heads_quantized(own, *first, transposed=True, appended=tail)
        yield lambda: ops._cached_attention(
            query, memory, memory[..., : self.latent], scale=0.1, dtype="float32"
        )
        yield lambda: ops._heads_quantized(sums, *last, dtype=dtype_name(query.dtype))


@dataclass(frozen=True)
class Softmax:
    """Attention of query heads that share key heads."""

    model: str
    heads: int
    key_heads: int
    width: int

    @property
    def name(self) -> str:
        return f"attention, {self.heads} / {self.key_heads} heads of {self.width}"

    def token(self, keys: int) -> Iterator[Callable[[], object]]:
        query = _values(1, self.heads, 1, self.width)
        k, v = (_values(1, self.key_heads, keys, self.width) for _ in range(2))
        yield lambda: _operators().cached_attention(query, k, v, scale=0.1)


@dataclass(frozen=True)
class Delta:
    """The convolution, and the delta rule with the norm behind it; the same for any number of keys."""

    model: str
    key_heads: int
    heads: int
    channels: bool  # a decay for each channel
    width: int = 128

    @property
    def name(self) -> str:
        return f"delta rule, {self.key_heads} / {self.heads} heads of {self.width}"

    def token(self, tokens: int) -> Iterator[Callable[[], object]]:
        ops, width = _operators(), (2 * self.key_heads + self.heads) * self.width
        x, state = _values(1, tokens, width), _values(1, width, 4)
        yield lambda: ops.causal_conv1d_update_(x, state, _values(width, 4))
        q, k = (_values(1, tokens, self.key_heads, self.width) for _ in range(2))
        v, beta = _values(1, tokens, self.heads, self.width), _values(1, tokens, self.heads)
        decay = _values(1, tokens, self.heads, *[self.width] * self.channels)
        held = _values(1, self.heads, self.width, self.width, dtype=torch.float32)
        options = {"A_log": _values(self.heads), "decay_form": "softplus", "beta_activation": "sigmoid"}
        norm = {"gate": v, "norm_weight": _values(self.width), "l2norm_eps": 1e-6}
        options |= {"beta": beta, **norm}
        yield lambda: ops._gated_delta_rule_(q, k, v, decay, held, scale=0.1, **options)


LAYERS = (
    Latent("GLM-4.7-Flash", 20, 192, 256),
    Latent("DeepSeek-V3", 128, 128, 128),
    Softmax("Qwen3.5-35B-A3B", 16, 2, 256),
    Delta("Qwen3.5-35B-A3B", 16, 32, channels=False),
    Latent("Kimi Linear", 32, 128, 128),
    Delta("Kimi Linear", 32, 32, channels=True),
)


def _us(calls: Iterator[Callable[[], object]], gpus: list[Gpu]) -> list[float]:
    """What these calls take on each GPU, one after the other."""
    found = [m for call in calls for m in measure(call, limit=_LIMIT)]
    return [sum(m.bounds(gpu).predicted_us for m in found) for gpu in gpus]


def _number(value: float, scale: float = 1.0) -> str:
    return f"{value * scale:.2g}" if value * scale < 100 else f"{value * scale:,.0f}"


def table(gpus: list[Gpu]) -> Iterator[str]:
    """The lines of a table in Markdown: a row for each kind of layer and GPU."""
    contexts = " | ".join(f"a token at {keys:,}, us" for keys in KEYS)
    prompts = " | ".join(f"a prompt of {keys:,}, ms" for keys in KEYS)
    yield f"| model | layer | chip | {contexts} | {prompts} |"
    yield "|---|---|---" + "|---:" * 2 * len(KEYS) + "|"
    for layer in LAYERS:
        if isinstance(layer, Delta):
            token, prompt = (_us(layer.token(tokens), gpus) for tokens in (1, _PROMPT))
            rows = [
                [_number(one)] * len(KEYS) + [_number(all_, keys / _PROMPT / 1000) for keys in KEYS]
                for one, all_ in zip(token, prompt, strict=True)
            ]
        else:
            of_keys = [_us(layer.token(keys), gpus) for keys in KEYS]
            rows = [[*map(_number, times), *["-"] * len(KEYS)] for times in zip(*of_keys, strict=True)]
        for gpu, cells in zip(gpus, rows, strict=True):
            yield f"| {layer.model} | {layer.name} | {gpu.name} | {' | '.join(cells)} |"
