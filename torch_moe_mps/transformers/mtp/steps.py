"""MTP layers at run time: loaded once per model, quantised and accelerated like its layers."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from ...checkpoints.mtp import config_of_mtp, read_mtp, require_mtp
from ...models.basics.state import STATE, kv_bits_of, state_of
from ...models.caches.cache import grow_cache
from ...models.capture.candidates import DRAFTING
from ...models.capture.classes import capture_calls, captures_of
from ...models.capture.policy import wanted_capture


class MtpStep(PreTrainedModel):
    """One MTP layer as a model whose calls for a few tokens are captured.

    Args:
        layers: as transformers has them, with the model's embedding and head.
        number: of the layer.
    """

    def __init__(self, layers: Any, number: int):
        super().__init__(PreTrainedConfig())  # transformers would change that of the layers
        self.layers, self.number = layers, number

    def forward(
        self, input_ids: Tensor, states: Tensor, position_ids: Tensor, cache: Cache
    ) -> tuple[Tensor, Tensor]:
        """Logits [1, 1, V] of the next token, and hidden states [1, T, H] for the next MTP layer.

        Args:
            input_ids: [1, T], each the successor of its state's token.
            states: [1, T, H] hidden states of the model or the previous MTP layer.
            position_ids: [1, T], of the tokens.
        """
        result = self.layers.forward_layer(self.number, states, position_ids, cache, input_ids=input_ids)
        return self.layers._project_to_logits(result[:, -1:]), result


def mtp_layers(model: Any, accelerate: Callable[[Any], object]) -> Any:
    """transformers' module of a model's MTP layers, with its embedding and head.

    Args:
        accelerate: called with the layers if the model is accelerated.

    Raises: ValueError for a model without MTP layers.
    """
    if model not in DRAFTING:
        require_mtp(model)
        read = read_mtp(model)
        if any(STATE in vars(module) for module in model.modules()):
            accelerate(read.layers)
        DRAFTING[model] = read
    result = DRAFTING[model]
    result.tie_with_main_model(model)
    return result.to(model.device)


def mtp_steps(model: Any, accelerate: Callable[[Any], object]) -> list[MtpStep]:
    """List of a model's MTP layers, see `mtp_layers`. Raises: ValueError for a model without any."""
    layers = mtp_layers(model, accelerate)
    steps = [MtpStep(layers, number).eval() for number in range(len(layers.layers))]
    for step in steps:
        state_of(step).kv_bits = kv_bits_of(model)
        step.register_forward_pre_hook(grow_cache, with_kwargs=True)
        if captures_of(model) is not None:
            capture_calls(step, wanted_capture(None))
    return steps


def new_mtp_cache(model: Any) -> Any:
    """Empty KV cache of the MTP layers.

    A layer reads tokens in order from the first one, so masks work as for any cache; positions may be offset
    from the model's.
    """
    return DynamicCache(config=config_of_mtp(model))
