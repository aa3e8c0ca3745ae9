"""Apple's Metal: metal.json has classes, methods and constants, written by `scripts/macos/metal_table`."""

import functools
import json
import re
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("metal.json")


def plain(types: str) -> str:
    """A method's types without offsets, self, selector and qualifiers, with one letter for a byte.

    "BQ" for "C24@0:8Q16": a BOOL is a char or a bool, by the machine and the compiler, and a number of 8 bits
    is a char, which has a letter of its own in wheels.
    """
    without = re.sub(r"(?<=[\w@^?}:])\d+", "", types.replace("@0:8", ""))
    unnamed = re.sub(r"\{\w+=", "{?=", without)
    return re.sub("[rnNoORV]", "", unnamed).translate(str.maketrans("CcZz", "BBBB"))


@functools.cache
def table() -> dict[str, Any]:
    """{"classes": {name: its parents and methods}, "types": of enumerations, "constants", "structs"}"""
    return json.loads(TABLE.read_text())


def methods_of(name: str) -> dict[str, str]:
    """{selector: types, or "" where they are unknown} of a class or protocol and what it inherits from."""
    row = table()["classes"].get(name, {"is": [], "methods": {}})
    inherited: dict[str, str] = {}
    for parent in row["is"]:
        inherited |= methods_of(parent)
    return inherited | row["methods"]
