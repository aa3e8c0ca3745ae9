"""generate() as chat, serve and generate call it: it keeps prompts, and ends when it is told to."""

import functools
import hashlib
import re
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from ..._faults import raise_fault, synchronize
from ...transformers.basics.state import Beside
from ...transformers.caches.cache import counts_tokens
from ...transformers.caches.prompt_cache import new_cache, reads_whole
from ...transformers.upstream.calls import cache_argument
from ..prefix_cache.memory import Images, PrefixCache
from .abilities import keeps_prompts
from .prefill import Prefill, turned, turning
from .ranges import placeholders_of
from .speculation import Speculation
from .stand_in import call_generate

_OF_TEXT = ("token_type_ids", "mm_token_type_ids")  # all zeros where there is only text
_FROM_STATES = ("use_mtp", "speculation_type")  # settings of transformers' drafts from a model's states
# Inputs that are images or sound.
_IMAGES = re.compile("pixel_|image_|video_|audio_|input_features")


class Generating(Beside):
    """Stands for a model in calls of `generate`; all else is the model's.

    Args:
        prompts: that are kept; None keeps none, and reads each in one piece, as of models that must be.
        speculation: None drafts no tokens.
    """

    def __init__(
        self, model: Any, prompts: PrefixCache | None = None, speculation: Speculation | None = None
    ):
        if prompts is not None and reads_whole(model):
            kind = model.config.get_text_config(decoder=True).model_type
            print(
                f"torch-moe-mps: prompts are read whole, and none is kept: the own code of {kind} in "
                "transformers goes on wrongly behind a cache",
                file=sys.stderr,
            )
            prompts = None
        self.model, self.prompts, self.speculation = model, prompts, speculation
        self.disk_tokens = 0  # tokens of the last prompt that a disk had
        if speculation is not None and prompts is not None:
            speculation.prompts = PrefixCache(prompts.memory)
        self._ended, self._interrupted = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def end(self) -> None:
        """End the answer that is generated with its next token, and all later ones with their first."""
        self._ended.set()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def interrupt(self) -> None:
        """End the answer that is generated now with its next token, or the next piece of its prompt."""
        self._interrupted.set()

    def write(self) -> None:
        """Writes the files of the prompts that are kept."""
        if self.prompts is not None:
            self.prompts.write(self.model)

    @functools.cached_property
    def _keeps(self) -> bool:
        return keeps_prompts(self.model) and counts_tokens(new_cache(self.model))

    def _ends(self) -> bool:
        return self.has_ended or self._interrupted.is_set()

    def generate(
        self,
        streamer: Any = None,
        ends: Callable[[], bool] | None = None,
        progress: Callable[[int, int], None] | None = None,
        hashed: Images | None = None,
        **given: Any,
    ) -> Any:
        """Generate as the model's own `generate`, whose arguments it takes by name.

        Args:
            ends: asked before each token, and each piece of a prompt: whether it ends there.
            progress: takes how many tokens of the prompt are in the cache, and how many it has: first those
                that were kept.
            hashed: the images in the inputs, if somebody has asked `images_of` for them.
        """
        self._interrupted.clear()
        steps = _Steps(lambda: self._ends() or (ends is not None and ends()), streamer, self.model.device)
        tell = progress or (lambda read, of: None)
        given |= {"stopping_criteria": [steps], "streamer": streamer and steps}
        speculation = None if "logits_processor" in given else self.speculation  # it reads its own drafts
        if speculation is not None:
            given |= speculation.arguments
        modules = turning(self.model)
        with turned(modules, {}):
            if self.prompts is None or not (self._keeps and is_one_prompt(self.model, given)):
                tell(0, given["input_ids"].shape[1])
                result = self._called(given)
            else:
                images = hashed or images_of(self.model, given)
                result = self._keeping(self.prompts, given, images, steps, tell, modules)
        if speculation is not None:
            speculation.keep()
        if steps.error is not None:
            raise steps.error
        return result

    def _keeping(
        self,
        prompts: PrefixCache,
        given: dict[str, Any],
        images: Images | None,
        steps: "_Steps",
        tell: Callable[[int, int], None],
        modules: Mapping[str, Any],
    ) -> Any:
        ids = given["input_ids"]
        prompts.read(self.model)
        self.disk_tokens = 0
        if restoring := prompts.restoring(self.model, {"input_ids": ids.cpu()} if images is None else given):
            while not restoring.step(wait=True):
                continue
            prompts.take_back(restoring)
            self.disk_tokens = len(restoring.ids)
        prefill = Prefill(self.model, ids.cpu(), prompts, images=images, modules=modules)
        kept = prefill.cached
        tell(len(kept.ids), ids.shape[1])
        if kept.images is not None:  # they are in the cache
            given = {name: given[name] for name in {*given} - {*_beside_tokens(given)}}
        while prefill.chunks > 1:
            if steps.is_ended():
                steps.end()
                prompts.put(kept)
                return ids
            prefill.compute(self._read)
            tell(len(kept.ids), ids.shape[1])
        with prefill.turning():
            result = self._called(given | cache_argument(self.model, kept.cache))
        tokens = getattr(result, "sequences", result)[0].cpu()
        kept.ids = tokens[: kept.cache.get_seq_length()]
        prompts.put(kept)
        return result

    def _called(self, given: dict[str, Any]) -> Any:
        return call_generate(self.model, counting=self.speculation, **given)

    def _read(self, cache: Any, **inputs: Any) -> Any:
        """A call with a piece of a prompt in front of the last one."""
        pipeline = getattr(self.model, "pipeline", None)
        with nullcontext() if pipeline is None else pipeline.reading():
            return self.model(**inputs, **cache_argument(self.model, cache))


def _beside_tokens(given: dict[str, Any]) -> dict[str, Tensor]:
    names = sorted({*given} - {"input_ids", "attention_mask"})
    return {name: given[name] for name in names if isinstance(given[name], Tensor)}


def images_of(model: Any, given: dict[str, Any]) -> Images | None:
    """The images, or the sound, of a request; None if it is text alone."""
    result = {name: value for name, value in _beside_tokens(given).items() if name not in _OF_TEXT}
    if not result:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for name, value in result.items():
        digest.update(f"{name} {value.dtype} {[*value.shape]}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    ids, tokens = given["input_ids"][0].tolist(), placeholders_of(model)
    where = [position for position, token in enumerate(ids) if token in tokens]
    return Images(digest.hexdigest(), *((where[0], where[-1] + 1) if where else (0, len(ids))))


def is_one_prompt(model: Any, given: dict[str, Any]) -> bool:
    """Whether a request is one sequence, without padding, in a cache that grows."""
    settings = vars(given.get("generation_config") or model.generation_config)
    settings = settings | {name: value for name, value in given.items() if name in settings}
    mask, beside = given.get("attention_mask"), _beside_tokens(given)
    images = any(map(_IMAGES.match, beside))
    return (
        given["input_ids"].shape[0] == 1
        and (mask is None or bool((mask == 1).all()))
        and all(_IMAGES.match(name) or name in _OF_TEXT for name in beside)
        and (images or not any(bool(value.any()) for value in beside.values()))
        and _keeps_one_cache(settings)
    )


def _keeps_one_cache(settings: Mapping[str, Any]) -> bool:
    """Whether `generate` computes one sequence in a cache that grows.

    transformers' drafts from states of the model read those of the whole prompt, which none are kept of.
    """
    return (
        settings.get("cache_implementation") in (None, "dynamic")
        and settings.get("use_cache") is not False
        and (settings.get("num_beams") or 1) == 1
        and (settings.get("num_return_sequences") or 1) == 1
        and not any(settings.get(name) for name in _FROM_STATES)
    )


class _Steps(StoppingCriteria):
    """Between the steps of `generate`: shows their tokens, and ends it.

    A streamer that raises, because the client has gone, stops generation, too: `generate` returns then, with
    a cache that is whole. An error of the GPU leaves `generate`: the cache is not.
    """

    def __init__(self, is_ended: Callable[[], bool], streamer: Any, device: torch.device):
        self.is_ended, self.streamer, self.device = is_ended, streamer, device
        self.error: Exception | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ends = self.is_ended() or self.error is not None or getattr(self.streamer, "ended", False)
        return input_ids.new_full((len(input_ids),), ends).bool()

    def put(self, value: Tensor) -> None:
        raise_fault()
        try:
            if self.error is None:
                self.streamer.put(value.reshape(-1))  # several tokens, where candidates were accepted
        except Exception as error:
            self.error = error

    def end(self) -> None:
        synchronize(self.device)
        if self.error is None and self.streamer is not None:
            self.streamer.end()
