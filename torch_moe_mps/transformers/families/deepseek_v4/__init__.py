"""DeepSeek-V4: attention to a window and to compressed keys; routers whose choice a table has."""

from ...caches.layers import OF_FAMILIES
from ...modules.rules import MODULE_RULES
from .attention import rewrite_compressed_attention
from .cache import growing_layer
from .hash_router import rewrite_hash_router

OF_FAMILIES.append(growing_layer)
MODULE_RULES.extend((rewrite_compressed_attention, rewrite_hash_router))
