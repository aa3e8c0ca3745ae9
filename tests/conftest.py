"""The device that a test runs on.

A test that takes the fixture `device` runs on the CPU and on "mps": on a Mac that is Metal, elsewhere it is
the simulator (tests/simulator), which runs the same host code and shaders in an ordinary PyTorch. There it
runs under one of four orders of threads and threadgroups, selected by the test's name, and in the sweep under
another one, except for tests marked `one_schedule` and for cases that run only in the sweep.
"""

import gc
import importlib
import os
import re
import signal
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support import dependents, trained
from support.slow import pytest_runtest_call  # noqa: F401  # a hook
from support.values import DTYPES

SCHEDULES = 4
OTHER_ORDER = "mps-other-order"
SIMULATED = sys.platform != "darwin"


def pytest_addoption(parser):
    parser.addoption("--kept", action="store_true", help="do not run what passed before (support/kept.py)")
    parser.addoption("--operators", default="", help="no cases of operators but these, joined by commas")
    parser.addoption("--slow-fails", action="store_true", help="a slow test fails unless it says why")


def pytest_configure(config):
    os.environ.setdefault("MOE_MPS_CHECK", "0")  # accelerate() checks operators only in tests about that
    os.environ.setdefault("MOE_MPS_TUNE", "0")  # nothing is timed but in tests about that
    os.environ.setdefault("MOE_MPS_CAPTURE", "0")  # tokens are captured only in tests about that
    config.addinivalue_line(
        "markers", "one_schedule: run the simulated mps variant under one schedule in the sweep, too"
    )
    config.addinivalue_line("markers", "of_kernels: about what only kernels do: on the CPU in the sweep")
    config.addinivalue_line(
        "markers", "either_device: about what every device has from one place: on one of them, in turn"
    )
    config.addinivalue_line("markers", "kernels_in_sweep: on mps in the sweep, on the CPU always")
    config.addinivalue_line("markers", "slow(why): over 1.5 CPU seconds, not with `scripts/test --changed`")
    config.addinivalue_line("markers", "of_models: about what models do on any device: on mps in the sweep")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of what a shell starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests press Ctrl-C in their processes
    gc.disable()  # until all is imported: half a million objects that stay
    # Before test modules are imported: torch remembers for the whole process whether MPS was there when first
    # asked.
    if SIMULATED and install_error(config) is None and config.getoption("kept"):
        from support.kept import Kept

        config.pluginmanager.register(Kept())


def mps_variants(one_schedule: bool) -> list:
    """The parameters of `device` beside "cpu"."""
    if not SIMULATED or one_schedule:
        return ["mps"]
    return ["mps", pytest.param(OTHER_ORDER, marks=pytest.mark.sweep)]


def pytest_generate_tests(metafunc):
    named = [mark for mark in metafunc.definition.iter_markers("parametrize") if mark.args[0] == "device"]
    if "device" in metafunc.fixturenames and not named:
        marks = {mark.name for mark in metafunc.definition.iter_markers()}
        cpu = pytest.param("cpu", marks=pytest.mark.sweep) if "of_kernels" in marks else "cpu"
        mps = mps_variants("one_schedule" in marks)
        if "of_models" in marks:
            mps[0] = pytest.param("mps", marks=pytest.mark.sweep)
        metafunc.parametrize("device", [cpu, *mps], indirect=True)


def _of_dtypes(items: list) -> Iterator[tuple[str, object]]:
    """(case, test) of kernels, which are instances of one template for all dtypes."""
    for item in items:
        call = getattr(item, "callspec", None)
        if call and call.params.get("dtype") in DTYPES and str(call.params.get("device")).startswith("mps"):
            yield re.sub(r"dtype\d+|torch\.\w+", "", item.nodeid), item


def _of_devices(items: list) -> Iterator[tuple[str, object]]:
    """(case, test) of what every device has from one place."""
    for item in items:
        if any(item.iter_markers("either_device")):
            yield re.sub(r"(?<=[\[-])(cpu|mps)(?=[]-])", "", item.nodeid, count=1), item


def _not_in_turn(tests: Iterator[tuple[str, object]]) -> Iterator:
    """The tests of each case but one: another one for another case."""
    cases = defaultdict(list)
    for name, item in tests:
        cases[name].append(item)
    for name, case in cases.items():
        turn = zlib.crc32(name.encode()) % len(case)
        yield from case[:turn] + case[turn + 1 :]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Of a case that is the same in several dtypes, or on both devices, one runs, and the rest in the sweep.

    A case that only runs there anyway is not run in another order.
    """
    for item in items:
        if any(item.iter_markers("kernels_in_sweep")) and item.callspec.params.get("device") != "cpu":
            item.add_marker(pytest.mark.sweep)
    for item in [*_not_in_turn(_of_dtypes(items)), *_not_in_turn(_of_devices(items))]:
        item.add_marker(pytest.mark.sweep)
    others = [i for i in items if OTHER_ORDER in i.nodeid and len(list(i.iter_markers("sweep"))) > 1]
    if names := config.getoption("operators"):
        others += [i for i in items if dependents.of_other_operators(i, {*names.split(",")})]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in set(others)]


def pytest_collection_finish(session):
    """What is imported is never garbage: without it, looking for garbage takes a third of the time."""
    if "transformers" in sys.modules:
        importlib.import_module("support.recipes")
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # or libraries find at the end that their types still live, and say so at length


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
    if not SIMULATED:
        pytest.skip("a real Metal device has no counters, traces and findings")
    error = install_error(request.config)
    if error:
        pytest.fail(error, pytrace=False)
    import simulator

    torch.ops.moe_mps._commit_every(96)  # so that few traces show commits, always in the same places
    yield simulator
    try:
        torch.mps.synchronize()
    finally:
        simulator.reset()


@pytest.fixture
def few_formats(monkeypatch) -> None:
    """Random calls have one format of each way of storing, as each further one is compiled for them alone."""
    from support import any_arguments

    monkeypatch.setattr(any_arguments, "EVERY_FORMAT", ("affine4_64", "mxfp4", "q4_k"))


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
