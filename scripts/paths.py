"""The repository's folder. Importing this makes its package and the tests' modules importable."""

import argparse
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY)]


def words(document: str, name: str | None = None) -> list[str]:
    """Words of the command line of a script without options; `--help` prints its docstring and ends.

    Scripts call it in front of imports that take seconds.

    Args:
        name: of the words in the help; without one there may be none.
    """
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if name is not None:
        parser.add_argument("words", metavar=name, nargs="*")
    return getattr(parser.parse_args(), "words", [])
