"""Shell commands that install missing packages."""

import shlex
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def pip_install(*arguments: str) -> str:
    """Shell command for this Python's pip, whatever `pip` is in the shell."""
    scripts_folder = Path(sys.executable).parent
    found = shutil.which("pip")
    if found is not None and Path(found).parent == scripts_folder:
        pip = "pip install"
    elif PathFinder.find_spec("pip") is not None:  # find_spec would end distutils of setuptools
        pip = f"{shlex.quote(sys.executable)} -m pip install"
    else:
        pip = f"uv pip install --python {shlex.quote(sys.executable)}"
    return " ".join((pip, *map(shlex.quote, arguments)))


def install_extra(extra: str) -> str:
    """Shell command that installs what an extra requires.

    pip and uv read that from the package as it is installed, whether it came from an index or a checkout.
    """
    return pip_install(f"torch-moe-mps[{extra}]")
