"""gpt-oss: its GGUF files, and the form of its answers."""

from .. import Family

FAMILY = Family(answers={"harmony": f"{__name__}.answers"})
