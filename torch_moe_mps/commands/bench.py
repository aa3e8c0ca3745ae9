"""`bench MODEL`: how fast a model reads prompts and generates, at several contexts.

pp512 is a prompt of 512 tokens after that many tokens of context ("@ d4096"). tg128 is what `generate()`
gives: 128 tokens, the likeliest or "sampled" as the checkpoint says, each read by the host while the GPU
computes the next. ttft64 is the second turn of a chat: the time from 64 new tokens to the first answer.
"""

import argparse
import copy
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, GenerationConfig

from .._faults import gpu_busy, synchronize
from ..macs import this_mac
from ..pipeline.generating import Generating
from ..pipeline.speculation import Speculation
from ..pipeline.stand_in import call_generate
from ..pipeline.torchrun import is_first_process, processes, sum_of_processes
from ..selfcheck import tensor_units
from ..serving.engine.defaults import settings_of_draw
from ..serving.engine.engine import Engine
from ..serving.engine.job import Job
from ..serving.prefix_cache.memory import PrefixCache
from ..serving.speculative.drafting import Drafting
from ..transformers.basics.scoped import Seeded
from ..transformers.capture.calls import tokens_of
from ..transformers.checkpoints.quantize.sizes import bytes_a_token, total_bytes
from ..transformers.checkpoints.source import Source
from ..transformers.upstream.calls import cache_among, cache_argument
from .arguments import NO_DRAFTS
from .caches import KVCache, kv_cache
from .perplexity import text_ids
from .results import write_json
from .sources import check_generates, context_of, folder_of, load, loading_options, skeleton_of, usable_device
from .speculative import drafts_of, speculation_of

_CHUNK = 2048  # tokens of a context that are read at once
_DEPTHS = (0, 4096, 16384)


@dataclass
class Timing:
    """One test.

    Attributes:
        test: "pp512", "tg128 @ d4096", ...
        rate, spread: mean and standard deviation of the repeats: tokens/s; of a second turn milliseconds.
        depth: tokens of context before the test.
        share: the rate of a generation over the bound that the memory's bandwidth sets, if that is known.
        memory: bytes that the device's driver has given to this process afterwards; on a CPU the peak.
        accepted: the share of draft tokens that were accepted, with --speculative.
        by_none, a_step, width: the rate by that of the same answer without drafts, tokens behind the first
            by steps, and the mean number of drafts of a step, where the engine verifies them.
        launches, host: for one generated token, how many of this package's kernels and of torch's operators
            run (an operator launches one kernel or more) module by module, and the seconds until the host has
            issued them, as one call where tokens are captured; the GPU may finish later.
        gpu_busy, gpu_idle: for one generated token, the seconds that the GPU works by its own clock, and the
            rest of the token's time; None off mps.
    """

    test: str
    rate: float
    spread: float
    unit: str
    depth: int
    share: float | None = None
    memory: int = 0
    accepted: float | None = None
    by_none: float | None = None
    a_step: float | None = None
    width: float | None = None
    launches: int | None = None
    host: float | None = None
    gpu_busy: float | None = None
    gpu_idle: float | None = None

    def line(self, model: str, size: str, device: str) -> str:
        """A row of the table."""
        share = "" if self.share is None else f"{100 * self.share:.0f} %"
        host = "" if self.host is None else f"{1e3 * self.host:.2f}"
        launches = "" if self.launches is None else str(self.launches)
        gpu = ""
        if self.gpu_busy is not None and self.gpu_idle is not None:
            gpu = f"{1e3 * self.gpu_busy:.2f} + {1e3 * self.gpu_idle:.2f}"
        measured = f"{self.rate:.2f} ± {self.spread:.2f}{'' if self.unit == 't/s' else f' {self.unit}'}"
        memory = f"{self.memory / 1e9:.2f}"
        cells = [model, size, device, self.test, measured, share, memory, launches, host, gpu]
        return "| " + " | ".join(cells) + " |"


HEAD = """\
| model | size | device | test | t/s | of the bound | memory, GB | launches/token | host, ms/token \
| GPU busy + idle, ms |
| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"""


def run(options: argparse.Namespace) -> None:
    """Raises: ValueError, OSError, RuntimeError with a one-line message.

    KeyboardInterrupt ends it after what was measured is written.
    """
    device = usable_device(options.device)
    source = folder_of(options.model, options.revision)
    check_generates(options, source)
    options.depth = _depths(options, Source(source, loading_options(options)).config)
    model = load(options, source, device)
    bandwidth, chip = options.bandwidth, device
    if sys.platform == "darwin" and device == "mps":
        mac = this_mac()
        bandwidth, chip = bandwidth or mac.bandwidth, mac.chip
    cache = None
    if bandwidth is not None:
        cache = kv_cache(skeleton_of(options, source)[1], options.kv_bits)
    bench = Bench(model, options, None if bandwidth is None else bandwidth * 1e9, cache)
    if options.speculative not in (None, NO_DRAFTS):
        if processes() > 1:
            bench.speculation = speculation_of(options, model, source)
        else:
            bench.speculative = drafts_of(options, model, source, device, bench.prompts)
    # Random tokens repeat nothing, and nobody drafts what follows them.
    if bench.speculation is not None or bench.speculative is not None:
        bench.use_text(text_ids(source, None, options.trust_remote_code)[0])
    size = f"{sum_of_processes(model, total_bytes(model)) / 1e9:.2f} GB"
    if processes() > 1:
        chip = f"{processes()} x {chip}"
    if device == "mps":
        print(f"tensor units: {tensor_units.decided()}\n")
    print(HEAD)
    rows: list[Timing] = []
    try:
        with model.pipeline.greedy() if processes() > 1 else nullcontext():
            for row in bench.rows():
                rows.append(row)
                print(row.line(options.model, size, chip), flush=True)
        bench.captured = tokens_of(model)()
        if bench.captured:
            print(f"\n{bench.captured}")
        for speculative in filter(None, (bench.speculation, bench.speculative)):
            print(f"\n{speculative}")
        for row in rows:
            if row.by_none is not None:
                of_step = f"{row.a_step:.2f} tokens and {row.width:.2f} drafts a step"
                print(f"{row.test}: {row.by_none:.2f} of the speed without drafts, {of_step}")
    finally:  # an interruption keeps what was measured
        if options.json and is_first_process():
            _write(options.json, rows, bench, model=options.model, size=size, device=chip)


def _depths(options: argparse.Namespace, config: Any) -> Sequence[int]:
    """The contexts of --depth; unless given, those of `_DEPTHS` that the model reads.

    Raises: ValueError for more tokens than the model reads.
    """
    after, limit = max(options.prompt, options.max_tokens, options.turn), context_of(config)
    longest = limit - after
    if longest < 0:
        raise ValueError(
            f"--prompt, --max-tokens and --turn must be at most the model's {limit} tokens, got {after}"
        )
    if options.depth is None:
        return [depth for depth in _DEPTHS if depth <= longest]
    if max(options.depth) > longest:
        expected = f"at most {longest}: the model reads {limit} tokens, and {after} follow"
        raise ValueError(f"--depth must be {expected}, got {max(options.depth)}")
    return options.depth


def _write(file: str, rows: list[Timing], bench: "Bench", **what: str) -> None:
    result = {
        **what,
        "tensor_units": tensor_units.decided(),
        "capture": bench.captured,
        "bytes_a_token": bench.weights,
        "bandwidth": bench.bandwidth,
    }
    write_json(file, {**result, "rows": [asdict(row) for row in rows]})


class Bench:
    """The tests of one model.

    Args:
        options: prompt, max_tokens, turn, depth, repeats.
        bandwidth: of the memory, in bytes a second.
        cache: of the model; the bound counts it and the weights.
    """

    def __init__(
        self,
        model: Any,
        options: argparse.Namespace,
        bandwidth: float | None = None,
        cache: KVCache | None = None,
    ):
        self.model, self.options, self.bandwidth, self.cache = model, options, bandwidth, cache
        self.device = torch.device(model.device)
        self.speculation: Speculation | None = None
        self.speculative: Drafting | None = None
        self.prompts = PrefixCache(1 << 62)  # all contexts: each is read once
        self.captured: str | None = None  # how the tokens ran
        self.weights = sum_of_processes(model, bytes_a_token(model))
        self.vocabulary = model.config.get_text_config().vocab_size
        count = max(options.depth) + options.prompt + options.turn
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(self.vocabulary, (1, count), generator=generator).to(self.device)

    def use_text(self, ids: Tensor) -> None:
        """Measure with the tokens [T] of a text, repeated as often as needed."""
        count = self.ids.shape[1]
        self.ids = ids.repeat(count // len(ids) + 1)[None, :count].to(self.device)

    @torch.no_grad()
    def rows(self) -> Iterator[Timing]:
        options = self.options
        for depth in sorted({*options.depth}):
            cache = self._context(depth)
            name = f" @ d{depth}" if depth else ""
            prompt = self.ids[:, depth : depth + options.prompt]
            seconds = self._repeated(cache, partial(self._read, prompt))
            yield self._rate(f"pp{options.prompt}{name}", options.prompt, seconds, depth)
            row = self._generated("", cache, depth, do_sample=False)
            row.launches, row.host = self._launches(cache), self._host(cache)
            yield row
            with Seeded(self.device, 0):  # each run draws the same tokens
                row = self._generated(" sampled", cache, depth, **settings_of_draw(self.model))
            yield row
            if self.speculation is not None:
                yield self._drafting(self.speculation, cache, depth, name)
            if self.speculative is not None:
                yield self._verifying(self.speculative, depth, name)
            if depth:
                turn = self.ids[:, depth : depth + options.turn]
                times = [1e3 * s for s in self._repeated(cache, partial(self._read, turn))]
                yield self._row(f"ttft{options.turn}{name}", times, "ms", depth)

    def _drafting(self, speculation: Speculation, cache: Any, depth: int, name: str) -> Timing:
        """Greedy generation behind a context of text, and a prompt to look things up in."""
        generating, tokens = Generating(self.model, speculation=speculation), self.options.max_tokens
        ids = self.ids[:, : depth + self.options.prompt]
        before = speculation.drafted, speculation.accepted

        def generate(cache: Any) -> None:
            generating.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **cache_argument(
                    self.model, DynamicCache(config=self.model.config) if cache is None else cache
                ),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
            )

        prompt = statistics.mean(self._repeated(cache, partial(self._read, ids[:, depth:])))
        seconds = [time - prompt for time in self._repeated(cache, generate)]
        row = self._rate(f"tg{tokens} drafted{name}", tokens, [max(s, 1e-9) for s in seconds], depth)
        drafted, accepted = speculation.drafted - before[0], speculation.accepted - before[1]
        row.accepted = accepted / drafted if drafted else None
        return row

    def _verifying(self, speculative: Drafting, depth: int, name: str) -> Timing:
        """Greedy answers of the engine, without drafts and with as many as pay, in turn."""
        ids, tokens = self.ids[:, : depth + self.options.prompt].cpu(), self.options.max_tokens
        plain, found = list[_Answered](), list[_Answered]()
        accepted, rejected = speculative.accepted, speculative.rejected
        for _ in range(self.options.repeats + 1):  # the first ones warm up
            plain.append(_Answered(self.model, self.prompts, None, ids, tokens))
            found.append(_Answered(self.model, self.prompts, speculative, ids, tokens))
        row = self._rate(f"tg{tokens} drafted{name}", tokens, [each.seconds for each in found[1:]], depth)
        accepted, rejected = speculative.accepted - accepted, speculative.rejected - rejected
        steps = sum(each.steps for each in found)
        row.accepted = accepted / (accepted + rejected) if accepted + rejected else None
        row.by_none = sum(each.seconds for each in plain[1:]) / sum(each.seconds for each in found[1:])
        row.a_step, row.width = (tokens - 1) * len(found) / steps, (accepted + rejected) / steps
        return row

    def _context(self, depth: int) -> Any:
        """A cache with `depth` tokens; None for none."""
        cache = None
        for ids in self.ids[:, :depth].split(_CHUNK, dim=1) if depth else ():
            cache = cache_among(self._forward(ids, cache))
        return cache

    def _forward(self, ids: Tensor, cache: Any) -> Any:
        given = cache_argument(self.model, cache)
        return self.model(input_ids=ids, **given, use_cache=True, logits_to_keep=1)

    def _read(self, ids: Tensor, cache: Any) -> int:
        """The token after a prompt; `item` waits for the device."""
        return int(self._forward(ids, cache).logits[0, -1].argmax().item())

    def _generated(self, kind: str, cache: Any, depth: int, **how: Any) -> Timing:
        """The model's own `generate` from one token behind the context on; nothing ends it early."""
        tokens, ids = self.options.max_tokens, self.ids[:, : depth + 1]
        how |= {"eos_token_id": [self.vocabulary], "pad_token_id": 0, "max_new_tokens": tokens}

        busy = list[float]()  # seconds of each run

        def generate(cache: Any) -> None:
            arguments = {} if cache is None else cache_argument(self.model, cache)
            before = gpu_busy()
            call_generate(self.model, ids, attention_mask=torch.ones_like(ids), **arguments, **how).tolist()
            self._synchronize()
            busy.append(gpu_busy() - before)

        name = f"tg{tokens}{kind}" + (f" @ d{depth}" if depth else "")
        seconds = self._repeated(cache, generate)
        row = self._rate(name, tokens, seconds, depth)
        if self.device.type == "mps":
            row.gpu_busy = statistics.mean(busy[1:]) / tokens
            row.gpu_idle = statistics.mean(seconds) / tokens - row.gpu_busy
        if self.bandwidth is not None:
            bytes_read = self.weights + (self.cache.at(depth) if self.cache else 0)
            row.share = row.rate * bytes_read / self.bandwidth
        return row

    def _repeated(self, cache: Any, test: Callable[[Any], object]) -> list[float]:
        """Seconds of each repeat, which begins with a copy of the cache. One before them warms up."""
        seconds = []
        for _ in range(self.options.repeats + 1):
            fresh = copy.deepcopy(cache)
            self._synchronize()
            start = time.perf_counter()
            test(fresh)
            self._synchronize()
            seconds.append(time.perf_counter() - start)
        return seconds[1:]

    def _host(self, cache: Any) -> float:
        """Seconds until the operators of a token are issued, without waiting for what they compute."""
        cache, ids, count = self._with_room(cache), self.ids[:, :1], 8
        self._synchronize()
        start = time.perf_counter()
        for _ in range(count):
            cache = cache_among(self._forward(ids, cache))
        seconds = (time.perf_counter() - start) / count
        self._synchronize()
        return seconds

    def _launches(self, cache: Any) -> int:
        cache = self._with_room(cache)
        with _Launches(self.device) as launches:
            self._forward(self.ids[:, :1], cache)
        return launches.count

    def _with_room(self, cache: Any) -> Any:
        """A copy behind two tokens: a copied cache has no room for more, nor one that the model made."""
        cache = copy.deepcopy(cache)
        for _ in range(2):
            cache = cache_among(self._forward(self.ids[:, :1], cache))
        return cache

    def _synchronize(self) -> None:
        synchronize(self.device)

    def _rate(self, test: str, tokens: int, seconds: list[float], depth: int) -> Timing:
        return self._row(test, [tokens / s for s in seconds], "t/s", depth)

    def _row(self, test: str, values: list[float], unit: str, depth: int) -> Timing:
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return Timing(test, statistics.mean(values), spread, unit, depth, memory=self._memory())

    def _memory(self) -> int:
        if self.device.type == "mps":
            return torch.mps.driver_allocated_memory()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class _Answered:
    """A greedy answer of the engine.

    Attributes:
        seconds: for as many tokens as asked for, at the rate of those behind the first.
        steps: that gave its tokens behind the first, which the prompt's last piece gives.
    """

    def __init__(
        self, model: Any, prompts: PrefixCache, speculative: Drafting | None, ids: Tensor, tokens: int
    ):
        times: list[float] = []
        reasons: list[Any] = []

        def take(_: int) -> bool:
            times.append(time.perf_counter())
            return False

        config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        engine = Engine(model, prompts, 1, drafting=speculative)
        engine.submit(Job({"input_ids": ids}, config, take, reasons.append))
        self.steps = 0
        while engine.has_work:
            engine.step()
            self.steps += bool(times)
        if isinstance(reasons[0], Exception):
            raise reasons[0]
        self.seconds = max(times[-1] - times[0], 1e-9) * tokens / max(len(times) - 1, 1)


# Operators that compute nothing, although they are not views.
_FREE = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty"}


class _Launches(TorchDispatchMode):
    """Counts torch's operators that compute, and this package's kernels; off a Mac, its operators."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.count = 0
        self.encodes = device.type == "mps"

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (self.encodes and function.namespace == "moe_mps"):
            self.count += not (function.is_view or function.overloadpacket.__name__ in _FREE)
            return function(*args, **(kwargs or {}))
        before = torch.ops.moe_mps._encoded_dispatches()
        result = function(*args, **(kwargs or {}))
        self.count += torch.ops.moe_mps._encoded_dispatches() - before
        return result
