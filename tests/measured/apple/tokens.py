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
    before: int  # with norms, rotation and writes into the cache apart, and the choice of experts

    def bytes_ms(self, gpu: Gpu) -> float:
        return self.nbytes / gpu.dram_bytes_per_us / 1e3

    def ms(
        self, gpu: Gpu, start_us: tuple[float, float] = START_US, before: bool = False
    ) -> tuple[float, float]:
        """The sum: what the starts leave of the memory's time is not known."""
        least, most = (
            (self.before if before else self.launches) * each / 1e3 + self.bytes_ms(gpu) for each in start_us
        )
        return least, most


# Launches of a layer, and 5 outside of layers (tests/transformers/models/test_launches.py).
TOKENS = (
    Token("Qwen3-30B-A3B", 1.73e9, 48 * 6 + 5, 48 * 8 + 5),
    Token("Llama 3.2 1B", 0.70e9, 16 * 5 + 5, 16 * 6 + 5),
)


def table(gpus: list[Gpu], start_us: tuple[float, float] = START_US) -> Iterator[str]:
    """The lines of a table in Markdown; `start_us` of a launch at least and at most."""
    yield "| model | chip | reading, ms | launches, before | sum, ms | before |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for token in TOKENS:
        for gpu in gpus:
            both = (token.ms(gpu, start_us, before) for before in (False, True))
            sums = ("-".join(dict.fromkeys(f"{ms:.1f}" for ms in of)) for of in both)
            launches = f"{token.launches}, {token.before}"
            yield f"| {' | '.join((token.model, gpu.name, f'{token.bytes_ms(gpu):.1f}', launches, *sums))} |"
