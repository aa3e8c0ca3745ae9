"""Classification of a job's inputs: images, audio, and whether its prefix can be cached."""

import hashlib
import re
from typing import Any

import torch
from torch import Tensor

from ..prefix_cache.memory import Images
from .ranges import placeholders_of

_OF_TEXT = ("token_type_ids", "mm_token_type_ids")  # all zeros where there is only text
# Inputs that are images or sound.
_IMAGES = re.compile("pixel_|image_|video_|audio_|input_features")


def beside_tokens(inputs: dict[str, Any]) -> dict[str, Tensor]:
    names = sorted({*inputs} - {"input_ids", "attention_mask"})
    return {name: inputs[name] for name in names if isinstance(inputs[name], Tensor)}


def images_of(model: Any, inputs: dict[str, Any]) -> Images | None:
    """Images or audio of a request, identified by digest; None for text only."""
    result = {name: value for name, value in beside_tokens(inputs).items() if name not in _OF_TEXT}
    if not result:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for name, value in result.items():
        digest.update(f"{name} {value.dtype} {[*value.shape]}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    ids, tokens = inputs["input_ids"][0].tolist(), placeholders_of(model)
    where = [position for position, token in enumerate(ids) if token in tokens]
    return Images(digest.hexdigest(), *((where[0], where[-1] + 1) if where else (0, len(ids))))


def is_one_prompt(inputs: dict[str, Any]) -> bool:
    """True if the inputs are one unpadded sequence of text, images or audio."""
    mask, beside = inputs.get("attention_mask"), beside_tokens(inputs)
    images = any(map(_IMAGES.match, beside))
    return (
        inputs["input_ids"].shape[0] == 1
        and (mask is None or bool((mask == 1).all()))
        and all(_IMAGES.match(name) or name in _OF_TEXT for name in beside)
        and (images or not any(bool(value.any()) for value in beside.values()))
    )
