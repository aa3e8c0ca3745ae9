"""What a token of a whole model takes on a GPU: reading its weights, and starting its launches."""

from collections.abc import Iterator
from dataclasses import dataclass

from simulator.apple.facts import START_US, Gpu


@dataclass(frozen=True)
class Token:
    """Of a model in 4 bit at a short context: bytes of weights, and launches that wait for each other."""

    model: str
    nbytes: float
    launches: int

    def bytes_ms(self, gpu: Gpu) -> float:
        return self.nbytes / gpu.dram_bytes_per_us / 1e3

    def starts_ms(self, start_us: tuple[float, float]) -> tuple[float, float]:
        least, most = start_us
        return self.launches * least / 1e3, self.launches * most / 1e3

    def ms(self, gpu: Gpu, start_us: tuple[float, float] = START_US) -> tuple[float, float]:
        """The sum: what the starts leave of the memory's time is not known."""
        least, most = self.starts_ms(start_us)
        return self.bytes_ms(gpu) + least, self.bytes_ms(gpu) + most


# 7 and 6 launches of a layer, and 6 outside of layers (tests/transformers/test_launches.py).
TOKENS = (
    Token("Qwen3-30B-A3B", 1.73e9, 48 * 7 + 6),
    Token("Llama 3.2 1B", 0.70e9, 16 * 6 + 6),
)


def table(gpus: list[Gpu], start_us: tuple[float, float] = START_US) -> Iterator[str]:
    """The lines of a table in Markdown; `start_us` of a launch at least and at most."""
    yield "| model | chip | reading, ms | launches | their starts, ms | sum, ms |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for token in TOKENS:
        for gpu in gpus:
            sums = token.starts_ms(start_us), token.ms(gpu, start_us)
            starts, both = ("-".join(dict.fromkeys(f"{ms:.1f}" for ms in of)) for of in sums)
            cells = (token.model, gpu.name, f"{token.bytes_ms(gpu):.1f}", token.launches, starts, both)
            yield f"| {' | '.join(map(str, cells))} |"
