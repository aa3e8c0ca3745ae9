"""Tests that are not run again while nothing has changed that they depend on.

With `--kept`, as in `scripts/test`, a test that passed is kept by a digest of its name, the files that it
depends on, the compilers, the installed packages, the processor and the variables that change results. It
runs again once one of them differs. A test that failed or was skipped is never kept, nor is one that draws
other numbers in each run.

The files are those of `dependencies`: imports lead to them. A test that starts processes, connects to one, or
reads a file that is not among them depends on all files of the repository but other tests and texts; tests of
models that make no buffer of the device depend on no shader.
"""

import ast
import contextlib
import functools
import os
import platform
import re
import subprocess
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import simulator
from simulator import build

from . import dependents, simulated  # noqa: F401  # simulated says where built pieces are kept
from .dependents import PACKAGE, REPOSITORY, SCRIPTS, TESTS

# What every test runs in.
EVERY_TEST = re.compile(
    r"tests/(conftest\.py|\w+\.txt|simulator/(?!tests/|example/|README)|support/(simulated|slow|kept|dependents|processes|fork_server|recipes)\.py)"
    r"|pyproject\.toml|setup\.py|scripts/environment\.sh|torch_moe_mps_autoload\.py"
)
# What operators run: the host code is part of every process that has the device.
OPERATORS = re.compile(r"torch_moe_mps/((csrc|shaders|ops|quantization|selfcheck)/|\w+\.py)")
SHADERS = re.compile(r"torch_moe_mps/shaders/")
SIMULATOR = TESTS / "simulator" / "tests"  # tests that run without the package
MODELS = re.compile(r"tests/(transformers|serving|training)/")  # they meet shaders by running them alone
A_TEST = re.compile(r"tests/(.*/)?test_\w+\.py$")
LAZY = re.compile(r'^    "(\w+)": "\.([\w.]+)",$', re.MULTILINE)
TEXTS = re.compile(r".*\.(md|svg|yml)$|LICENSE$|docs/")
# Threads that meet in another order each time.
RUN_EACH_TIME = ("tests/transformers/models/test_stress.py",)
# Programs that read only what they are told, which belongs to the files of a test.
COMPILERS = re.compile(r"(clang|llvm|opt|ld|ar|g\+\+|gcc|dpkg)\b")
# Source that runs or reads what no import names.
UNKNOWN = re.compile(
    r"^\s*(import|from) (subprocess|runpy|socket)\b|spec_from_file_location|processes import (?!REPOSITORY$)",
    re.MULTILINE,
)
# Events of the interpreter.
PROCESSES = {"os.fork", "os.exec", "os.posix_spawn", "socket.connect"}
EVENTS = PROCESSES | {"open", "subprocess.Popen"}
VARIABLES = ("METAL_SIMULATOR_", "MOE_MPS_", "OMP_", "MKL_", "TORCH", "PYTORCH_", "TRANSFORMERS_", "HF_")
_STARTED = "MOE_MPS_TESTS_STARTED"  # when the whole run began: all its processes then keep the same tests


@functools.cache
def repository() -> dict[Path, str]:
    """{file of the repository, of a commit or not: its name}, without those that git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return {REPOSITORY / name: name for name in sorted(set(names.split("\0")) - {""})}


@functools.cache
def matching(pattern: re.Pattern) -> frozenset[Path]:
    return frozenset(path for path, name in repository().items() if pattern.match(name))


@functools.cache
def inside(folder: Path) -> frozenset[Path]:
    """The files in a folder, and in folders of it, that are no tests."""
    return frozenset(path for path in repository() if folder in path.parents) - matching(A_TEST)


@functools.cache
def lazy_names() -> dict[str, Path]:
    """{name of the package that is imported when first used: the module that has it}"""
    found = LAZY.findall((PACKAGE / "__init__.py").read_text())
    paths = {name: PACKAGE.joinpath(*module.split(".")) for name, module in found}
    return {
        name: path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for name, path in paths.items()
    }


@functools.cache
def imported(path: Path) -> frozenset[Path]:
    """The files that run when one is imported or used: its imports, packages around them, lazy names."""
    files = set(dependents.graph()[path])
    if PACKAGE / "__init__.py" in files:
        words = set(re.findall(r"\w+", path.read_text()))
        files |= {module for name, module in lazy_names().items() if name in words}
    around = {folder / "__init__.py" for file in files for folder in file.parents}
    return frozenset(files | around & dependents.graph().keys())


@functools.cache
def fixtures(conftest: Path) -> dict[str, tuple[frozenset[str], frozenset[Path]]]:
    """{fixture, or "" for what every test runs: words of its code, and the files that it imports}"""
    names = {dependents.name_of(path, root_of(path)): path for path in dependents.graph()[conftest]}
    words, files = defaultdict(set), defaultdict(set)
    for node in ast.parse(dependents.read(conftest)).body:
        decorators = getattr(node, "decorator_list", [])
        is_fixture = any("fixture" in ast.unparse(decorator) for decorator in decorators)
        name = node.name if is_fixture else ""
        words[name] |= set(re.findall(r"\w+", ast.unparse(node)))
        for found in dependents.imports(conftest, TESTS, node):
            files[name] |= {names[one] for one in (found, found.rpartition(".")[0]) if one in names}
    return {name: (frozenset(words[name]), frozenset(files[name])) for name in words}


def root_of(path: Path) -> Path:
    return [root for folder, root in dependents.ROOTS.items() if folder in path.parents][-1]


def of_fixtures(test: Path) -> set[Path]:
    """The conftest.py of a test's folders, and what their fixtures import, of those that it names."""
    conftests = [
        folder / "conftest.py" for folder in test.parents if folder / "conftest.py" in dependents.graph()
    ]
    known = [fixture for conftest in conftests for fixture in fixtures(conftest).items()]
    words, files = set(re.findall(r"\w+", dependents.read(test))) | {""}, set(conftests)
    for _ in known:  # one may ask for another
        for name, (own, imported_there) in known:
            if name in words:
                words |= own if name else set()
                files |= imported_there
    return files


def room_of(path: Path) -> Path | None:
    """The folder of the package that a file lies in, the outermost."""
    parts = path.relative_to(PACKAGE).parts if PACKAGE in path.parents else ()
    return PACKAGE / parts[0] if len(parts) > 1 else None


@functools.cache
def closure(test: Path) -> frozenset[Path]:
    """A test, the files that it and its fixtures import, and what these import in turn.

    Of the package whole rooms, of which modules know each other by their names, too.
    """
    seen: set[Path] = set()
    rooms: set[Path] = set()
    ahead = {test} | of_fixtures(test)
    while ahead:
        path = ahead.pop()
        seen.add(path)
        if path != PACKAGE / "__init__.py" and path.name != "conftest.py":
            ahead |= imported(path) - seen
        room = room_of(path)
        if room is not None and room not in rooms:
            rooms.add(room)
            ahead |= (inside(room) & dependents.graph().keys()) - seen
    return frozenset(seen)


@functools.cache
def named() -> dict[Path, frozenset[Path]]:
    """{text or table of the repository: the tests that name it}"""
    texts = matching(TEXTS) | frozenset(path for path in repository() if SCRIPTS in path.parents)
    return {path: frozenset(dependents.dependents(path)) for path in texts if path.suffix != ".py"}


@functools.cache
def texts_of(test: Path) -> frozenset[Path]:
    """The files without imports that a test names, or that lie in its folder."""
    return inside(test.parent) | {path for path, tests in named().items() if test in tests}


@functools.cache
def dependencies(test: Path) -> frozenset[Path]:
    """The files that a test depends on."""
    files = closure(test)
    rooms = {room for path in files if (room := room_of(path)) is not None}
    operators = frozenset() if SIMULATOR in test.parents else matching(OPERATORS)
    return files.union(matching(EVERY_TEST), operators, texts_of(test), *map(inside, rooms))


@functools.cache
def everything(test: Path) -> frozenset[Path]:
    """All files but other tests, and texts that the test does not name."""
    return frozenset(repository()) - matching(A_TEST) - matching(TEXTS) | {test} | texts_of(test)


@functools.cache
def choices(test: Path) -> dict[str, frozenset[Path]]:
    """{how much a test does: the files that it then depends on}"""
    files = {"all": everything(test)}
    if not is_unknown(test):
        files["device"] = dependencies(test)
        if MODELS.match(repository()[test]):
            files["models"] = dependencies(test) - matching(SHADERS)
    return files


@functools.cache
def is_unknown(test: Path) -> bool:
    """Whether a test, or a module of the tests or scripts that it imports, may run what no import names."""
    own = closure(test) - matching(EVERY_TEST)
    return any(UNKNOWN.search(dependents.read(path)) for path in own if PACKAGE not in path.parents)


@functools.cache
def _content(path: Path) -> str:
    name = path.relative_to(REPOSITORY)
    return build.digest(name, path.read_bytes() if path.exists() else "removed")


@functools.cache
def contents(files: frozenset[Path]) -> str:
    """A digest of the names and the bytes of files."""
    return build.digest(*map(_content, sorted(files)))


def forget() -> None:
    """Files are read again."""
    for module in (dependents, sys.modules[__name__]):
        for known in vars(module).values():
            if known is not listen and hasattr(known, "cache_clear"):
                known.cache_clear()


def environment() -> str:
    """A digest of what else a result depends on."""
    compilers = [build.run([tool, "--version"], "asking") for tool in (build.tool("clang++"), build.LINK[0])]
    packages = sorted(path.name for path in Path(sysconfig.get_paths()["purelib"]).glob("*.dist-info"))
    names = sorted(name for name in os.environ if name.startswith(VARIABLES))
    variables = [(name, os.environ[name]) for name in names if name != _STARTED and "CACHE" not in name]
    cpu = Path("/proc/cpuinfo")
    flags = re.findall(r"^(?:model name|flags)\s*:.*", cpu.read_text(), re.MULTILINE) if cpu.exists() else []
    return build.digest(compilers, packages, variables, sys.version, platform.platform(), sorted(set(flags)))


_hearing: list["Watched"] = []  # those of a test that runs now


@functools.cache
def listen() -> None:
    """Hands on what the interpreter tells: a hook stays for ever, and costs 1 % of the time."""

    def hear(event: str, arguments: tuple) -> None:
        if event not in EVENTS:
            return
        for watched in _hearing:
            watched.hear(event, arguments)

    sys.addaudithook(hear)


class Watched:
    """What tests do besides computing, by their files: paths that they open, processes that they meet."""

    def __init__(self) -> None:
        self.test = REPOSITORY
        self.opened: dict[Path, set[Path]] = defaultdict(set)
        self.processes: set[Path] = set()
        self.on_device: set[Path] = set()
        listen()

    def hear(self, event: str, arguments: tuple) -> None:
        if event == "open":
            if isinstance(arguments[0], str) and arguments[0].startswith(str(REPOSITORY)):
                self.opened[self.test].add(Path(arguments[0]))
        elif event == "subprocess.Popen":
            if not COMPILERS.match(os.path.basename(os.fsdecode(arguments[0]))):
                self.processes.add(self.test)
        elif event in PROCESSES:
            self.processes.add(self.test)

    @contextlib.contextmanager
    def during(self, test: Path) -> Iterator[None]:
        buffers = simulator.made_buffers()
        self.test = test
        _hearing.append(self)
        try:
            yield
        finally:
            _hearing.remove(self)
            if simulator.made_buffers() != buffers:
                self.on_device.add(test)

    def choice(self, test: Path) -> str | None:
        """The least of `choices` that holds for the tests of a file; None where they read more than all."""
        opened = self.opened[test] & repository().keys()
        files = choices(test)
        if test in self.processes or "device" not in files or not opened <= files["device"]:
            return "all" if opened <= files["all"] else None
        return "device" if test in self.on_device or "models" not in files else "models"


class Kept:
    """The plugin: which tests are kept, and which pass in this run."""

    def __init__(self) -> None:
        self.environment = environment()
        self.started = float(os.environ.setdefault(_STARTED, repr(time.time())))
        self.outcomes: dict[str, set[str]] = defaultdict(set)
        self.drawn: set[str] = set()
        self.watched = Watched()
        self.count = 0

    def record(self, test: str, files: frozenset[Path]) -> Path:
        """The file that says that a test has passed."""
        return build.cache_directory("passed") / build.digest(test, contents(files), self.environment)

    def is_kept(self, test: str) -> bool:
        if test.startswith(RUN_EACH_TIME) or test in self.drawn:
            return False
        records = (self.record(test, files) for files in choices(file_of(test)).values())
        return any(path.exists() and path.stat().st_mtime < self.started for path in records)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        self.drawn = {item.nodeid for item in items if draws(item)}
        kept = {item for item in items if self.is_kept(item.nodeid)}
        self.count = len(kept)
        config.hook.pytest_deselected(items=list(kept))
        items[:] = [item for item in items if item not in kept]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector):
        if not isinstance(collector, pytest.Module):
            return (yield)
        with self.watched.during(collector.path):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        with self.watched.during(file_of(item.nodeid)):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        self.outcomes[item.nodeid].add(report.outcome)
        return report

    def passed(self) -> set[Path]:
        """The files that say which tests have passed, those apart that none can say it of."""
        found = set()
        for test, outcomes in self.outcomes.items():
            known = file_of(test) in repository() and file_of(test).exists()  # not removed meanwhile
            choice = self.watched.choice(file_of(test)) if known else None
            if outcomes == {"passed"} and choice is not None:
                found.add(self.record(test, choices(file_of(test))[choice]))
        return found

    def pytest_sessionfinish(self, session, exitstatus):
        """Keep what passed, unless a file was changed meanwhile."""
        if hasattr(session.config, "workeroutput"):  # one of several processes
            session.config.workeroutput["kept"] = self.count
        before = self.passed()
        forget()
        for record in before & self.passed():
            record.touch()
        if self.count and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.count = getattr(node, "workeroutput", {}).get("kept", 0)

    def pytest_terminal_summary(self, terminalreporter):
        if self.count:
            terminalreporter.line(f"{self.count} tests kept: they passed with the same files and compilers")


def file_of(test: str) -> Path:
    return REPOSITORY / test.partition("::")[0]


def draws(item: pytest.Item) -> bool:
    """Whether a test draws other numbers in each run."""
    settings = getattr(getattr(item, "function", None), "_hypothesis_internal_use_settings", None)
    return settings is not None and not settings.derandomize
