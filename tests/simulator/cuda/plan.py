"""What `record` passes to `run`: a folder with plan.json and the preprocessed sources of the kernels."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

VERSION = 1


@dataclass
class Binding:
    """A buffer argument: the bytes of `buffer` from `offset` on, or the bytes of setBytes in hex."""

    index: int
    buffer: str = ""
    offset: int = 0
    data: str = ""


@dataclass
class Dispatch:
    """One kernel launch. The grid counts threadgroups; an indirect one lies in a buffer: (name, byte offset).

    `library` is a file of the plan, `kernel` a host name or a template-id, `constants` the function constants
    by number, `threadgroup_bytes` the lengths of the [[threadgroup(n)]] arguments.
    """

    library: str
    kernel: str
    grid: tuple[int, int, int] | None
    threads: tuple[int, int, int]
    bindings: list[Binding]
    indirect: tuple[str, int] | None = None
    threadgroup_bytes: dict[int, int] = field(default_factory=dict)
    constants: dict[int, int | float] = field(default_factory=dict)


@dataclass
class Recording:
    """What the host code encodes for a case.

    Buffers go by name: an input's; "result0" and so on for what the operator returns; "scratch0" and so on
    for what it allocates besides. `results` gives the shape and dtype of each result, `scratch` the bytes of
    each scratch buffer.
    """

    family: str
    arguments: dict
    dispatches: list[Dispatch]
    results: dict[str, tuple[list[int], str]]
    scratch: dict[str, int]


class Plan:
    def __init__(self, folder: Path):
        self.folder = folder
        self.recordings: list[Recording] = []
        self.about: dict[str, str] = {}  # versions of what was recorded

    def add_source(self, name: str, text: str) -> str:
        """Keeps a preprocessed source; the name of its file."""
        file = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.metal"
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / file).write_text(text)
        return file

    def source(self, file: str) -> str:
        return (self.folder / file).read_text()

    def files(self, name: str) -> list[str]:
        """The sources that were added under a name."""
        return sorted(path.name for path in self.folder.glob(f"{name}-*.metal"))

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {
            "version": VERSION,
            "about": self.about,
            "cases": [asdict(recording) for recording in self.recordings],
        }
        (self.folder / "plan.json").write_text(json.dumps(content, indent=1))

    @classmethod
    def load(cls, folder: Path) -> "Plan":
        path = folder / "plan.json"
        if not path.exists():
            raise FileNotFoundError(
                f"{folder} has no plan.json: record a plan first, on a machine with clang"
            )
        content = json.loads(path.read_text())
        if content["version"] != VERSION:
            raise ValueError(
                f"{path} is of version {content['version']}, this reads {VERSION}: record it again"
            )
        plan = cls(folder)
        plan.about = content["about"]
        plan.recordings = [load_recording(case) for case in content["cases"]]
        return plan


def load_recording(case: dict) -> Recording:
    dispatches = [load_dispatch(d) for d in case.pop("dispatches")]
    return Recording(dispatches=dispatches, **case)


def load_dispatch(fields: dict) -> Dispatch:
    bindings = [Binding(**binding) for binding in fields.pop("bindings")]
    for name in ("threadgroup_bytes", "constants"):
        fields[name] = {int(key): value for key, value in fields[name].items()}
    return Dispatch(bindings=bindings, **fields)
