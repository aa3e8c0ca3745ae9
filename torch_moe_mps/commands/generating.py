"""generate() as chat, serve and generate call it: it keeps prompts, and ends when it is told to."""

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from ..transformers.prompt_cache import new_cache
from .prompts import Kept, Prompts, is_marked, mark, pauses
from .speculation import Speculation

# Inputs beside the tokens that are all zeros, or all ones, where there is only text.
_OF_TEXT = {"attention_mask": 1, "token_type_ids": 0, "mm_token_type_ids": 0}


class Generating:
    """Stands for a model in calls of `generate`; all else is the model's.

    Args:
        prompts: that are kept; None keeps none.
        speculation: None guesses no tokens.
    """

    def __init__(self, model: Any, prompts: Prompts | None = None, speculation: Speculation | None = None):
        self.model, self.prompts, self.speculation = model, prompts, speculation
        self._ended, self._interrupted = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def end(self) -> None:
        """What is generated ends with its next token, and all that is asked for later with its first."""
        self._ended.set()

    def interrupt(self) -> None:
        """What is generated now ends with its next token, or the next piece of its prompt."""
        self._interrupted.set()

    def _ends(self) -> bool:
        return self._ended.is_set() or self._interrupted.is_set()

    def generate(self, streamer: Any = None, **given: Any) -> Any:
        """As the model's own `generate`, whose arguments it takes by name."""
        self._interrupted.clear()
        steps = _Steps(self._ends, streamer)
        given |= {"stopping_criteria": [steps], "streamer": streamer and steps}
        with ExitStack() as stack:
            if self.speculation is not None:
                given |= self.speculation.arguments
                stack.enter_context(self.speculation.counting(self.model))
            if self.prompts is None or not _can_be_kept(self.model, given):
                stack.enter_context(_sliced(self.model))
                result = self.model.generate(**given)
            else:
                result = self._keeping(self.prompts, given, steps)
        if steps.error is not None:
            raise steps.error
        return result

    def _keeping(self, prompts: Prompts, given: dict[str, Any], steps: "_Steps") -> Any:
        ids = given["input_ids"]
        prompts.read(self.model)
        kept = prompts.take(ids[0].cpu(), new_cache(self.model))
        for module in self.model.modules():
            if hasattr(module, "rope_deltas"):  # of the last prompt with images
                module.rope_deltas = None
        if not self._compute(kept, ids):
            prompts.put(kept)
            if steps.streamer is not None:
                steps.end()
            return ids
        with _sliced(self.model):
            result = self.model.generate(**given, past_key_values=kept.cache)
        tokens = getattr(result, "sequences", result)[0].cpu()
        for layer in kept.cache.layers:
            if getattr(layer, "record_past", False):  # for candidates of tokens, which are cut off again
                layer.record_past = False
        prompts.put(Kept(tokens[: kept.cache.get_seq_length()], kept.cache, kept.states))
        return result

    @torch.no_grad()
    def _compute(self, kept: Kept, ids: Tensor) -> bool:
        """Computes a prompt but for its last piece. Returns: whether it was not ended."""
        start, prompt = len(kept.ids), ids.shape[1]
        for end in pauses(kept, prompt):
            if self._ends():
                return False
            self.model(
                input_ids=ids[:, start:end], past_key_values=kept.cache, use_cache=True, logits_to_keep=1
            )
            start, kept.ids = end, ids[0, :end].cpu()
            if is_marked(end, prompt):
                mark(kept)
        return True


def _can_be_kept(model: Any, given: dict[str, Any]) -> bool:
    """Whether a request is one sequence of text, in a cache that grows."""
    config = copy.deepcopy(given.get("generation_config") or model.generation_config)
    config.update(**{name: value for name, value in given.items() if hasattr(config, name)})
    inputs = {
        name: value for name, value in given.items() if isinstance(value, Tensor) and name != "input_ids"
    }
    return (
        given["input_ids"].shape[0] == 1
        and all(name in _OF_TEXT and bool((value == _OF_TEXT[name]).all()) for name, value in inputs.items())
        and config.cache_implementation in (None, "dynamic")
        and config.use_cache is not False
        and (config.num_beams or 1) == 1
        and (config.num_return_sequences or 1) == 1
        and model._supports_default_dynamic_cache()
        and not model.config.is_encoder_decoder
    )


class _Steps(StoppingCriteria):
    """Between the steps of `generate`: shows their tokens, and ends it.

    A streamer that raises, as that of a request does whose client has gone, ends it, too: `generate` returns
    then, with a cache that is whole.
    """

    def __init__(self, is_ended: Callable[[], bool], streamer: Any):
        self.is_ended, self.streamer = is_ended, streamer
        self.error: Exception | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ends = self.is_ended() or self.error is not None
        return input_ids.new_full((len(input_ids),), ends).bool()

    def put(self, value: Tensor) -> None:
        try:
            if self.error is None:
                self.streamer.put(value.reshape(-1))  # several tokens, where candidates were accepted
        except Exception as error:
            self.error = error

    def end(self) -> None:
        if self.error is None:
            self.streamer.end()


@contextmanager
def _sliced(model: Any) -> Iterator[None]:
    """Lets the first step of assisted generation skip what its cache has, as plain generation does."""
    own = model.prepare_inputs_for_generation

    @functools.wraps(own)
    def prepare(ids: Tensor, next_sequence_length: int | None = None, **given: Any) -> Any:
        cache = given.get("past_key_values")
        if next_sequence_length is None and cache is not None and (before := cache.get_seq_length()):
            next_sequence_length = ids.shape[1] - before
        return own(ids, next_sequence_length=next_sequence_length, **given)

    model.prepare_inputs_for_generation = prepare
    try:
        yield
    finally:
        del model.prepare_inputs_for_generation
