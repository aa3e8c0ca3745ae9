"""Writes the English text that `perplexity` and `--importance auto` measure with.

The argument is a checkout of github.com/python/peps. The text is the prose of the Python Enhancement
Proposals that were created from 2026 on. Each of them is in the public domain or under CC0 1.0, as it says
itself. A model may have read them, but in few copies, unlike the classics: text that a model knows by heart
says little about the quality of its weights.
"""

import argparse
import re
from pathlib import Path

SAMPLE = Path(__file__).resolve().parents[2] / "torch_moe_mps" / "commands" / "sample.txt"
FIRST_YEAR = 2026
CC0 = "placed in the public domain or under the"
LEFT_OUT = r"[`|]|https?:|={3}|-{3}|~{3}|[Tt]hank"
MARKUP = (
    (r"\[[\w#-]+\]_", ""),  # footnotes
    (r":pep:`(\d+)`", r"PEP \1"),
    (r"(?::[\w:+-]+:)?`+~?([^`<]+?)\s*(?:<[^`>]*>)?`+_{0,2}", r"\1"),  # roles, links, code
    (r"\*{1,2}(\S(?:[^*]*\S)?)\*{1,2}", r"\1"),
    (r"\|(\w+)\|", r"\1"),
    (r"::$", ":"),
    (r" ([:,.])", r"\1"),
)


def prose(document: str) -> list[str]:
    """Paragraphs and items of lists with a sentence or more; no headings, code, tables and notes."""
    found = []
    for block in re.split(r"\n\s*\n", document):
        lines = block.split("\n")
        item = re.match(r"(?:[-*] |\d+\. )", lines[0])
        if not item and any(line[:1] in "  .|+=:" for line in lines):
            continue
        if item and any(re.match(r"(?:[-*] |\d+\. )", line) for line in lines[1:]):
            continue
        text = " ".join(
            " ".join(line.split()) for line in [lines[0][item.end() if item else 0 :], *lines[1:]]
        )
        for pattern, replacement in MARKUP:
            text = re.sub(pattern, replacement, text)
        if len(text.split()) >= 20 and text.isascii() and not re.search(LEFT_OUT, text):
            found.append(text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    paragraphs = []
    for file in sorted(parser.parse_args().checkout.glob("peps/pep-*.rst")):
        head, _, body = file.read_text(encoding="utf-8").partition("\n\n")
        created = re.search(r"^Created: \d+-\w+-(\d+)$", head, re.MULTILINE)
        if created and int(created.group(1)) >= FIRST_YEAR and CC0 in " ".join(body.split()):
            paragraphs += [text for text in prose(body) if CC0 not in text]
    SAMPLE.write_text("\n\n".join(paragraphs) + "\n")
    print(f"{sum(len(text.split()) for text in paragraphs)} words in {len(paragraphs)} paragraphs")


if __name__ == "__main__":
    main()
