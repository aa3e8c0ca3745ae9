"""All that this package replaces in other libraries, a row each, and only while models of ours need it.

An object that needs the rows of a library keeps the result of `hold_reach`: modules whose weights are packed
or on the disk need PEFT's rows, layers of attention that run on the operator need transformers' rows, and
captured tokens need that these stay as they are. The first such object puts the rows in, and they are undone
when the last one is gone. All else that changes a model is in its modules and classes.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from ..._versions import PEFT, minor

_PLACE = f"{__package__.rpartition('.')[0]}."


class ReachRow(NamedTuple):
    """A function that is replaced.

    Attributes:
        library, version: the row is put in where this version of the library is installed; None for any.
        what: (file, class, name) of the function; of an interface of transformers, the name is an entry.
        ours: (module of torch_moe_mps.transformers, name there) of what makes the replacement.
        reason: why no interface does.
        ends: the change of the library that would end the row, as docs/upstream.md asks for it.
        undone: when.
    """

    library: str
    version: str | None
    what: tuple[str, str, str]
    ours: tuple[str, str]
    reason: str
    ends: str
    undone: str


_BY_NAME = (
    "transformers compares the name of an implementation with 'sdpa' (Gemma 4, GLM-5, continuous batching), "
    "so a model that runs torch's attention in part has to keep that name"
)
_ENDS_NAMES = "interfaces say what an implementation needs, in place of comparisons with its name"
_WITH_LAYERS = (
    "with the last accelerated layer of attention or captured token: `restore`, or the end of the model"
)
ROWS = (
    ReachRow(
        library="peft",
        version=PEFT,
        what=("peft.tuners.tuners_utils", "BaseTuner", "inject_adapter"),
        ours=("adapters.peft", "injecting"),
        reason=(
            "get_peft_model takes packed layers only if the config registers LoRA layers for them, it lists "
            "linear layers by class, and target_parameters by named_parameters; no model is asked"
        ),
        ends="a hook of the model, `_prepare_adapter_config(config)`, that inject_adapter calls first",
        undone="with the last module whose weights are packed or on the disk",
    ),
    ReachRow(
        library="transformers",
        version=None,
        what=("transformers.modeling_utils", "AttentionInterface", "sdpa"),
        ours=("attention.attention", "around_sdpa"),
        reason=_BY_NAME,
        ends=_ENDS_NAMES,
        undone=_WITH_LAYERS,
    ),
    ReachRow(
        library="transformers",
        version=None,
        what=("transformers.masking_utils", "AttentionMaskInterface", "sdpa"),
        ours=("attention.attention", "around_sdpa_mask"),
        reason=_BY_NAME,
        ends=_ENDS_NAMES,
        undone=_WITH_LAYERS,
    ),
)


class Hold:
    """Reference with which the rows of a library stay in; copies are the same one."""

    def __init__(self, library: str):
        self.library = library

    def __deepcopy__(self, memo: Any) -> "Hold":
        return self

    def __reduce__(self) -> Any:
        return hold_reach, (self.library,)


_lock = threading.RLock()
_held: dict[str, weakref.ref[Hold]] = {}
_undo: dict[str, list[Callable[[], None]]] = {}


def hold_reach(library: str) -> Hold:
    """An object with which the rows of a library stay; they are put in if there is none yet."""
    with _lock:
        known = _held.get(library)
        found = None if known is None else known()
        if found is None:
            _undo_all(library)
            found = Hold(library)
            _held[library] = weakref.ref(found, lambda gone: _gone(library, gone))
            _undo[library] = [_put(row) for row in ROWS if row.library == library and _is_installed(row)]
        return found


def _gone(library: str, gone: Any) -> None:
    if not sys.is_finalizing():
        with _lock:
            if _held.get(library) is gone:
                _undo_all(library)


def _undo_all(library: str) -> None:
    for undo in reversed(_undo.pop(library, [])):
        undo()


def _is_installed(row: ReachRow) -> bool:
    if importlib.util.find_spec(row.library) is None:
        return False
    return row.version in (None, minor(importlib.metadata.version(row.library)))


def _put(row: ReachRow) -> Callable[[], None]:
    """Puts a row in. Returns: what undoes it."""
    file, cls, name = row.what
    owner = getattr(importlib.import_module(file), cls)
    mapping: dict[str, Any] | None = getattr(owner, "_global_mapping", None)
    registry = vars(owner) if mapping is None else mapping

    def put(value: Any) -> None:
        if mapping is None:
            setattr(owner, name, value)
        else:
            mapping[name] = value

    module, maker = row.ours
    before = registry[name]
    ours = getattr(importlib.import_module(_PLACE + module), maker)(before)
    put(ours)

    def undo() -> None:
        if registry[name] is ours:  # one that somebody has put around ours stays, and ours calls the function
            put(before)

    return undo
