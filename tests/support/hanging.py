"""A test that hangs shows where, and ends its process, after pytest's `faulthandler_timeout`.

Counted are seconds in which nothing ended that the process waits for: the simulator compiles what nobody has
run before, which takes minutes where other processes compile, too.
"""

import faulthandler
import os
import threading

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key, get_timeout_config_value


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item):
    """Inside of pytest's own, which sets the limit: here it begins again where a process has ended."""
    seconds, ended = get_timeout_config_value(item.config), threading.Event()

    def watch():
        before = _of_others()
        while not ended.wait(seconds / 20):
            if _of_others() != before:
                before = _of_others()
                if not ended.is_set():
                    faulthandler.dump_traceback_later(seconds, file=errors, exit=True)

    errors = item.config.stash[fault_handler_stderr_fd_key]
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        return (yield)
    finally:
        ended.set()
        watcher.join()


def _of_others() -> float:
    """CPU seconds of the processes that this one waited for."""
    return sum(os.times()[2:4])
