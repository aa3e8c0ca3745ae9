"""Names of models and lines of errors, for what may not wait for torch."""

from pathlib import Path


def split_gguf(name: str) -> tuple[str, str | None]:
    """The folder, or name on the Hub, and the GGUF file in it, of FILE.gguf or NAME:FILE.gguf; else None."""
    if not name.endswith(".gguf"):
        return name, None
    folder, _, file = ("", "", name) if Path(name).exists() else name.partition(":")
    if folder and file:
        return folder, file
    return str(Path(name).parent), Path(name).name


def first_line(error: object) -> str:
    """The first line of an error or a text that is not empty; "" where there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
