"""gpt-oss: its GGUF files, and the form of its answers."""

from .. import Family

FAMILY = Family(gguf={"gpt-oss": f"{__name__}.gguf"}, answers={"harmony": f"{__name__}.answers"})
