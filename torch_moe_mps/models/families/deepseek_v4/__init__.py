"""DeepSeek-V4: attention to a window and to compressed keys."""

from .. import Family
from .attention import rewrite_compressed_attention
from .cache import growing_layer

FAMILY = Family(rules=(rewrite_compressed_attention,), growing_class=growing_layer)
