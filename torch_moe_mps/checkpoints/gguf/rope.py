"""Frequencies of rotary embeddings that a GGUF file divides by factors, which are tensors.

Files of Llama 3.1 and later, and of Step-3.5, have one list. Files of Phi-3 and Phi-3.5-MoE have two: for
texts as long as the model was trained with, and for longer ones.
"""

import math

import numpy as np
from transformers import PreTrainedConfig

from .architectures import LONG_FACTORS, SHORT_FACTORS
from .file import read_file
from .header import header_of

_FACTORS = "rope_freqs.weight"
# Positions of the training before, low and high: of Llama 3.1, of Llama 4, and of Step-3.5.
_BOUNDS = ((8192, 1.0, 4.0), (8192, 1.0, 1.0), (131072, 1.0, 32.0))
# Types of models whose classes read the factor of the cosines and sines by other names.
_MSCALES = {"phimoe": ("short_mscale", "long_mscale")}


def set_rope(config: PreTrainedConfig, file: str) -> None:
    """Sets the config's rope_parameters to what the factors of a file stand for; metadata do not say it.

    Raises: ValueError for factors that no type of rope_parameters expresses.
    """
    names = {name for name, *_ in header_of(file).tensors}
    if not names.isdisjoint((LONG_FACTORS, SHORT_FACTORS)):
        _set_long_factors(config, file)
    if _FACTORS in names:
        _set_factors(config, file)


def _values(file: str, name: str) -> np.ndarray:
    """The values of a tensor. Raises: ValueError if the file has none of this name."""
    tensor = next((each for each in read_file(file)[1] if each.name == name), None)
    if tensor is None:
        raise ValueError(f"moe_mps::gguf: {name} must be in the file, got no such tensor")
    return tensor.values()


def _set_long_factors(config: PreTrainedConfig, file: str) -> None:
    metadata, rope = header_of(file).metadata, getattr(config, "rope_parameters", None)
    kind = rope.get("rope_type") if isinstance(rope, dict) else None
    if rope is None or kind != "default":
        expected = "absent where the config has other rope_parameters than the default ones"
        raise ValueError(f"moe_mps::gguf: {LONG_FACTORS} must be {expected}, got {rope}")
    prefix = f"{metadata['general.architecture']}.rope.scaling"
    trained = metadata.get(f"{prefix}.original_context_length")
    if trained is None:
        expected = f"in the metadata of a file with {LONG_FACTORS}"
        raise ValueError(
            f"moe_mps::gguf: {prefix}.original_context_length must be {expected}, got no such key"
        )
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    count = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    lists = {}
    for entry, name in (("short_factor", SHORT_FACTORS), ("long_factor", LONG_FACTORS)):
        values = _values(file, name)
        if values.shape != (count,) or not (values > 0).all():
            expected = f"{count} positive factors"
            raise ValueError(f"moe_mps::gguf: {name} must be {expected}, got {values.tolist()}")
        lists[entry] = [float(str(value)) for value in values]
    factor = float(str(np.float32(metadata.get(f"{prefix}.attn_factor", 1.0))))  # llama.cpp's default
    config.rope_parameters = {
        **rope,
        **lists,
        "rope_type": "longrope",
        "original_max_position_embeddings": trained,
        "attention_factor": factor,
        **dict.fromkeys(_MSCALES.get(config.model_type, ()), factor),
    }
    config.validate_rope()  # some classes also keep an entry outside of rope_parameters


def _set_factors(config: PreTrainedConfig, file: str) -> None:
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    # llama.cpp divides the frequencies of layers without a window, where those of the others are their own.
    of_type = rope.get("full_attention")
    plain = rope if of_type is None else of_type
    if plain.get("rope_type") != "default":
        return
    factors = _values(file, _FACTORS).astype(np.float64)
    if (factors == 1).all():
        return
    for bounds in _BOUNDS:
        expected = _llama3_factors(len(factors), plain["rope_theta"], factors.max(), *bounds)
        if np.allclose(factors, expected, rtol=1e-3):
            trained, low, high = bounds
            scaled = plain | {
                "rope_type": "llama3",
                "factor": float(factors.max()),
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": trained,
            }
            config.rope_parameters = scaled if of_type is None else rope | {"full_attention": scaled}
            return
    known = " or ".join(f"{trained:,}" for trained in sorted({trained for trained, *_ in _BOUNDS}))
    raise ValueError(
        f"moe_mps::gguf: {_FACTORS} must be the factors of Llama 3.1 for {known} positions, "
        f"got others, from {factors.min():.4g} to {factors.max():.4g}"
    )


def _llama3_factors(
    count: int, theta: float, factor: float, trained: int, low: float, high: float
) -> np.ndarray:
    """Divisors of the frequencies: 1 for short waves, `factor` for long ones, a blend in between."""
    waves = 2 * math.pi * theta ** (np.arange(count) / count)
    turns = trained / waves
    share = np.clip((turns - low) / (high - low), 0, 1) if high > low else (turns > high).astype(np.float64)
    return 1 / ((1 - share) / factor + share)
