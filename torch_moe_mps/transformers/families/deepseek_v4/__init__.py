"""DeepSeek-V4: attention to a window and to compressed keys; routers whose choice a table has."""

from .. import Family
from .attention import rewrite_compressed_attention
from .cache import growing_layer
from .hash_router import rewrite_hash_router

FAMILY = Family(rules=(rewrite_compressed_attention, rewrite_hash_router), growing_class=growing_layer)
