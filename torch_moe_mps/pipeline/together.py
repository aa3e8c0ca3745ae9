"""`generate` of a model that every process calls alike: the process with the output head samples for all."""

import functools
from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from ..transformers.upstream.calls import cache_among
from .peers import PeerError
from .running import Running

# Arguments of `generate` with which it needs the logits of every token in every process.
_NEED_LOGITS = (
    "assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "custom_generate", "dola_layers",
    "penalty_alpha", "logits_processor", "prefix_allowed_tokens_fn", "negative_prompt_ids", "output_scores",
    "output_logits", "constraints", "force_words_ids", "stop_strings",
)  # fmt: skip


class Together:
    """Stands for the model's own `generate`."""

    def __init__(self, model: Any, running: Running):
        self._model, self._running = model, running
        own = type(model).generate

        @functools.wraps(own)
        def generate(*args: Any, **kwargs: Any) -> Any:
            return self._generate(*args, **kwargs)

        vars(model)["generate"] = generate

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Result of the model's `generate`; failures are sent to the other processes."""
        running, config = self._running, kwargs.get("generation_config") or self._model.generation_config

        def given(name: str) -> Any:
            value = kwargs.get(name)
            return getattr(config, name, None) if value is None else value

        beams = (given("num_beams") or 1) > 1 or (given("guidance_scale") or 1) != 1
        if not beams and not any(map(given, _NEED_LOGITS)):
            # transformers gives a streamer to its own functions only
            kwargs["custom_generate"] = functools.partial(self._sample, kwargs.get("streamer"))
        calls = running.calls
        try:
            return type(self._model).generate(self._model, *args, **kwargs)
        except BaseException as error:
            if running.calls > calls or isinstance(error, PeerError):
                running.peers.failed(error)
            raise  # every process refuses the same arguments

    def _sample(
        self,
        streamer: Any,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        if not self._running.stage.last:  # its logits are all made up: the token was sampled elsewhere
            logits_processor = LogitsProcessorList()
        vars(model)["_prefill"] = self._prefill
        try:
            with self._running.returning("sampled tokens"):
                return type(model)._sample(
                    model,
                    input_ids,
                    logits_processor=logits_processor,
                    stopping_criteria=_DecidedForAll(stopping_criteria, self._running),
                    generation_config=generation_config,
                    synced_gpus=synced_gpus,
                    streamer=streamer,
                    **model_kwargs,
                )
        finally:
            del vars(model)["_prefill"]

    def _prefill(self, input_ids: Tensor, generation_config: Any, model_kwargs: dict, **kwargs: Any) -> Any:
        """Reads a prompt in chunks: a process starts the next one as soon as it has sent one."""
        if generation_config.prefill_chunk_size is not None:
            cache, mask = cache_among(model_kwargs), model_kwargs.get("attention_mask")
            before = 0 if cache is None else int(cache.get_seq_length())
            known = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
            tokens = input_ids.shape[1]
            self._running.to_come = tokens - before if known == tokens else tokens
        model = self._model
        try:
            return type(model)._prefill(model, input_ids, generation_config, model_kwargs, **kwargs)
        finally:
            self._running.to_come = None


class _DecidedForAll(StoppingCriteriaList):
    """Stopping criteria that the process with the output head evaluates for all; it sends the tokens."""

    def __init__(self, criteria: Any, running: Running):
        super().__init__(criteria)
        self.running = running

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        running = self.running
        if running.stage.last:
            done = super().__call__(input_ids, scores, **kwargs)
            running.tell("sampled tokens", [input_ids[:, -1], done])
            return done
        assert running.done is not None
        return running.done.to(input_ids.device)
