"""`generate` of a model in a pipeline, with cached prefixes: every process calls it alike."""

import functools
import sys
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from ..serving.engine.abilities import keeps_prompts
from ..serving.engine.inputs import beside_tokens, images_of, is_one_prompt, keeps_one_cache
from ..serving.engine.own_generate import Steps
from ..serving.engine.prefill import Prefill, turned, turning
from ..serving.prefix_cache.memory import PrefixCache
from ..transformers.basics.state import Beside
from ..transformers.caches.cache import counts_tokens
from ..transformers.caches.prompt_cache import new_cache, reads_whole
from ..transformers.upstream.calls import cache_argument
from .speculation import Speculation
from .stand_in import call_generate


class Generating(Beside):
    """Stands for a model in calls of `generate`; all else is the model's.

    Args:
        prompts: the prefix cache; None caches nothing, and computes each prompt in one call.
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
        self._ended = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def end(self) -> None:
        """Ends the answer that is generated with its next token, and all later ones with their first."""
        self._ended.set()

    def write(self) -> None:
        """Writes the files of the prompts that are kept."""
        if self.prompts is not None:
            self.prompts.write(self.model)

    @functools.cached_property
    def _keeps(self) -> bool:
        return keeps_prompts(self.model) and counts_tokens(new_cache(self.model))

    def generate(self, streamer: Any = None, **given: Any) -> Any:
        """Generates as the model's own `generate`, whose arguments it takes by name, until `end`."""
        steps = Steps(self._ended.is_set, streamer, self.model.device)
        given |= {"stopping_criteria": [steps], "streamer": streamer and steps}
        speculation = None if "logits_processor" in given else self.speculation  # it reads its own drafts
        if speculation is not None:
            given |= speculation.arguments
        modules = turning(self.model)
        with turned(modules, {}):
            is_one = self._keeps and is_one_prompt(given) and keeps_one_cache(self.model, given)
            if self.prompts is None or not is_one:
                result = self._called(given)
            else:
                result = self._keeping(self.prompts, given, steps, modules)
        if steps.error is not None:
            raise steps.error
        return result

    def _keeping(
        self, prompts: PrefixCache, given: dict[str, Any], steps: "Steps", modules: Mapping[str, Any]
    ) -> Any:
        ids = given["input_ids"]
        images = images_of(self.model, given)
        prefill = Prefill(self.model, ids.cpu(), prompts, images=images, modules=modules)
        cached = prefill.cached
        if cached.images is not None:  # they are in the cache
            given = {name: given[name] for name in {*given} - {*beside_tokens(given)}}
        while prefill.chunks > 1:
            if steps.is_ended():
                steps.end()
                prompts.put(cached)
                return ids
            prefill.compute(self._read)
        with prefill.turning():
            result = self._called(given | cache_argument(self.model, cached.cache))
        tokens = getattr(result, "sequences", result)[0].cpu()
        cached.ids = tokens[: cached.cache.get_seq_length()]
        prompts.put(cached)
        return result

    def _called(self, given: dict[str, Any]) -> Any:
        return call_generate(self.model, counting=self.speculation, **given)

    def _read(self, cache: Any, **inputs: Any) -> Any:
        """A call with a chunk of a prompt in front of the last one, in a pipeline without its logits."""
        pipeline = getattr(self.model, "pipeline", None)
        with nullcontext() if pipeline is None else pipeline.reading():
            return self.model(**inputs, **cache_argument(self.model, cache))
