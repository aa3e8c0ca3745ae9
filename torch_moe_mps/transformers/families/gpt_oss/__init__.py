"""gpt-oss: its GGUF files."""

from .. import GGUF

GGUF["gpt-oss"] = f"{__name__}.gguf"  # not imported before transformers is complete
