"""What a token of a whole model takes on a GPU: reading its weights, and starting its launches."""

from collections.abc import Iterator
from dataclasses import dataclass

from simulator.apple.facts import EXPERT_READS, GPUS, START_US, Gpu


@dataclass(frozen=True)
class Token:
    """A token of a model in 4 bit at a short context: bytes of weights, those of experts among them, and
    launches that wait for each other."""

    model: str
    nbytes: float
    experts: float
    launches: int

    def bytes_ms(self, gpu: Gpu, experts_reach: float = 1.0) -> float:
        """`experts_reach`: the part of the read rate that reads of experts reach."""
        return (self.nbytes - self.experts + self.experts / experts_reach) / gpu.dram_bytes_per_us / 1e3

    def ms(self, gpu: Gpu, start_us: float, experts_reach: float) -> float:
        """The sum: what the starts leave of the memory's time is not known."""
        return self.launches * start_us / 1e3 + self.bytes_ms(gpu, experts_reach)


# Launches of a layer, and 5 outside of layers (tests/transformers/models/test_launches.py).
TOKENS = (
    Token("Qwen3-30B-A3B", 1.73e9, 1.02e9, 48 * 6 + 5),
    Token("Llama 3.2 1B", 0.70e9, 0, 16 * 5 + 5),
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


def table(gpus: list[Gpu], start_us: tuple[float, float] = START_US) -> Iterator[str]:
    """The lines of a table in Markdown; `start_us` of a launch at least and at most."""
    yield "| model | chip | reading, ms | launches | at least, ms | with slow experts, ms |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for token in TOKENS:
        for gpu in gpus:
            least = token.ms(gpu, start_us[0], 1.0)
            slow = (token.ms(gpu, *of) for of in zip(start_us, reversed(EXPERT_READS), strict=True))
            expected = "-".join(dict.fromkeys(f"{ms:.1f}" for ms in slow))
            reading = f"{token.bytes_ms(gpu):.1f} | {token.launches} | {least:.1f}"
            yield f"| {token.model} | {gpu.name} | {reading} | {expected} |"
    yield ""
    for each in PUBLISHED:
        line = f"{each.what}, {each.gpu}: {each.speed:g} tokens/s ({each.source})"
        if each.nbytes is None:
            scaled = ", ".join(f"{gpu.name} {each.prompt_on(gpu):.0f}" for gpu in gpus)
            yield f"{line}; by cores and clock: {scaled}"
        else:
            yield f"{line}; reads at {each.reach:.2f} of the rate"
