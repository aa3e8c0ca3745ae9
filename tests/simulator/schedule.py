"""The order in which simulated threads and threadgroups run."""

_seed = 0


def set(seed: int) -> None:
    """Choose the order of threads, simdgroups and threadgroups: 0 is ascending, other seeds shuffle."""
    global _seed
    _seed = int(seed)


def current_seed() -> int:
    return _seed
