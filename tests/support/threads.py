"""Several threads at once."""

import threading
from collections.abc import Callable


def in_threads(*works: Callable[[], object]) -> None:
    """Runs all at once; the first error of any is raised."""
    errors, start = [], threading.Barrier(len(works))

    def run(work):
        start.wait(timeout=60)
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
