"""finetune.json in the output folder: the options and the results of a training."""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

RECORD, ADAPTER = "finetune.json", "adapter_model.safetensors"
# Options that must be the same where a training goes on.
_SAME = (
    "model", "bits", "group_size", "dtype", "held_out", "rank", "expert_rank", "targets", "batch", "epochs",
    "steps", "learning_rate", "max_length", "seed", "method", "generations", "answer_length",
)  # fmt: skip


def begun(options: argparse.Namespace) -> dict[str, Any]:
    """Record of a new training, or of the training that --resume continues.

    Raises: ValueError if there is none to continue, or its options or data differ.
    """
    output = Path(options.output)
    try:
        digest = hashlib.sha256(Path(options.data).read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"{options.data} must be a file that can be read: {error.strerror}") from None
    asked = {name: getattr(options, name) for name in _SAME} | {"data": digest}
    if not options.resume:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ValueError(
                f"{output} exists; --resume goes on with a training, --output names another folder"
            )
        return {"options": asked}
    about = _read(output)
    for name, value in asked.items():
        if about["options"].get(name) != value:
            what = "the data" if name == "data" else f"--{name.replace('_', '-')}"
            raise ValueError(f"--resume needs the same options and data, got another value of {what}")
    return about


def _read(output: Path) -> dict[str, Any]:
    file = output / RECORD
    if not file.is_file():
        raise ValueError(f"--resume needs a training in {output}, got none")
    try:
        about = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} must be the record of a training, got {error}") from None
    if not (isinstance(about, dict) and isinstance(about.get("options"), dict)):
        raise ValueError(f'{file} must be the record of a training, got one without its "options"')
    for loss in ("before", "after"):
        if loss in about and not isinstance(about[loss], int | float):
            raise ValueError(f'{file} must have a number for "{loss}", got {about[loss]!r:.40}')
    return about
