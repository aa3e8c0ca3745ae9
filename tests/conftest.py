"""The device that a test runs on.

A test that takes the fixture `device` runs on the CPU and on "mps", or on the one that its mark `on` names,
and on the other in the sweep. On a Mac "mps" is Metal, elsewhere it is the simulator (tests/simulator), which
runs the same host code and shaders in an ordinary PyTorch. There it runs under one of four orders of threads
and threadgroups, selected by the test's name, and in the sweep under another one, except for cases that run
only in the sweep.
"""

import atexit
import contextlib
import gc
import importlib
import os
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support import trained
from support.cpu import (  # noqa: F401  # hooks
    pytest_runtest_logreport,
    pytest_runtest_logstart,
    pytest_runtest_makereport,
    pytest_sessionfinish,
    pytest_terminal_summary,
)
from support.hanging import pytest_runtest_protocol  # noqa: F401  # a hook
from support.slow import pytest_runtest_call  # noqa: F401  # a hook
from support.sweep import in_part, in_sweep

SCHEDULES = 4
OTHER_ORDER = "mps-other-order"
MOST_LINES, MOST_LETTERS = 24, 500  # of a comparison that fails
SIMULATED = sys.platform != "darwin"


def pytest_addoption(parser):
    parser.addoption("--slow-fails", action="store_true", help="a slow test fails unless it says why")
    parser.addoption("--cpu", metavar="FILE", help="write the CPU seconds of files and tests")
    parser.addoption("--all-tests", action="store_true", help="fail over the CPU seconds of all tests")
    parser.addoption("--references", action="store_true", help="only on the CPU, without the simulator")
    parser.addoption("--part", metavar="N/M", help="run one of M parts of the tests")


def pytest_configure(config):
    if part := config.getoption("part"):
        try:
            in_part("", part)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
    os.environ.setdefault("MOE_MPS_CHECK", "0")  # accelerate() checks operators only in tests about that
    os.environ.setdefault("MOE_MPS_KEEP_WARM", "0")  # no thread beats but in tests about that
    os.environ.setdefault("MOE_MPS_TUNE", "0")  # nothing is timed but in tests about that
    os.environ.setdefault("MOE_MPS_CAPTURE", "0")  # tokens are captured only in tests about that
    if "XDG_CACHE_HOME" not in os.environ:  # whatever is remembered is of these tests alone
        folder = tempfile.TemporaryDirectory(prefix="moe_mps_cache_")
        config.add_cleanup(folder.cleanup)
        os.environ["XDG_CACHE_HOME"] = folder.name
    config.addinivalue_line("markers", "on(device): with the fixture device, on the other in the sweep")
    config.addinivalue_line(
        "markers", "own_gpu: the simulator's GPU runs beside the host, as the name draws it"
    )
    config.addinivalue_line("markers", "pinned: compares a text with tests/pinned/, and with --pin writes it")
    config.addinivalue_line("markers", "slow(why): over 1.5 CPU seconds, not with `scripts/test --changed`")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of what a shell starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests press Ctrl-C in their processes
    if config.getoption("dist", "no") != "no":
        return  # the workers run the tests
    gc.disable()  # until all is imported: half a million objects that stay
    # Before test modules are imported: torch remembers for the whole process whether MPS was there when first
    # asked.
    if SIMULATED and not config.getoption("references"):
        install_error(config)
    from torch_moe_mps.models.basics.unmodified import all_operators

    operators = contextlib.ExitStack()
    operators.enter_context(all_operators())  # the CPU runs what mps does but in tests about that
    config.add_cleanup(operators.close)
    for gpus in (torch.cuda, torch.xpu, torch.mtia):
        if not gpus.is_available():  # a seed for them would wait with a traceback, which takes a millisecond
            gpus.manual_seed_all = lambda seed: None


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    named = [mark for mark in metafunc.definition.iter_markers("parametrize") if mark.args[0] == "device"]
    if "device" in metafunc.fixturenames and not named:
        on = metafunc.definition.get_closest_marker("on")
        devices = in_sweep(("cpu", "mps"), on.args if on else ("cpu", "mps"))
        if metafunc.config.getoption("references"):  # in the sweep, what is for mps
            devices = [each for each in devices if "cpu" in (each, *getattr(each, "values", ()))]
        elif SIMULATED and devices[1] == "mps":
            devices.append(pytest.param(OTHER_ORDER, marks=pytest.mark.sweep))
        metafunc.parametrize("device", devices, indirect=True)
    yield
    if metafunc.config.getoption("markexpr").startswith("not sweep"):
        leave_out_sweep(metafunc)


def leave_out_sweep(metafunc):
    """Leaves one case at most of what would be deselected: making all takes a third of collecting.

    The list of cases is pytest's own; where it has none of this name, all are made and deselected.
    """
    every = getattr(metafunc, "_calls", [])
    whole = metafunc.definition.get_closest_marker("sweep")
    calls = [call for call in every if not whole and all(m.name != "sweep" for m in call.marks)]
    every[:] = calls or every[:1]


def pytest_collection_modifyitems(config, items):
    """A case that runs only in the sweep is not run there in another order, too."""
    others = {i for i in items if OTHER_ORDER in i.nodeid and len(list(i.iter_markers("sweep"))) > 1}
    if part := config.getoption("part"):
        others |= {item for item in items if not in_part(item.nodeid, part)}
    config.hook.pytest_deselected(items=[*others])
    items[:] = [item for item in items if item not in others]


def pytest_collection_finish(session):
    """What is imported is never garbage: without it, looking for garbage takes a third of the time."""
    if "transformers" in sys.modules:
        importlib.import_module("support.recipes")
    gc.freeze()
    atexit.register(gc.unfreeze)  # or libraries find then that their types still live, and say so at length
    gc.set_threshold(10_000)  # objects, not 700 or 2,000 as Python has it
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_assertrepr_compare():
    """The first lines of what differs: pytest cuts nothing where CI is set, or with -vv."""
    explanations = yield
    return [lines and _few([*lines]) for lines in explanations]


def _few(lines: list[str]) -> list[str]:
    more = [f"... and {len(lines) - MOST_LINES:,} lines more"] if len(lines) > MOST_LINES else []
    return [line[:MOST_LETTERS] for line in lines[:MOST_LINES]] + more


def install_error(config) -> str | None:
    """Install the simulator once. Returns: the error if it cannot be built."""
    if not hasattr(config, "_simulator_error"):
        from simulator import build_device
        from support.simulated import install

        config._simulator_error = None
        try:
            install()
        except build_device.BuildError as error:
            config._simulator_error = str(error)
    return config._simulator_error


@pytest.fixture
def device(request) -> str:
    if request.param == "cpu":
        yield "cpu"
        return
    if not SIMULATED:
        if not torch.backends.mps.is_available():
            pytest.fail("this Mac's GPU is not available to torch, so nothing would be tested", pytrace=False)
        yield "mps"
        torch.mps.synchronize()
        return
    name = request.node.nodeid.replace(OTHER_ORDER, "mps")
    order = zlib.crc32(name.encode()) + (request.param != "mps")
    request.getfixturevalue("simulated").set_schedule(order % SCHEDULES)
    yield "mps"


@pytest.fixture
def simulated(request):
    """The simulator, for tests of what only it shows: findings, counters, traces."""
    if request.config.getoption("references"):
        pytest.skip("only the CPU's references are tested")
    if not SIMULATED:
        pytest.skip("a real Metal device has no counters, traces and findings")
    error = install_error(request.config)
    if error:
        pytest.fail(error, pytrace=False)
    import simulator

    torch.ops.moe_mps._commit_every(96)  # so that few traces show commits, always in the same places
    try:
        with beside_the_host(request.node, simulator):
            yield simulator
        torch.mps.synchronize()
    finally:
        simulator.reset()
        with simulator.stream(1), contextlib.suppress(torch.AcceleratorError):
            torch.ops.moe_mps._raise_fault()  # each stream is told of a fault, also of another stream's


def beside_the_host(test, simulator):
    """A GPU of the simulator with a thread of its own, for tests with the mark `own_gpu`.

    With SIMULATED_OWN_GPU, a number, every test of the simulator has one, with draws by that number.
    """
    every = os.environ.get("SIMULATED_OWN_GPU", "")
    if not every and test.get_closest_marker("own_gpu") is None:
        return contextlib.nullcontext()
    seed = zlib.crc32(f"{test.nodeid}{every}".encode())
    print(f"simulator.own_gpu({seed})")  # shown where the test fails
    return simulator.own_gpu(seed)


@pytest.fixture
def captured(monkeypatch) -> None:
    """Decode steps are captured, on any device."""
    monkeypatch.setenv("MOE_MPS_CAPTURE", "1")


@pytest.fixture
def few_formats(monkeypatch) -> None:
    """Random calls have two formats and two dtypes, as each further one is compiled for them alone."""
    from support import any_arguments, quantized_layers

    monkeypatch.setattr(any_arguments, "EVERY_FORMAT", quantized_layers.ALWAYS[:2])
    monkeypatch.setattr(any_arguments, "DTYPES", (torch.float32, torch.bfloat16))


@pytest.fixture
def shipped_defaults(monkeypatch) -> None:
    """Recipes of tiny models are those of users, too."""
    from support import recipes

    monkeypatch.setattr(recipes.Recipe, "of_sizes", recipes.SHIPPED)


@pytest.fixture
def refused(capsys) -> Callable[..., str]:
    """Runs a command that must fail. Returns: what its only line says, or its last behind progress."""

    def run(*arguments: object, progress: bool = False) -> str:
        from torch_moe_mps.commands import main

        capsys.readouterr()
        assert main([*map(str, arguments)]) == 1
        *others, line = capsys.readouterr().err.strip().splitlines()
        begin = "torch-moe-mps: error: "
        assert line.startswith(begin) and (progress or not others), (others, line)
        return line.removeprefix(begin)

    return run


@pytest.fixture
def smollm2() -> Path:
    """The file of a model with trained weights."""
    file = trained.smollm2()
    if file is None:
        pytest.skip(trained.MISSING)
    return file


@pytest.fixture
def every_order(device, request) -> Callable[[], Iterator[None]]:
    """For repeating a call on `device`: in the simulator each time in another order of threads."""

    def repeat() -> Iterator[None]:
        for seed in range(SCHEDULES):
            if SIMULATED and device == "mps":
                request.getfixturevalue("simulated").set_schedule(seed)
            yield

    return repeat
