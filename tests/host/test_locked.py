"""Functions of torch's that may wait for the GPU with Python's lock, while no other thread runs Python."""

import re
from pathlib import Path

import lock_table
import pytest
from simulator.errors import BuildError
from support.pinned import pinned

import torch_moe_mps

PACKAGE = Path(torch_moe_mps.__file__).parent
# The function of ours that waits without the lock, and torch's own where there is no extension.
RELEASES = "_faults.py"


def in_python(name: str) -> str:
    """The name in torch.mps of a function of its module: "empty_cache" for "MPSModule_emptyCache"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name.removeprefix("MPSModule_")).lower()


def test_the_package_calls_none():
    """Of torch.mps and of storages, by each release; the simulator finds what waits for a tensor's value."""
    assert [*pinned("locked")] == [f"torch {version}" for version in lock_table.VERSIONS]
    waits = {
        in_python(name)
        for text in pinned("locked").values()
        for name in re.findall(r"^MPSModule_\w+", text, re.M)
    }
    assert "empty_cache" in waits and "synchronize" not in waits
    calls = re.compile(
        rf"torch\.mps\.(profiler\.)?({'|'.join(sorted(waits))})\b|untyped_storage\(\)\.(cpu|copy_|clone)\b"
    )
    found = [
        f"{path.relative_to(PACKAGE)}: {match[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for match in calls.finditer(path.read_text())
    ]
    assert found == [f"{RELEASES}: torch.mps.empty_cache"] * 2  # in words, and where there is no extension


@pytest.mark.parametrize("text", pinned("locked").values(), ids=[*pinned("locked")])
def test_no_function_gives_back_a_scalar_with_the_lock(text):
    """Operators do, which torch's bindings call without it: our code may run those of the first line."""
    assert re.match(r"scalar pool: aten::\w+, ", text)
    assert "gives back a scalar" not in text


@pytest.mark.sweep  # downloads torch's wheels
@pytest.mark.parametrize("section", [*pinned("locked")])
def test_the_list_is_what_the_wheels_say(section):
    """Written by `scripts/macos/lock_table`."""
    try:
        text = lock_table.text_of(section.removeprefix("torch "))
    except BuildError as error:
        pytest.skip(f"no wheel to read: {error}")
    assert text == pinned("locked")[section]
