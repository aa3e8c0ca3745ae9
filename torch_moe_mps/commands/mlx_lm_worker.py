"""What `bench --beside mlx-lm` runs in a process of its own: the same tokens and tests in mlx-lm.

Reads JSON from stdin: model, ids, depths, prompt, generate, repeats, sampling. Writes a line of JSON for each
depth. Tokens are those of mlx-lm's own loop, which reads each while the next is computed, as our side does.
"""

import copy
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

AT_ONCE = 2048


def main() -> None:
    import mlx.core as mx  # type: ignore[import-not-found,unused-ignore]
    from mlx_lm import load  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from mlx_lm.generate import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        generate_step,
    )
    from mlx_lm.models.cache import make_prompt_cache  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from mlx_lm.sample_utils import make_sampler  # type: ignore[import-not-found,import-untyped,unused-ignore]

    asked = json.load(sys.stdin)
    model = load(asked["model"])[0]
    ids = mx.array([asked["ids"]])
    asked["sampling"]["temp"] = asked["sampling"].pop("temperature")
    sampler = make_sampler(**asked["sampling"])

    def read(cache: Any, start: int, end: int) -> Any:
        """The token after some tokens."""
        logits = model(ids[:, start:end], cache=cache)
        return mx.argmax(logits[:, -1], axis=-1)

    def generate(sampler: Any, cache: Any) -> None:
        for _ in generate_step(
            ids[0, :1], model, max_tokens=asked["generate"], sampler=sampler, prompt_cache=cache
        ):
            pass

    def rates(cache: Any, tokens: int, test: Callable[[Any], Any]) -> list[float]:
        """Tokens/s of each repeat, which begins with a copy of the cache. One before them warms up."""
        seconds = []
        for _ in range(asked["repeats"] + 1):
            fresh = copy.deepcopy(cache)
            mx.eval([layer.state for layer in fresh if not layer.empty()])
            start = time.perf_counter()
            test(fresh)
            seconds.append(time.perf_counter() - start)
        return [tokens / s for s in seconds[1:]]

    def prompt_read(start: int, end: int, cache: Any) -> None:
        read(cache, start, end).item()

    for depth in asked["depths"]:
        cache = make_prompt_cache(model)
        for start in range(0, depth, AT_ONCE):
            read(cache, start, min(depth, start + AT_ONCE)).item()
        end = depth + asked["prompt"]
        prompt = rates(cache, asked["prompt"], partial(prompt_read, depth, end))
        generated = [rates(cache, asked["generate"], partial(generate, each)) for each in (None, sampler)]
        print(json.dumps({"depth": depth, "pp": prompt, "tg": generated}), flush=True)


if __name__ == "__main__":
    main()
