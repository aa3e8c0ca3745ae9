"""gpt-oss: its GGUF files, and the form of its answers."""

from .. import ANSWERS, GGUF

GGUF["gpt-oss"] = f"{__name__}.gguf"  # not imported before transformers is complete
ANSWERS["harmony"] = f"{__name__}.answers"
