"""Prints what AIR in macOS wheels says of the cost model's front end and of calls of tensor operations."""

import argparse
import sys

from support.simulated import install

from . import front_end, tensor_units

DESCRIPTION = """\
Reads Apple's compilation (AIR) of public kernels in macOS wheels, which pip downloads once.

--front-end     MLX's kernels: instructions of the main loop by AIR and by our IR of the same source, at the
                cost model's costs for an M1. Their ratio is the front end's share of the model's error.
--tensor-units  torch's and MLX's kernels: how many call the functions that our kernels for tensor units call.
                "none": nothing shows that Apple's compiler takes those operands.
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/macos/apple_air",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--front-end", action="store_true", help="this table alone")
    parser.add_argument("--tensor-units", action="store_true", help="this table alone")
    options = parser.parse_args(arguments)
    both = options.front_end == options.tensor_units
    install()
    try:
        for wanted, lines in (
            (options.front_end, front_end.table),
            (options.tensor_units, tensor_units.table),
        ):
            if wanted or both:
                print("\n".join(lines()), flush=True)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
