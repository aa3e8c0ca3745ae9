"""Classes of caches, masks and outputs of models, and facts about models that use them."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from transformers.dynamic_module_utils import HF_MODULES_CACHE, get_class_from_dynamic_module
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import causal_mask_function, eager_mask
from transformers.models.auto import auto_factory
from transformers.utils import GENERATION_CONFIG_NAME, ModelOutput, cached_file, logging, output_capturing
from transformers.utils.generic import GeneralInterface

# Plain caches, whose layers are made to grow in place: DFlash's came with 5.24.
GROWING = (DynamicCache, *(cls for cls in [getattr(cache_utils, "DFlashCache", None)] if cls is not None))

# Names of configs for the tokens that an indexer selects together: it counts them from the first of all rows.
_TOGETHER = ("index_kpool", "indexer_compress_ratio", "index_block_size")

RECORDERS = output_capturing.__name__  # the file of hooks that record what modules return


def is_recording() -> bool:
    """True in a call of a model that returns what its modules do: output_hidden_states and the like."""
    return bool(output_capturing._active_collector.get())


def chosen_together(config: Any) -> dict[str, int]:
    """{name in a config: tokens that an indexer selects together, counted from the first of all rows}"""
    return {name: getattr(config, name, None) or 1 for name in _TOGETHER}


def block_embedding(embedding: Any, ids: Tensor) -> Tensor:
    """A model's embedding of the tokens of a DFlash block, without the norm that some models have there."""
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator  # 5.24 has it

    holder: Any = SimpleNamespace(main_model_input_embeddings=embedding)
    embedded: Tensor = DFlashTokenCandidateGenerator._get_noise_embeds(holder, ids)
    return embedded


def auto_class_of(config: Any, auto: Any) -> Any:
    """The class of transformers that an Auto class makes from a config."""
    return auto_factory._get_model_class(config, auto._model_mapping)


def variables_of(chat_template: str) -> set[str]:
    """Names that a chat template reads and does not set itself, functions of its environment included.

    Raises: jinja2.TemplateSyntaxError.
    """
    from jinja2.meta import find_undeclared_variables
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(chat_template).environment  # it has tags of transformers
    return {*find_undeclared_variables(environment.parse(chat_template))}
