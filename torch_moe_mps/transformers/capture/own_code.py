"""Distinction whether a call of a model runs a library's code alone, or a user's own.

What a library's code has read changes when somebody gives the model, its classes or the library's files other
values, which the fingerprint sees. A user's own code reads whatever his program changes from token to token,
which nothing sees: a call that runs such code is not captured, unless he asks for it.
"""

import os
import re
from types import FrameType

import torch
import transformers

from ..graphs.tracing import NotCapturable
from ..upstream.utilities import HF_MODULES_CACHE

_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Folders of the standard library and of all that may be a checkout: torch, transformers, this package, the
# files of checkpoints.
_FOLDERS = tuple(
    os.path.join(folder, "")
    for folder in (
        os.path.dirname(os.__file__),
        os.path.dirname(torch.__file__),
        os.path.dirname(transformers.__file__),
        _PACKAGE,
        HF_MODULES_CACHE,
    )
)

_known: set[str] = set()  # files of libraries


def is_of_library(file: str) -> bool:
    """Whether a file of Python belongs to an installed package, to Python, or to a checkpoint."""
    return file.startswith((*_FOLDERS, "<frozen ")) or _INSTALLED.search(file) is not None


class OwnCode:
    """Finds the code of a user's own in the calls that `look` is shown, as `sys.setprofile` shows them.

    Attributes:
        found: the first such function and where it is; None if there was none.
    """

    def __init__(self) -> None:
        self.found: str | None = None

    def look(self, frame: FrameType, event: str, argument: object) -> None:
        """Hook for sys.setprofile. Raises: NotCapturable in user code."""
        if event == "call" and frame.f_code.co_filename not in _known:
            self._look_at(frame)

    def _look_at(self, frame: FrameType) -> None:
        file = frame.f_code.co_filename
        if is_of_library(file):
            _known.add(file)
        elif not (file.startswith("<") and _is_made_by_library(frame)):
            self.found = f"{frame.f_code.co_qualname} ({file}:{frame.f_code.co_firstlineno})"
            self.require_none()

    def require_none(self) -> None:
        """Raises: NotCapturable where there was some, for a library may have caught the first error."""
        if self.found is not None:
            raise NotCapturable(
                f"{self.found} is code of your own, and nothing notices when what it reads changes; "
                "accelerate(model, capture=True) captures it nevertheless"
            )


def _is_made_by_library(frame: FrameType) -> bool:
    """Whether code without a file is what a library has written, as that of data classes and named tuples."""
    name, file = (frame.f_globals.get(item) for item in ("__name__", "__file__"))
    if file is None:
        return str(name).startswith("namedtuple_")
    return name != "__main__" and is_of_library(file)
