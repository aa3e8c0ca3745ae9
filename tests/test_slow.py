"""What the limit on a test's time counts, that a test over it fails, and the CPU seconds of a whole run."""

import subprocess
import sys
import time

import pytest
from support import cpu, slow
from support.processes import forked

BUSY = "import time\nstarted = time.process_time()\nwhile time.process_time() - started < 0.1: pass\n"


def test_work_counts_and_sleep_and_other_processes_do_not():
    with slow.own_seconds() as working:
        exec(BUSY)
    with slow.own_seconds() as waiting:
        time.sleep(0.1)
        subprocess.run([sys.executable, "-S", "-c", BUSY], check=True)
    assert working[0] >= 0.1 and waiting[0] < 0.05


@pytest.mark.parametrize("mark", [None, "slow", "sweep"])
def test_a_test_over_the_limit_fails(request, monkeypatch, mark):
    """Over the limit and what is forgiven; one that is marked may."""

    monkeypatch.setattr(request.config.option, "slow_fails", True)

    def call(margin: float) -> object:
        with monkeypatch.context() as patch:  # the hook around this test has its own limit again
            patch.setattr(slow, "LIMIT", 0.02)
            patch.setattr(slow, "MARGIN", margin)
            hook = slow.pytest_runtest_call(request.node)
            next(hook)
            exec(BUSY)
            with pytest.raises(StopIteration) as returned:
                hook.send("result")
            return returned.value.value

    if mark:
        request.node.add_marker(getattr(pytest.mark, mark))
        assert call(3) == "result"
    else:
        assert call(100) == "result"
        with pytest.raises(pytest.fail.Exception, match=r"took 0\.\d CPU seconds, 0.02 are allowed and 0.06"):
            call(3)
        monkeypatch.setattr(request.config.option, "slow_fails", False)
        with pytest.warns(pytest.PytestWarning, match=r"took 0\.\d CPU seconds"):
            assert call(3) == "result"


def test_the_seconds_of_a_run_count_other_processes():
    """Those that a test waits for, and forks of the server, which are nobody's children here."""
    table = cpu.Table()
    subprocess.run([sys.executable, "-S", "-c", BUSY], check=True)
    waited, not_children = table.since_last()
    assert waited >= 0.09 and not_children == 0  # os.times counts hundredths
    forked(BUSY)
    waited, not_children = table.since_last()
    assert waited > not_children - 1e-6 and not_children >= 0.09  # sums of floats


def test_a_table_of_seconds():
    table = cpu.Table()
    table.tests.update({"tests/a.py::test_b[1]": 2.0, "tests/a.py::test_c": 1.0, "tests/d.py::test_e": 2.5})
    assert table.text(7.25).splitlines() == [
        "7.2 in all", "",
        "    3.00 tests/a.py", "    2.50 tests/d.py", "    1.75 imports and collection", "",
        "    2.50 tests/d.py::test_e", "    2.00 tests/a.py::test_b[1]", "    1.00 tests/a.py::test_c",
    ]  # fmt: skip
