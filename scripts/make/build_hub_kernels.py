"""Writes kernels of linear attention, gated norms and rotary embeddings as a repository of the Hub's kernels.

    python scripts/make/build_hub_kernels.py DESTINATION [--version 1] [--backend metal]

It has no compiled code: the package's own Metal files, headers pasted in as at run time, the Python of
hub_kernels/, and metadata.json with the hashes of all files. docs/hub_kernels.md says how it is used.
"""

import argparse
import base64
import hashlib
import json
import re
import shutil
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SHADERS = REPOSITORY / "torch_moe_mps" / "shaders"
NAME = "moe-mps-linear-attention"
FAMILIES = ("linear_attention", "norms", "rope")
LIBRARIES = ("linear_attention", "norms_gated", "rope")


def flat(name: str, seen: set[str]) -> str:
    """A shader with its own headers pasted in, each once."""
    seen.add(name)

    def pasted(match: re.Match[str]) -> str:
        return "" if match[1] in seen else flat(match[1], seen)

    text = (SHADERS / name).read_text().replace("#pragma once\n", "")
    return re.sub(r'#include "(.*)"\n', pasted, text)


def layout() -> dict:
    """The structs of params/, {name: [[type, member]]}, and the numbers of params/ and geometry/."""
    names = [f"{part}/{name}.h" for part in ("params", "geometry") for name in ("common", *FAMILIES)]
    text = re.sub(r"//.*", "", "".join((SHADERS / name).read_text() for name in names))
    bodies = re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL)
    structs = {name: re.findall(r"(\w+) (\w+);", body) for name, body in bodies}
    numbers = re.findall(r"(?:GEOMETRY|#define) (\w+)(?: =)? (\d+)\b", text)
    return {"structs": structs, "constants": {name: int(value) for name, value in numbers}}


def build(destination: Path, version: int = 1, backend: str = "metal") -> Path:
    """Writes build/torch-<backend>/. Returns: that folder.

    Raises: FileExistsError if it is there.
    """
    folder = destination / "build" / f"torch-{backend}"
    (folder / "shaders").mkdir(parents=True)
    for file in (REPOSITORY / "hub_kernels").glob("*.py"):
        shutil.copyfile(file, folder / file.name)
    for library in LIBRARIES:
        (folder / "shaders" / f"{library}.metal").write_text(flat(f"{library}.metal", set()))
    shutil.copyfile(REPOSITORY / "LICENSE", folder / "LICENSE")
    (folder / "layout.json").write_text(json.dumps(layout(), indent=1) + "\n")
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    hashes = {
        str(file.relative_to(folder)): base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
        for file in files
    }
    metadata = {
        "id": f"_{NAME.replace('-', '_')}_{version}_{backend}",
        "name": NAME,
        "version": version,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": hashes},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
    return folder


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--version", type=int, default=1)
    parser.add_argument("--backend", choices=("metal", "cpu"), default="metal", help="cpu is for tests")
    options = parser.parse_args()
    print(build(options.destination, options.version, options.backend))
