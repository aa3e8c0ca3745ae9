"""gpt-oss: its GGUF files."""

from .. import Family, GgufArchitecture
from .gguf import NAME, config, conversions

FAMILY = Family(gguf={NAME: GgufArchitecture(config, conversions)})
