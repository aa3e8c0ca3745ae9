"""What a token of a whole model takes on a GPU, and what drafts give that are verified together.

Both are sums: reading weights, and starting launches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from simulator.apple.facts import EXPERT_READS, GPUS, START_US, ULTRA_START_US, Gpu

SPLIT_KEYS = 256  # from so many on, chunks of keys are merged in a launch more (csrc/attention_plan.mm)


@dataclass(frozen=True)
class Token:
    """A token of a model in 4 bit: bytes of weights and recurrent states, those of experts among them, and
    launches that wait for each other, behind fewer keys than SPLIT_KEYS.

    Attributes:
        launches_of_few: of a step of two to eight tokens.
        chosen, of: how many experts a token chooses, and of how many.
        layers, key_bytes: layers of attention, and bytes that all of them have for a key.
    """

    model: str
    nbytes: float
    experts: float
    launches: int
    launches_of_few: int
    chosen: int = 1
    of: int = 1
    layers: int = 0
    key_bytes: float = 0.0

    def behind(self, keys: int) -> "Token":
        """The same behind so many keys."""
        merges = self.layers if keys >= SPLIT_KEYS else 0
        return replace(self, nbytes=self.nbytes + keys * self.key_bytes, launches=self.launches + merges)

    def verifying(self, tokens: int) -> "Token":
        """A step of several tokens that choose without regard to each other: each expert is read once."""
        read = self.of * (1 - (1 - self.chosen / self.of) ** tokens) / self.chosen
        more = self.experts * (read - 1)
        return replace(
            self, nbytes=self.nbytes + more, experts=self.experts + more, launches=self.launches_of_few
        )

    def bytes_ms(self, gpu: Gpu, experts_reach: float = 1.0) -> float:
        """`experts_reach`: the part of the read rate that reads of experts reach."""
        return (self.nbytes - self.experts + self.experts / experts_reach) / gpu.dram_bytes_per_us / 1e3

    def ms(self, gpu: Gpu, start_us: float, experts_reach: float) -> float:
        """The sum: what the starts leave of the memory's time is not known."""
        return self.launches * start_us / 1e3 + self.bytes_ms(gpu, experts_reach)


# Launches of a layer, and 5 outside of layers (tests/transformers/models/test_launches.py).
TOKENS = (
    Token("Qwen3-30B-A3B", 1.73e9, 1.02e9, 48 * 6 + 5, 48 * 10 + 5, 8, 128, 48, 48 * 4 * 256 * 2),
    Token("Llama 3.2 1B", 0.70e9, 0, 16 * 5 + 5, 16 * 8 + 5, 1, 1, 16, 16 * 8 * 128 * 2),
    Token("Llama 3.1 8B", 4.22e9, 0, 32 * 5 + 5, 32 * 8 + 5, 1, 1, 32, 32 * 8 * 256 * 2),
)
# Linear attention in 36 of 48 layers; bytes of weights are those that `fit` prints for the recipe fast. Each
# step reads and writes the states, 32 heads of 128 x 128 in float32, and copies none behind drafts.
OF_STATES = Token(
    "Qwen3-Next-80B-A3B",
    1.97e9 + 2 * 36 * 32 * 128 * 128 * 4,
    0.85e9,
    36 * 7 + 12 * 6 + 5,
    36 * 20 + 12 * 13 + 5,
    10,
    512,
)


@dataclass(frozen=True)
class Drafted:
    """An answer of SmolLM2 with drafts by look-up, as `scripts/bench/bench_speculative.py` counts it.

    Attributes:
        tokens: behind the first.
        steps: that gave them.
        drafts: verified so many in each step that has some.
    """

    text: str
    tokens: int
    steps: int
    drafts: int
    width: int = 3

    def gain(self, token: Token, gpu: Gpu, start_us: float) -> float:
        """Tokens a second by those without drafts."""
        one, few = (each.ms(gpu, start_us, 1.0) for each in (token, token.verifying(1 + self.width)))
        verified = self.drafts / self.width
        return self.tokens * one / ((self.steps - verified) * one + verified * few)


@dataclass(frozen=True)
class Likely:
    """Drafts in each step; each is accepted with a probability if those before it are."""

    text: str
    probability: float
    width: int = 3

    def gain(self, token: Token, gpu: Gpu, start_us: float) -> float:
        """Tokens a second by those without drafts."""
        one, few = (each.ms(gpu, start_us, 1.0) for each in (token, token.verifying(1 + self.width)))
        return sum(self.probability**n for n in range(1 + self.width)) * one / few


DRAFTED = (
    Drafted("a text to repeat", 22 - 1, 8, 15),
    Drafted("code to change", 39 - 1, 14, 27),
    Likely("each accepted with 0.85", 0.85),
)


@dataclass(frozen=True)
class Published:
    """A published speed of a model with 3 billion weights a token, on another engine.

    Attributes:
        nbytes: of weights a token, as the source counts them; None for a prompt.
        speed: tokens a second.
    """

    what: str
    source: str
    gpu: str
    speed: float
    nbytes: float | None = None

    @property
    def reach(self) -> float:
        """The part of the read rate that a token reaches."""
        return self.nbytes * self.speed / (GPUS[self.gpu].dram_bytes_per_us * 1e6)

    def prompt_on(self, gpu: Gpu) -> float:
        """Tokens a second if they grow with cores and clock."""
        return self.speed * gpu.core_cycles_per_us / GPUS[self.gpu].core_cycles_per_us


PUBLISHED = (
    Published("35B-A3B, 6 bit, MLX", "omlx #2238", "M3 Ultra", 84.5, 2.77e9),
    Published("35B-A3B, 4 bit, MLX", "Rapid-MLX #1065", "M2 Max", 79.75, 2.77e9 * 4.5 / 6.5),
    Published("35B-A3B, 4 bit, MLX", "Mac-MLX #24", "M5 Max", 133.5, 2.77e9 * 4.5 / 6.5),
    Published("30B-A3B, 8 bit, 512 tokens, llama.cpp", "llama.cpp #15616", "M2 Ultra", 2045),
)


def starts(gpu: Gpu, start_us: tuple[float, float]) -> tuple[float, float]:
    """Of a launch at least and at most: an Ultra's take longer, unless they were measured."""
    return ULTRA_START_US if gpu.name.endswith("Ultra") and start_us == START_US else start_us


KEYS = (1_000, 4_096)


def table(gpus: list[Gpu], start_us: tuple[float, float] = START_US) -> Iterator[str]:
    """The lines of a table in Markdown; `start_us` of a dispatch at least and at most."""
    keys = " | ".join(["few keys, ms", *(f"after {keys:,} keys, ms" for keys in KEYS)])
    dispatches = f"dispatches, few keys | dispatches, {SPLIT_KEYS} keys"
    yield f"| model | chip | reading, ms | {dispatches} | {keys} | slow experts, few keys, ms |"
    yield f"|---|---|---:|---:|---:|---:|{'---:|' * len(KEYS)}---:|"
    for token in TOKENS:
        for gpu in gpus:
            own = starts(gpu, start_us)
            slow = (token.ms(gpu, *of) for of in zip(own, reversed(EXPERT_READS), strict=True))
            expected = "-".join(dict.fromkeys(f"{ms:.1f}" for ms in slow))
            launches = f"{token.launches} | {token.behind(SPLIT_KEYS).launches}"
            times = (token.behind(keys).ms(gpu, own[0], 1.0) for keys in (0, *KEYS))
            cells = " | ".join(f"{ms:.1f}" for ms in times)
            reading = f"{token.bytes_ms(gpu):.1f} | {launches} | {cells}"
            yield f"| {token.model} | {gpu.name} | {reading} | {expected} |"
    yield ""
    yield f"| predicted | chip | without drafts, tokens/s | {' | '.join(each.text for each in DRAFTED)} |"
    yield f"|---|---|---:|{'---:|' * len(DRAFTED)}"
    for token in (*TOKENS, OF_STATES):
        for gpu in gpus:
            start = starts(gpu, start_us)[0]
            plain = 1e3 / token.ms(gpu, start, 1.0)
            gains = [each.gain(token, gpu, start) for each in DRAFTED]
            cells = " | ".join(f"{plain * gain:.0f} ({gain:.2f})" for gain in gains)
            yield f"| {token.model} | {gpu.name} | {plain:.0f} | {cells} |"
    yield ""
    for each in PUBLISHED:
        line = f"{each.what}, {each.gpu}: {each.speed:g} tokens/s ({each.source})"
        if each.nbytes is None:
            scaled = ", ".join(f"{gpu.name} {each.prompt_on(gpu):.0f}" for gpu in gpus)
            yield f"{line}; by cores and clock: {scaled}"
        else:
            yield f"{line}; reads at {each.reach:.2f} of the rate"
