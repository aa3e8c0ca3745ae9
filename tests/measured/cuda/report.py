"""The table."""

from .run import Row

HEADER = (
    f"{'case':56} {'part':8} {'ours us':>9} {'peer us':>9} {'ratio':>6} {'GB/s':>6} {'of copy':>7}  "
    f"{'check':14} peer"
)


def line(row: Row, copy: float) -> str:
    speed = row.gigabytes_per_second
    columns = [
        f"{row.case:56} {row.part:8}",
        f"{number(row.ours_us, 1):>9} {number(row.peer_us, 1):>9} {number(row.ratio, 2):>6}",
        f"{number(speed, 0):>6} {'-' if speed is None or not copy else f'{speed / copy:.0%}':>7} ",
        f"{row.wrong or 'ok':14}",
        row.peer + (f" WRONG: {row.peer_wrong}" if row.peer_wrong else ""),
    ]
    return " ".join(columns).rstrip()


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def summary(rows: list[Row]) -> list[str]:
    """The lowest ratio of each group."""
    lowest: dict[str, Row] = {}
    for row in rows:
        if row.ratio is not None:
            lowest[row.group] = min(row, lowest.get(row.group, row), key=lambda r: r.ratio)
    return [
        f"{group}: the lowest ratio is {row.ratio:.2f}, {row.case}{row.part and ' ' + row.part}, {row.peer}"
        for group, row in lowest.items()
    ]


def kernel_line(kernel: dict) -> str:
    grid = kernel["grid"] if kernel["grid"] == "indirect" else "x".join(map(str, kernel["grid"]))
    return (
        f"    {kernel['kernel']:44} {kernel['microseconds']:9.1f} us  {kernel['registers']:3} registers  "
        f"{kernel['local_bytes']} local bytes  grid {grid} of {'x'.join(map(str, kernel['threads']))}"
    )
