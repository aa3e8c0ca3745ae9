"""A small file about one Mac that people can read, beside a report: what ran there, and how fast.

A folder of such files is a table of docs/speed.md.
"""

import json
import zipfile
from collections.abc import Mapping
from typing import Any

VERSION = 1  # number of the form below
# {key: its type}; what a Mac does not tell is None.
FORM: dict[str, tuple[type, ...]] = {
    "version": (int,),
    "chip": (str,),
    "gpu_cores": (int, type(None)),
    "memory_gb": (int, type(None)),
    "macos": (str,),
    "torch": (str,),
    "torch_moe_mps": (str,),
    "versions": (dict,),
    "verdicts": (dict,),  # {phase: how it ended}
    "failures": (int, type(None)),  # findings of the quick check
    "model": (str, type(None)),
    "tokens_s": (dict,),  # {test of `bench`: tokens a second}
    "gpu_idle_us": (float, type(None)),  # for a generated token behind no context
}


def measured(file: zipfile.ZipFile, model: str | None) -> dict[str, Any]:
    """The content of such a file, from a report's phases; of a phase that left no results nothing."""
    names = {*file.namelist()}

    def results(phase: str) -> dict[str, Any]:
        name = f"{phase}.json"
        return json.loads(file.read(name)) if name in names else {}

    check, probe, bench = map(results, ("quick", "probe", "bench"))
    machine = check.get("machine") or probe.get("machine") or {}
    memory = machine.get("memory")
    idle = next((row.get("gpu_idle") for row in bench.get("rows", ()) if row["test"].startswith("tg")), None)
    return {
        "version": VERSION,
        "chip": machine.get("gpu", "").removeprefix("Apple "),
        "gpu_cores": machine.get("cores"),
        "memory_gb": None if memory is None else memory >> 30,
        **{name: machine.get(name, "") for name in ("macos", "torch", "torch_moe_mps")},
        "versions": machine.get("versions", {}),
        "verdicts": {phase: outcome["outcome"] for phase, outcome in results("summary").items()},
        "failures": len(check["failures"]) if "failures" in check else None,
        "model": model,
        "tokens_s": {
            row["test"]: round(row["rate"], 2) for row in bench.get("rows", ()) if row["unit"] == "t/s"
        },
        "gpu_idle_us": None if idle is None else round(1e6 * idle, 1),
    }


def check_form(content: Mapping[str, Any], name: str) -> None:
    """Raises: ValueError where a file called `name` is not of this form."""
    if content.get("version") != VERSION:
        raise ValueError(f"{name}: version must be {VERSION}, got {content.get('version')!r}")
    if {*content} != {*FORM}:
        raise ValueError(f"{name}: keys must be {', '.join(FORM)}, got {', '.join(content)}")
    for key, types in FORM.items():
        if not isinstance(content[key], types):
            raise ValueError(f"{name}: {key} must be {types[0].__name__}, got {content[key]!r}")
