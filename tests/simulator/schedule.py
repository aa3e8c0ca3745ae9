"""The order in which simulated threads and threadgroups run."""

_seed = 0


def set(seed: int) -> None:
    """Order of threads, simdgroups and threadgroups from now on: 0 is ascending, any other seed a shuffle of its own."""
    global _seed
    _seed = int(seed)


def current_seed() -> int:
    return _seed
