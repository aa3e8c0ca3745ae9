"""The commands `python -m torch_moe_mps` and `torch-moe-mps`: convert a checkpoint, measure what it costs."""

import argparse
import sys
from collections.abc import Sequence

from ..ops._formats import MODES

EPILOG = "An error is one line, and the exit code 1."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns: the exit code."""
    options = _parser().parse_args(arguments)
    from safetensors import SafetensorError  # as all of these: only where a command runs

    from . import convert, perplexity

    commands = {"convert": convert.run, "perplexity": perplexity.run}
    try:
        commands[options.command](options)
    except KeyboardInterrupt:
        print("torch-moe-mps: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        print(f"torch-moe-mps: error: {line}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("torch-moe-mps", description=__doc__, epilog=EPILOG)
    commands = parser.add_subparsers(dest="command", required=True)
    convert = commands.add_parser("convert", help="quantise a checkpoint while it is read", epilog=EPILOG)
    convert.add_argument(
        "source", metavar="SRC", help="folder or name on the Hub, of any layout that is read"
    )
    convert.add_argument("destination", metavar="DST", help="folder to be written: complete, or not there")
    convert.add_argument("--bits", type=int, help="2, 3, 4, 5, 6 or 8 (4)")
    convert.add_argument("--group-size", type=int, help="32, 64 or 128 (64)")
    convert.add_argument("--mode", choices=MODES, default="affine")
    convert.add_argument("--linear-bits", type=_bits, default="same", help="of linear layers; none is dense")
    convert.add_argument("--embedding-bits", type=_bits, default="same", help="of embeddings and output head")
    convert.add_argument(
        "--keep", action="append", default=[], metavar="PATTERN", help="names that stay dense"
    )
    convert.add_argument(
        "--recipe", metavar="NAME", help="mixed_2_6, mixed_3_4, mixed_3_6, mixed_4_6, or a JSON file"
    )
    convert.add_argument(
        "--budget", type=float, metavar="BITS", help="measure, and give the bits where they pay: 4.5 a weight"
    )
    convert.add_argument(
        "--text", metavar="FILE", help="UTF-8, for --budget; a sample of English prose unless given"
    )
    convert.add_argument("--save-recipe", metavar="FILE", help="write what --budget found, for --recipe")
    convert.add_argument("--to", choices=("moe_mps", "mlx"), default="moe_mps", help="layout that is written")
    convert.add_argument("--dry-run", action="store_true", help="print sizes, write nothing")
    perplexity = commands.add_parser("perplexity", help="of a model over a text", epilog=EPILOG)
    perplexity.add_argument("model", metavar="MODEL", help="folder or name on the Hub")
    perplexity.add_argument("--text", metavar="FILE", help="UTF-8; a sample of English prose unless given")
    perplexity.add_argument(
        "--against", metavar="OTHER", help="a model to compare with, most often the dense one"
    )
    perplexity.add_argument("--window", type=int, default=512, help="tokens that are read at once (512)")
    perplexity.add_argument("--device", default=None, help="cpu or mps; mps where there is one")
    return parser


def _bits(text: str) -> int | str | None:
    if text in ("none", "same"):
        return None if text == "none" else text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of bits, same or none, got {text!r}") from None
