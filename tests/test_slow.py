"""What the limits on a test's time count, what fails over them, and the CPU seconds of a whole run."""

import re
import subprocess
import sys
import threading

import pytest
from simulator import build
from support import cpu, hanging, slow
from support.processes import forked

BUSY = "import time\nstarted = time.process_time()\nwhile time.process_time() - started < 0.1: pass\n"


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


def test_what_is_wrong_with_the_seconds_of_all_tests(tmp_path, monkeypatch):
    """Too many, and a file with many that says nowhere why; nothing if pieces were built meanwhile."""
    sources = {
        "plain": '"""Values."""',
        "marked": '@pytest.mark.slow("loads a model")',
        "says": '"""Values.\n\nEach loads a model, some CPU seconds."""',
    }
    table = cpu.Table()
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
        table.tests.update({f"{name}.py::test[{i}]": 8.0 for i in range(4)})
    monkeypatch.setattr(build, "cache_directory", lambda: tmp_path)
    plain = "plain.py takes 32 CPU seconds: say why in its docstring, or mark tests of it slow"
    assert cpu.faults(table, 1600, tmp_path) == [plain]
    assert cpu.faults(table, 1601, tmp_path) == [
        plain,
        "1,601 CPU seconds are more than the 1,600 of all tests",
    ]
    for i in range(cpu.MOST_BUILT + 1):
        (tmp_path / f"kernel-{i}.so").touch()
    assert cpu.faults(table, 1601, tmp_path) == []


def test_a_test_whose_worker_ended_is_one_failed_test(monkeypatch):
    """xdist reports it; the seconds of the others are kept."""
    monkeypatch.setattr(cpu, "TABLE", cpu.Table())
    place = ("a.py", None, "a.py")
    report = pytest.TestReport("a.py::test_b", place, {}, "failed", "worker 'gw0' crashed", "???")
    cpu.pytest_runtest_logreport(report)
    report.cpu_seconds, report.cpu_seconds_forked = 2.0, 1.0
    cpu.pytest_runtest_logreport(report)
    assert cpu.TABLE.tests == {"a.py::test_b": 2.0} and cpu.TABLE.forked == 1.0


@pytest.mark.parametrize("compiles", [True, False])
def test_the_limit_of_a_test_begins_again_where_something_was_compiled(request, monkeypatch, compiles):
    begun = threading.Event()
    monkeypatch.setattr(hanging, "get_timeout_config_value", lambda config: 0.2)
    monkeypatch.setattr(hanging.faulthandler, "dump_traceback_later", lambda *_, **__: begun.set())
    hook = hanging.pytest_runtest_protocol(request.node)
    next(hook)
    if compiles:
        subprocess.run([sys.executable, "-S", "-c", BUSY], check=True)
    assert begun.wait(60 if compiles else 0.1) == compiles
    with pytest.raises(StopIteration) as returned:
        hook.send("result")
    assert returned.value.value == "result"


def test_a_failing_comparison_shows_the_first_lines(request, monkeypatch):
    """Also where CI is set, and pytest cuts nothing."""
    monkeypatch.setenv("CI", "true")
    names = [f"torch.some.name_{i}" for i in range(2000)]
    (shown,) = filter(
        None,
        request.config.hook.pytest_assertrepr_compare(
            config=request.config, op="==", left=[[], names], right=[[], []]
        ),
    )
    assert len(shown) == 25 and re.fullmatch(r"\.\.\. and [12],\d{3} lines more", shown[-1])
    assert max(map(len, shown)) <= 500 and sum("name_" in line for line in shown) >= 10
