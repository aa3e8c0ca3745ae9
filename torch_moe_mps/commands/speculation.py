"""--draft and --prompt-lookup: tokens are guessed and verified together."""

import argparse
from typing import Any

from ..serving.speculation import Speculation
from .sources import folder_of, loading_options, tokenizer_of


def speculation_of(options: argparse.Namespace, model: Any, folder: str, device: str) -> Speculation | None:
    """The guesses that the options ask for; None for none.

    Raises: ValueError for a model whose states cannot be cut back to the tokens that were accepted.
    """
    if options.draft is None and options.prompt_lookup is None:
        return None
    if model._is_stateful or not model._supports_default_dynamic_cache():
        expected = "a model whose cache can be cut"
        raise ValueError(
            f"--draft and --prompt-lookup are for {expected}, got the recurrent states of {folder}"
        )
    if options.draft is None:
        return Speculation({"prompt_lookup_num_tokens": options.prompt_lookup})
    from ..transformers.loading import from_pretrained

    draft_folder = folder_of(options.draft)
    draft = from_pretrained(draft_folder, device_map=device, **loading_options(options))
    arguments: dict[str, Any] = {"assistant_model": draft}
    own, other = (tokenizer_of(name, options.trust_remote_code) for name in (folder, draft_folder))
    sizes = {part.config.get_text_config().vocab_size for part in (model, draft)}
    if own.get_vocab() != other.get_vocab() or len(sizes) > 1:
        arguments |= {"tokenizer": own, "assistant_tokenizer": other}
    return Speculation(arguments)
