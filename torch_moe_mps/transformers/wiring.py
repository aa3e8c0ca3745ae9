"""Registration: fills the registry tables of lower layers and of transformers, in order of precedence.

A table belongs to the module that reads it. Importing this module fills all of them; no other module changes
another one at import, so the order of imports does not matter. `torch_moe_mps.transformers` imports this
module first.
"""

import importlib
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

from ..checkpoints.in_place import LOADED
from ..checkpoints.quantizer import register as register_quantizer
from ..models import families
from ..models.attention.attention import attention, attention_mask
from ..models.attention.implementations import MASKS_CHOICES
from ..models.attention.indexer import rewrite_indexer
from ..models.attention.latents import METHOD, lazy_expand_kv
from ..models.basics.interface import RECOGNISERS
from ..models.caches.declared import GROWING_CLASSES
from ..models.capture.candidates import CANDIDATES
from ..models.families import Family
from ..models.graphs.passes import INTRODUCED, PASSES
from ..models.graphs.passes.routing import OPTIONS_OF
from ..models.modules.experts import NAME, experts_forward
from ..models.modules.rules import MODULE_RULES
from ..models.modules.stacked_experts import recognise_stacks
from ..models.upstream.models import ALL_EXPERTS_FUNCTIONS
from .accelerate import accelerate
from .install import METHODS

FAMILIES = (
    "dbrx",
    "deepseek_v4",
    "gemma4",
    "glm5_next",
    "inkling",
    "jetmoe",
    "llama4",
    "minimax_m3",
    "qwen4_exp",
)


def _candidates(model: Any, config: Any, processors: Any) -> Any:
    from .mtp.candidates import Candidates  # subclasses code of transformers, which is not complete yet

    return Candidates(model, config, processors, accelerate)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, attention_mask)
register_quantizer()
METHODS[METHOD] = lazy_expand_kv
RECOGNISERS.append(recognise_stacks)
MODULE_RULES.append(rewrite_indexer)
CANDIDATES.append(_candidates)
LOADED.append(accelerate)
for name in FAMILIES:
    family: Family = importlib.import_module(f"{families.__name__}.{name}").FAMILY
    MODULE_RULES.extend(family.rules)
    RECOGNISERS.extend(family.recognisers)
    GROWING_CLASSES.extend(filter(None, [family.growing_class]))
    METHODS.update(family.methods)
    MASKS_CHOICES.extend(filter(None, [family.masks_choices]))
    OPTIONS_OF.extend(filter(None, [family.options_of]))
    INTRODUCED.update(family.introduced)
    for place in family.passes:
        place.put_into(PASSES)
