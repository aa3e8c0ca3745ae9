"""Commands that install missing packages the way this package was installed: checkout, wheel or PyPI."""

import importlib.metadata
import json
import shlex
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

_NAME = "torch-moe-mps"
# The extension is compiled with the torch that is installed.
_FROM_SOURCES = "--no-build-isolation"


def pip_install(*arguments: str) -> str:
    """Shell command for this Python's pip, whatever `pip` is in the shell."""
    own = Path(sys.executable).parent
    found = shutil.which("pip")
    if found is not None and Path(found).parent == own:
        pip = "pip install"
    elif PathFinder.find_spec("pip") is not None:  # find_spec would end distutils of setuptools
        pip = f"{shlex.quote(sys.executable)} -m pip install"
    else:
        pip = f"uv pip install --python {shlex.quote(sys.executable)}"
    return " ".join((pip, *map(shlex.quote, arguments)))


def install_command(extra: str | None, *options: str) -> str:
    """Shell command that reinstalls this package from its source, with an extra."""
    more = "" if extra is None else f"[{extra}]"
    source, how = _source()
    if "://" in source:
        return pip_install(*options, *how, f"{_NAME}{more} @ {source}")
    return pip_install(*options, *how, f"{source}{more}")


def is_from_index() -> bool:
    """True if this package was installed from a package index."""
    return _source()[0] == _NAME


def _source() -> tuple[str, tuple[str, ...]]:
    """(requirement that this package was installed by, pip options that it needs)."""
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():  # the package runs where it is edited
        return str(checkout), (_FROM_SOURCES, "-e")
    try:
        text = importlib.metadata.distribution(_NAME).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        text = None
    if text is None:
        return _NAME, ()
    about = json.loads(text)
    if "vcs_info" in about:
        commit = about["vcs_info"]["commit_id"]
        return f"{about['vcs_info']['vcs']}+{about['url']}@{commit}", (_FROM_SOURCES,)
    if not about["url"].startswith("file:"):
        return about["url"], ()
    return url2pathname(urlsplit(about["url"]).path), (_FROM_SOURCES,) if "dir_info" in about else ()
