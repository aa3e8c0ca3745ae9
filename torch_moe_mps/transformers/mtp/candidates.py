"""Candidate generator of `generate(use_mtp=True)` for accelerated models; MTP layers are loaded once."""

from collections.abc import Callable
from typing import Any

from ...checkpoints.mtp import config_of_mtp
from ...models.upstream import MtpCache, MTPCandidateGenerator
from .steps import mtp_layers


class Candidates(MTPCandidateGenerator):
    """Candidate generator that drafts with a checkpoint's MTP layers.

    It has the attributes of transformers' class. That one loads dense layers in each call, and raises for a
    packed embedding or head: it shares them before it loads, and looks for them in the checkpoint.
    """

    def __init__(self, model: Any, config: Any, processors: Any, accelerate: Callable[[Any], object]):
        self.mtp_model = mtp_layers(model, accelerate)
        self.num_mtp_layers, self.device = self.mtp_model.num_mtp_layers, model.device
        self.model_kwargs_overrides = {"output_hidden_states": -1}  # the last layer's alone
        self.mtp_cache = MtpCache(config=config_of_mtp(model))
        self.mtp_cache.activate_past_recording()
        self.do_sample, self.logits_processor = config.do_sample, processors
        self.is_main_model_prefill = True
