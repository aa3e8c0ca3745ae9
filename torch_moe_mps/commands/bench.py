"""`bench MODEL`: how fast a model reads prompts and generates, at several contexts.

The engine of chat and serve generates. pp512 is a prompt of 512 tokens after that many cached tokens of
context ("@ d4096"). tg128 are 128 tokens, the likeliest or "sampled" as the checkpoint says, each read by the
host while the GPU computes the next. ttft64 is the second turn of a chat: the time from 64 new tokens to the
first one of the answer.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from .._environment import processes
from .._faults import gpu_busy, synchronize
from ..checkpoints.source import Source
from ..macs import this_mac
from ..models.programs import KVCache, cache_among, cache_argument, captures_of, empty_cache, reads_of
from ..selfcheck import tensor_units
from ..serving.engine.defaults import settings_of_draw
from ..serving.engine.drafting import Drafting
from ..serving.engine.engine import Engine
from ..serving.engine.job import Job
from ..serving.engine.prefill import END
from ..serving.prefix_cache.memory import PrefixCache
from .arguments import NO_DRAFTS
from .perplexity import text_ids
from .processes import sizes_of
from .results import write_json
from .sources import check_generates, context_of, folder_of, load, loading_options, skeleton_of, usable_device
from .speculative import drafts_of

_DEPTHS = (0, 4096, 16384)
SEQUENCES = (1, 2, 4, 8)  # steps whose experts are counted,
CONTEXT = 32  # tokens before it, of each


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
            by steps, and the mean number of drafts of a step.
        launches, host: for one generated token, how many of this package's kernels and of torch's operators
            run (an operator launches one kernel or more) module by module, and the seconds until the host has
            issued them, as one call where tokens are captured; the GPU may finish later. None where layers
            are spread over processes.
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
        cache = KVCache.of_model(skeleton_of(options, source)[1], options.kv_bits)
    bench = Bench(model, options, None if bandwidth is None else bandwidth * 1e9, cache)
    if options.speculative not in (None, NO_DRAFTS):
        bench.speculative = drafts_of(options, model, source, device, bench.prompts)
        # Random tokens repeat nothing, and nobody drafts what follows them.
        bench.use_text(text_ids(source, None, options.trust_remote_code)[0])
    size = f"{sizes_of(model).total / 1e9:.2f} GB"
    if processes() > 1:
        chip = f"{processes()} x {chip}"
    if device == "mps":
        print(f"tensor units: {tensor_units.decided()}\n")
    print(HEAD)
    rows: list[Timing] = []
    try:
        for row in bench.rows():
            rows.append(row)
            print(row.line(options.model, size, chip), flush=True)
        captures = captures_of(model)
        bench.captured = None if captures is None else str(captures)
        _print_notes(bench, rows)
    finally:  # an interruption keeps what was measured
        if options.json:
            _write(options.json, rows, bench, model=options.model, size=size, device=chip)


def _print_notes(bench: "Bench", rows: Sequence[Timing]) -> None:
    """Prints how tokens ran, which experts were selected, and what drafts gained."""
    notes = [bench.captured, bench.experts(), bench.speculative]
    notes += [f"{what} on the disk: {reads}" for what, reads in reads_of(bench.model).items()]
    for note in notes:
        if note:
            print(f"\n{note}")
    for row in rows:
        if row.by_none is not None:
            of_step = f"{row.a_step:.2f} tokens and {row.width:.2f} drafts a step"
            print(f"{row.test}: {row.by_none:.2f} of the speed without drafts, {of_step}")


def _depths(options: argparse.Namespace, config: Any) -> Sequence[int]:
    """The contexts of --depth; by default the `_DEPTHS` within the model's context.

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
    result: dict[str, Any] = {
        **what,
        "tensor_units": tensor_units.decided(),
        "capture": bench.captured,
        "bytes_a_token": bench.weights,
        "bandwidth": bench.bandwidth,
    }
    result |= {f"{name}_on_disk": reads.as_dict() for name, reads in reads_of(bench.model).items()}
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
        self.speculative: Drafting | None = None
        self.prompts = PrefixCache(1 << 62)  # the context, which is read once
        self.captured: str | None = None  # how the tokens ran
        self.weights = sizes_of(model).a_token
        vocabulary = model.config.get_text_config().vocab_size
        count = max(options.depth) + options.prompt + options.turn + END + options.repeats
        self.ids = torch.randint(vocabulary, (1, count), generator=torch.Generator().manual_seed(0))

    def use_text(self, ids: Tensor) -> None:
        """Measure with the tokens [T] of a text, repeated as often as needed."""
        count = self.ids.shape[1]
        self.ids = ids.repeat(count // len(ids) + 1)[None, :count]

    @torch.no_grad()
    def rows(self) -> Iterator[Timing]:
        """Rows of each depth: prefill, decode steps, draft tokens, time to the first token."""
        options = self.options
        for depth in sorted({*options.depth}):
            self._read(depth)
            name = f" @ d{depth}" if depth else ""
            answers = self._behind(depth, options.prompt)
            rates = [each.computed / each.prefill for each in answers]
            yield self._row(f"pp{options.prompt}{name}", rates, "t/s", depth)
            row = self._generated("", depth, do_sample=False)
            if processes() == 1:
                row.launches, row.host = self._launches(depth), self._host(depth)
            yield row
            yield self._generated(" sampled", depth, **settings_of_draw(self.model))
            if self.speculative is not None:
                yield self._verifying(self.speculative, depth, name)
            if depth:
                times = [1e3 * each.prefill for each in self._behind(depth, options.turn)]
                yield self._row(f"ttft{options.turn}{name}", times, "ms", depth)

    @torch.no_grad()
    def experts(self) -> str | None:
        """Line on the experts that a step of several sequences reads; None for a model without ours.

        A step takes as long as the weights that it reads, which are the fewer the more sequences agree. None
        in a pipeline too: its other processes follow the engine, and these steps are calls of the model.
        """
        if processes() > 1:
            return None
        found = []
        for count in SEQUENCES:
            ids = self.ids.repeat(1, count * 2 * CONTEXT // self.ids.shape[1] + 1)[0, : count * (CONTEXT + 1)]
            ids = ids.view(count, CONTEXT + 1).to(self.device)
            cache = cache_among(self._forward(ids[:, :-1], None))
            with _Experts() as read:
                self._forward(ids[:, -1:], cache)
            if not read.counts:
                return None
            found.append(f"{statistics.mean(read.counts):.1f} of {count} sequences")
        return f"experts that a layer reads in a step: {', '.join(found)}"

    def _read(self, depth: int) -> None:
        """Computes a context, with enough tokens more that its states are cached."""
        self.prompts.kept = []
        if depth:
            self._answer(self.ids[:, : depth + END], 1)

    def _answer(
        self, ids: Tensor, tokens: int, speculative: Drafting | None = None, **how: Any
    ) -> "_Answered":
        """Generates after the context, with only its cached prefix."""
        kept = self.prompts.kept[:1]
        answered = _Answered(self.model, self.prompts, speculative, ids, tokens, **how)
        self.prompts.kept = kept or self.prompts.kept[:1]
        return answered

    def _behind(self, depth: int, tokens: int) -> list["_Answered"]:
        """First tokens behind prompts that share the context and nothing behind it."""
        found, context = list[_Answered](), self.ids[:, :depth]
        for number in range(self.options.repeats + 1):  # the first one warms up
            new = self.ids[:, depth + 1 + number :][:, :tokens]
            found.append(self._answer(torch.cat((context, new), 1), 1))
        return found[1:]

    def _verifying(self, speculative: Drafting, depth: int, name: str) -> Timing:
        """Greedy answers of the engine, without drafts and with as many as pay, in turn."""
        ids, tokens = self.ids[:, : depth + self.options.prompt], self.options.max_tokens
        plain, found = list[_Answered](), list[_Answered]()
        accepted, rejected = speculative.accepted, speculative.rejected
        for _ in range(self.options.repeats + 1):  # the first ones warm up
            plain.append(self._answer(ids, tokens))
            found.append(self._answer(ids, tokens, speculative))
        row = self._rate(f"tg{tokens} drafted{name}", tokens, [each.seconds for each in found[1:]], depth)
        accepted, rejected = speculative.accepted - accepted, speculative.rejected - rejected
        steps = sum(each.steps for each in found)
        row.accepted = accepted / (accepted + rejected) if accepted + rejected else None
        row.by_none = sum(each.seconds for each in plain[1:]) / sum(each.seconds for each in found[1:])
        row.a_step, row.width = (tokens - 1) * len(found) / steps, (accepted + rejected) / steps
        return row

    def _generated(self, kind: str, depth: int, **how: Any) -> Timing:
        """Answers from one token behind the context on; nothing ends them early."""
        tokens, ids = self.options.max_tokens, self.ids[:, : depth + 1]
        found = [self._answer(ids, tokens, **how) for _ in range(self.options.repeats + 1)][1:]
        name = f"tg{tokens}{kind}" + (f" @ d{depth}" if depth else "")
        seconds = [each.seconds for each in found]
        row = self._rate(name, tokens, seconds, depth)
        if self.device.type == "mps":
            row.gpu_busy = statistics.mean(each.busy for each in found)
            row.gpu_idle = statistics.mean(seconds) / tokens - row.gpu_busy
        if self.bandwidth is not None:
            bytes_read = self.weights + (self.cache.at(depth) if self.cache else 0)
            row.share = row.rate * bytes_read / self.bandwidth
        return row

    def _forward(self, ids: Tensor, cache: Any) -> Any:
        cache_arguments = cache_argument(self.model, cache)
        return self.model(input_ids=ids, **cache_arguments, use_cache=True, logits_to_keep=1)

    def _host(self, depth: int) -> float:
        """Seconds until the operators of a token are issued, without waiting for what they compute."""
        cache, ids, count = self._with_room(depth), self.ids[:, :1].to(self.device), 8
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(count):
            cache = cache_among(self._forward(ids, cache))
        seconds = (time.perf_counter() - start) / count
        synchronize(self.device)
        return seconds

    def _launches(self, depth: int) -> int:
        cache, ids = self._with_room(depth), self.ids[:, :1].to(self.device)
        with _Launches(self.device) as launches:
            self._forward(ids, cache)
        return launches.count

    def _with_room(self, depth: int) -> Any:
        """A copy of the context behind two tokens: the cache has room for more then."""
        cache = None
        if self.prompts.kept:
            cache = self.prompts.take(self.ids[0, : depth + 1], empty_cache(self.model)).cache
        for _ in range(2):
            cache = cache_among(self._forward(self.ids[:, :1].to(self.device), cache))
        return cache

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
    """An answer of the engine to tokens [1, T].

    Attributes:
        seconds: for as many tokens as asked for, at the rate of those behind the first.
        steps: that gave its tokens behind the first, which the prompt's last chunk gives.
        computed, prefill: tokens of the prompt that were not cached, and the seconds to the first token.
        busy: seconds that the GPU works for a token, by its own clock, where one of the prompt is computed.
    """

    def __init__(
        self,
        model: Any,
        prompts: PrefixCache,
        speculative: Drafting | None,
        ids: Tensor,
        tokens: int,
        **how: Any,
    ):
        times: list[float] = []
        reasons: list[Any] = []
        busy = 0.0

        def take(_: int) -> bool:
            times.append(time.perf_counter())
            return False

        def on_start(cached: int, whole: int) -> None:
            nonlocal busy
            if not times:
                self.computed = whole - cached
                synchronize(model.device)
                busy = gpu_busy()
                times.append(time.perf_counter())

        how = {"do_sample": False} | how
        config = GenerationConfig(max_new_tokens=tokens, eos_token_id=[], pad_token_id=0, **how)
        engine = Engine(model, prompts, 1, drafting=speculative)
        engine.submit(Job({"input_ids": ids}, config, take, reasons.append, on_start, seed=0))
        self.steps = 0
        while engine.has_work:
            engine.step()
            self.steps += len(times) > 1
        if isinstance(reasons[0], Exception):
            raise reasons[0]
        self.prefill = times[1] - times[0]
        first = min(1, tokens - 1)  # behind a single token nothing can be measured
        count = len(times) - 1 - first
        self.seconds = max(times[-1] - times[first], 1e-9) * tokens / count
        synchronize(model.device)
        self.busy = (gpu_busy() - busy) / tokens


# Operators that compute nothing, although they are not views.
_FREE = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty"}


class _Experts(TorchDispatchMode):
    """Notes how many experts each layer reads.

    Attributes:
        counts: of each layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "moe_mps" and "moe_experts" in function._schema.name:
            names = [argument.name for argument in function._schema.arguments]
            ids = {**dict(zip(names, args, strict=False)), **(kwargs or {})}["topk_ids"]
            self.counts.append(len({*ids.flatten().tolist()}))
        return function(*args, **(kwargs or {}))


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
