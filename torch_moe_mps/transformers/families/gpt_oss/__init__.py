"""gpt-oss: its GGUF files."""

from .. import Family

FAMILY = Family()
