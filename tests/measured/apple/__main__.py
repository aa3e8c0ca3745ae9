"""Prints what the package's kernels would cost on Apple GPUs, beside MLX's kernels for the same work."""

import argparse
import functools
import sys

from simulator.apple.facts import COSTS, GPUS, START_US, Gpu, table
from simulator.errors import SimulatorError
from support.simulated import install

from . import goals, layers, published, report
from .cases import DEFAULT_GPUS, FORMATS, Shape, mlx_peers, mlx_rows, ours
from .fit import fitted
from .tokens import table as tokens_table

DESCRIPTION = """\
Predicts, without a Mac, what the package's expert kernels cost on Apple GPUs, beside MLX's kernels.

It is: a count. The package's own host code dispatches the kernels in the simulator; every instruction that a
simdgroup executes is counted at published costs (--facts), with bytes and live registers. The kernels of MLX
come from the headers of the installed wheel and are launched as MLX would.

It is not: a measurement. It knows nothing of spilling, of Apple's order of instructions, of the start and end
of a dispatch, of caches between threadgroups. Against published measurements of MLX's
kernels of 100 us and more it is within 0.75 and 1.25, but for one (--published). Under 15 % is a tie.
Dispatches under 50 us are not predicted. Read slots and bounds first.

columns
  slots/MAC   issue slots of a lane for each multiply-add: on the M1 and M2, and from the M3 on (bfloat16
              is native there); of a dispatch that is no product, millions of slots in all
  lanes       the part of lanes that take part in what their simdgroup executes
  regs        32-bit registers that a thread needs
  threads     launched / declared bound / what M1's registers allow; "!" where the bound leaves too few
  occ         the part of 24 simdgroups a core for which an M1 has registers: below 1 the time may be as many
              times longer as fewer simdgroups hide less latency, or not, where instructions are independent
  L1, tg      bytes of L1 and of threadgroup memory for each multiply-add
  banks       cycles of the busiest bank of threadgroup memory, over those without conflicts
  DRAM MB     of device memory that is touched; "~" where only a sample of threadgroups was run. From 2 % on
              the standard error of its slots stands behind the kernel's name
  bound       what binds on a GPU; what comes next, as a part of it; the predicted time
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/macos/apple_model",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default_gpus = ",".join(gpu.name for gpu in DEFAULT_GPUS)
    add = parser.add_argument
    add(
        "--shape",
        default="128,8,2048,768",
        metavar="E,K,H,I",
        help="experts, of them a token, hidden, intermediate",
    )
    add("--goals", action="store_true", help="instead: tokens and a prompt of Qwen3-30B-A3B in 4 bits")
    add("--layers", action="store_true", help="instead: attention and recurrences of real models")
    add("--token", action="store_true", help="instead: a token of whole models, with the starts of launches")
    add("--linear", metavar="C,N", help="instead: one matrix alone, C inputs and N outputs")
    add("--formats", default="int4", help=f"some of {', '.join(FORMATS)}, bf16, f16 (default: int4)")
    add(
        "--dtype",
        default="bf16",
        choices=["bf16", "f16"],
        help="activations of quantised formats (default: bf16)",
    )
    add("--tokens", default="1,8,32", help="e.g. 1,2,4,8,16,32,64,512 (default: 1,8,32)")
    add("--gpu", default=default_gpus, help=f"some of {', '.join(GPUS)}")
    add(
        "--tensor-units",
        action="store_true",
        help="experts: our kernels for the tensor units of the M5, which multiply at an assumed rate beside "
        "the rest: a bound, no prediction",
    )
    add(
        "--variants",
        action="store_true",
        help="experts: our kernels that only the tuner takes, where there are some",
    )
    add("--no-mlx", action="store_true", help="the package's kernels alone")
    add("--classes", action="store_true", help="also instructions of a lane for each multiply-add, by class")
    add(
        "--published",
        action="store_true",
        help="print published measurements, and what the model says of them",
    )
    add(
        "--facts",
        nargs="?",
        const="",
        metavar="FILE",
        help="print what is known of the GPUs, and from where; with what `torch-moe-mps check --probe` has "
        "printed on a Mac: the other tables for that one, with its numbers",
    )
    return parser.parse_args(arguments)


def numbers(text: str, count: int | None, option: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1 or (count and len(values) != count):
        wanted = f"{count} positive numbers" if count else "positive numbers"
        raise SimulatorError(f"--{option} takes {wanted} with commas between, got {text!r}")
    return values


def chosen(text: str, known: list[str], option: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise SimulatorError(f"--{option} takes some of {', '.join(known)}, got {name!r}")
    return names


def print_table(shape: Shape, format_name: str, options: argparse.Namespace, gpus: list[Gpu]) -> None:
    dtype = options.dtype if format_name in FORMATS else format_name
    print(f"\n{shape}; {format_name}, activations {dtype}\n{report.head(gpus)}")
    for tokens in numbers(options.tokens, None, "tokens"):
        kernels = {"tensor_units": options.tensor_units, "variants": options.variants}
        rows = ours(shape, format_name, dtype, tokens, **kernels)
        sides = [("ours", rows, gpus)]
        if not options.no_mlx:
            sides += peers(shape, format_name, dtype, tokens, gpus)
        for side, rows, of in sides:
            for row in rows:
                print(report.line(tokens, side, row, gpus, of))
                if options.classes and row.measurement.work:
                    print(report.classes(row, of[-1]))
        print("\n".join(report.comparison(tokens, sides, gpus)), flush=True)


def peers(shape: Shape, format_name: str, dtype: str, tokens: int, gpus: list[Gpu]) -> list:
    """MLX's rows; one row per GPU if it chooses different kernels."""
    found: dict[tuple, tuple] = {}
    for gpu in gpus:
        chosen_kernels = mlx_peers(shape, format_name, dtype, tokens, gpu)
        if chosen_kernels:
            key = tuple(p.launch.template for p in chosen_kernels)
            found.setdefault(key, (chosen_kernels, []))[1].append(gpu)
    return [("MLX", mlx_rows(of_them), of) for of_them, of in found.values()]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.facts == "":
        print(table())
        return 0
    try:
        start_us: tuple[float, float] = START_US
        gpus = [GPUS[name] for name in chosen(options.gpu, list(GPUS), "gpu")]
        if options.facts:
            measured = fitted(options.facts)
            gpus, start_us = [measured.gpu], (measured.start_us, measured.start_us)
            COSTS.update(measured.costs)
            print("\n".join(measured.lines))
        formats = chosen(options.formats, [*FORMATS, "bf16", "f16"], "formats")
        if options.linear:
            inputs, rows = numbers(options.linear, 2, "linear")
            shape = Shape(1, 1, inputs, rows, alone=True)
        else:
            shape = Shape(*numbers(options.shape, 4, "shape"))
            if shape.slots > shape.experts:
                message = "--shape takes no more experts of a token than there are"
                raise SimulatorError(f"{message}, got {options.shape!r}")
        numbers(options.tokens, None, "tokens")
        install()
        if options.published:
            print(published.report())
            return 0
        if options.token:
            print("\n".join(tokens_table(gpus, start_us)))
            return 0
        of_goals = functools.partial(goals.table, of_mlx=not options.no_mlx)
        for wanted, lines in ((options.goals, of_goals), (options.layers, layers.table)):
            if wanted:
                for line in lines(gpus):
                    print(line, flush=True)
                return 0
        for format_name in formats:
            print_table(shape, format_name, options, gpus)
    except (SimulatorError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
