"""Frequencies of rotary embeddings that a GGUF file divides by factors, as those of Llama 3.1 and later."""

import math

import numpy as np
from transformers import PreTrainedConfig

from .file import read_file

_FACTORS = "rope_freqs.weight"
_BOUNDS = ((1.0, 4.0), (1.0, 1.0))  # low and high of Llama 3.1, and of Llama 4
_TRAINED = 8192  # positions that these were trained on before


def set_rope(config: PreTrainedConfig, file: str) -> None:
    """Sets the config's rope_parameters to what the factors of a file stand for; metadata do not say it.

    Raises: ValueError for factors of another kind than Llama 3.1's.
    """
    rope = getattr(config, "rope_parameters", None)
    tensor = next((each for each in read_file(file)[1] if each.name == _FACTORS), None)
    if tensor is None or not isinstance(rope, dict) or rope.get("rope_type") != "default":
        return
    factors = tensor.values().astype(np.float64)
    if (factors == 1).all():
        return
    for low, high in _BOUNDS:
        expected = _llama3_factors(len(factors), rope["rope_theta"], factors.max(), low, high)
        if np.allclose(factors, expected, rtol=1e-3):
            config.rope_parameters = rope | {
                "rope_type": "llama3",
                "factor": float(factors.max()),
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": _TRAINED,
            }
            return
    raise ValueError(
        f"moe_mps::gguf: {_FACTORS} must be the factors of Llama 3.1 for {_TRAINED:,} positions, "
        f"got others, from {factors.min():.4g} to {factors.max():.4g}"
    )


def _llama3_factors(count: int, theta: float, factor: float, low: float, high: float) -> np.ndarray:
    """Divisors of the frequencies: 1 for short waves, `factor` for long ones, a blend in between."""
    waves = 2 * math.pi * theta ** (np.arange(count) / count)
    turns = _TRAINED / waves
    share = np.clip((turns - low) / (high - low), 0, 1) if high > low else (turns > high).astype(np.float64)
    return 1 / ((1 - share) / factor + share)
