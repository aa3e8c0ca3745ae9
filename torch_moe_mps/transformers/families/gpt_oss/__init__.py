"""gpt-oss: its GGUF files."""

from .. import Family

FAMILY = Family(gguf={"gpt-oss": f"{__name__}.gguf"})
