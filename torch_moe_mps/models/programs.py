"""The names of models that serving, pipeline and commands import; they import no other module of models.

What only one program does with parts of a model belongs into that program; what it must know of caches, calls
or experts to do so belongs below, and has one name here:

    caches     PrefixState, CachePart, JoinedCache    the state of a prefix: cut, copied, written and read
               BatchedCache, NotBatchable        the cache of several sequences
               DraftCache                        a cache whose last tokens are taken back
               empty_cache, KVCache              a new cache; the bytes that one has
               keeps_prompts, hands_cache_on     whether a model's states lie in its cache
               adapters_of, key_of               what a cached prefix is valid for
               cache_among, cache_argument       the cache in a call's result, and as a call's argument
    calls      needs_positions                   whether a forward must be told positions
               call_on_shapes                    a call on the meta device
               captures_of, wide_logits          how tokens are captured; logits in float32
    sampling   Sampling, no_distribution         a token from logits; the error where there is no distribution
    experts    reads_of                          reads from the disk, for experts that are larger than memory
    batches    reason_against_rows               why sequences cannot be batched
               reason_for_order                  why keys in its caches must lie in their order
    processes  UntrackedState, pipeline_of       objects of a model that no result depends on; its pipeline
               count_tokens, ExchangeError       entries of layers in other processes; a failed exchange
    adapters   Adapter                           LoRA that is stored in a folder
    texts      bytes_to_unicode, variables_of    transformers' characters of bytes; variables of a template
"""

from .adapters.adapter import Adapter
from .basics.logits import no_distribution, wide_logits
from .basics.state import UntrackedState, pipeline_of
from .caches.batched import BatchedCache, NotBatchable
from .caches.cache import hands_cache_on
from .caches.draft_cache import DraftCache
from .caches.elsewhere import count_tokens
from .caches.parts import CachePart, JoinedCache
from .caches.prefix_state import PrefixState, empty_cache, keeps_prompts, needs_positions
from .caches.prompt_cache import adapters_of, key_of
from .capture.classes import captures_of
from .capture.exchange import ExchangeError
from .kv_sizes import KVCache
from .modules.experts_on_disk import reads_of
from .modules.sampling import Sampling
from .trials.batching import reason_against_rows, reason_for_order
from .upstream import bytes_to_unicode
from .upstream.calls import cache_among, cache_argument, call_on_shapes
from .upstream.models import variables_of

__all__ = [
    "Adapter",
    "BatchedCache",
    "CachePart",
    "DraftCache",
    "ExchangeError",
    "JoinedCache",
    "KVCache",
    "NotBatchable",
    "PrefixState",
    "Sampling",
    "UntrackedState",
    "adapters_of",
    "bytes_to_unicode",
    "cache_among",
    "cache_argument",
    "call_on_shapes",
    "captures_of",
    "count_tokens",
    "empty_cache",
    "hands_cache_on",
    "keeps_prompts",
    "key_of",
    "needs_positions",
    "no_distribution",
    "pipeline_of",
    "reads_of",
    "reason_against_rows",
    "reason_for_order",
    "variables_of",
    "wide_logits",
]
