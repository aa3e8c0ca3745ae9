"""--speculative: tokens are drafted and verified together."""

import argparse
import sys
from typing import Any

import torch

from .._text import first_line
from ..checkpoints.mtp import has_mtp, recipe_of_last_layer
from ..checkpoints.source import Source
from ..models.programs import KVCache, reads_of
from ..serving.engine.drafting import Drafting
from ..serving.engine.ranges import vocabulary_of
from ..serving.prefix_cache.memory import PrefixCache
from ..serving.speculative import LOOKUP, MTP
from ..serving.speculative.asked import drafting_of
from ..serving.speculative.dflash import is_dflash, require_assistant
from ..serving.speculative.draft import require_tokens
from .arguments import NO_DRAFTS
from .sources import folder_of, loading_options, skeleton_of, tokenizer_of


def drafts_of(
    options: argparse.Namespace, model: Any, folder: str, device: str, prompts: PrefixCache
) -> Drafting | None:
    """The drafts of an engine; None for none.

    Raises: ValueError for a draft with other tokens, and for a checkpoint without MTP layers.
    """
    if options.speculative == NO_DRAFTS:
        return None
    if options.speculative is None:  # each draft token may need experts of its own from the disk
        return None if "experts" in reads_of(model) else _by_default(model, prompts)
    if options.speculative in (LOOKUP, MTP):
        return drafting_of(model, options.speculative, prompts, "--speculative")
    draft, draft_folder = _draft(options, model, device)
    if not is_dflash(draft.config):
        require_tokens(model, draft, alike=not _differ(options, model, folder, draft, draft_folder))
    return drafting_of(model, draft, prompts, "--speculative")


def _by_default(model: Any, prompts: PrefixCache) -> Drafting | None:
    """Look-up, and the MTP layers of a checkpoint that has some; a line says why they are not used."""
    try:
        if has_mtp(model):
            return drafting_of(model, [LOOKUP, MTP], prompts, "--speculative")
    except Exception as error:  # a default must not end a server
        line = first_line(error) or type(error).__name__
        print(f"torch-moe-mps: the checkpoint's MTP layers are not used: {line}", file=sys.stderr)
    return drafting_of(model, LOOKUP, prompts, "--speculative")


def draft_cache(options: argparse.Namespace, dtype: torch.dtype) -> KVCache | None:
    """Bytes of the cache of the model or assistant of --speculative; None where none is known."""
    if options.speculative in (None, NO_DRAFTS, LOOKUP, MTP):
        return None
    source, model = skeleton_of(options, folder_of(options.speculative, weights=False))
    if is_dflash(source.config):
        return KVCache.of_block_drafter(source.config, dtype)
    return KVCache.of_model(model.to(dtype), options.kv_bits)


def _draft(options: argparse.Namespace, model: Any, device: str) -> tuple[Any, str]:
    """The model or assistant of --speculative, and its folder. A dense assistant is quantised as the model's
    last layer, and computes with the model's states in their dtype.
    """
    from ..transformers.loading import from_pretrained

    folder, how = folder_of(options.speculative), loading_options(options)
    about = Source(folder, how)
    if is_dflash(about.config):
        require_assistant(model, about.config)
        format = None if about.stored else recipe_of_last_layer(model).linears
        how |= {"dtype": model.dtype, **({} if format is None else format.to_dict())}
    return from_pretrained(folder, device_map=device, **how), folder


def _differ(options: argparse.Namespace, model: Any, folder: str, draft: Any, draft_folder: str) -> bool:
    """True if a model and its draft have different vocabularies."""
    tokenizer, other = (tokenizer_of(name, options.trust_remote_code) for name in (folder, draft_folder))
    sizes = {vocabulary_of(part) for part in (model, draft)}
    return tokenizer.get_vocab() != other.get_vocab() or len(sizes) > 1
