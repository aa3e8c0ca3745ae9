"""What a decode step costs the host, counted: a time would measure what else the machine does.

The host's time of a step is that of the operators it dispatches, some microseconds each, and of the calls in
Python, each a fraction of one. `scripts/bench/bench_host.py` times both: with the numbers below an
accelerated step takes at most 0.38 of the time of the model's own code; the goal is 0.35.
"""

import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from support.launches import AttentionIsOne, Launches, model_on_mps, prompted
from support.models import eager
from support.ours import FOLDER, is_file_of_ours
from transformers import StoppingCriteria

import torch_moe_mps
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.upstream.calls import cache_argument


class Dispatches(Launches):
    """All operators that are dispatched; views cost the host as much as others."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not self.paused:
            self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def dispatches(run: Callable[[], object]) -> Counter[str]:
    with Dispatches() as mode, AttentionIsOne(mode):
        run()
    return mode.counts


def calls_of_the_package(run: Callable[[], object]) -> Counter[str]:
    """Of its functions ("call"), and of the built-in functions that these call ("c_call")."""
    counts: Counter[str] = Counter()

    def count(frame, event, argument):
        if event in ("call", "c_call") and is_file_of_ours(frame.f_code.co_filename):
            counts[event] += 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counts


class FilesOfToken(StoppingCriteria):
    """The package's files that one token of `generate` crosses, between two questions whether it ends."""

    def __init__(self, number: int) -> None:
        self.number, self.asked, self.files = number, 0, set()

    def __call__(self, ids, scores, **kwargs):
        self.asked += 1
        sys.setprofile(self._look if self.asked == self.number else None)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def _look(self, frame, event, argument):
        file = frame.f_code.co_filename
        if event == "call" and is_file_of_ours(file):
            self.files.add(file.removeprefix(FOLDER))


def per_layer(model, count: Callable) -> Counter[str]:
    """What one more layer adds to the counts of a step, of which the first has checked all arguments."""
    token = torch.zeros(1, 1, dtype=torch.int64, device="mps")
    found = []
    decoder = model.get_decoder()
    for layers in (decoder.layers, decoder.layers, decoder.layers[:-1]):
        decoder.layers = layers
        cache = prompted(model, [0])
        found.append(count(lambda: model(token, **cache_argument(model, cache), use_cache=True)))  # noqa: B023
    return found[1] - found[2]


def test_of_a_layer(simulated):
    """Qwen3-MoE, one token, everything in 4 bit. More calls in Python need a reason."""
    own, model = (eager(model_on_mps("qwen3_moe")) for _ in range(2))
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    with torch.no_grad(), simulated.dropped():
        before, after = per_layer(own, dispatches), per_layer(model, dispatches)
        python = per_layer(model, calls_of_the_package)
    assert sum(before.values()) == 142 and sum(after.values()) <= 36, after
    # Module by module, each memory is asked who else shows it, each class whether it was patched, and each
    # tensor whether it is on the CPU; a norm gathers its arguments by a row of the recogniser, and attention
    # has a record of what a token sees; norms, routers and rotations ask for the device, as a CPU runs the
    # model's own; norms and MLPs ask for the rank, which eager code may decide by, and a module's view of its
    # config answers by properties. Each rewritten forward asks whether a hook sees the modules that its code
    # would call, and whether somebody else's class is on top of one. A captured token makes none of these
    # calls.
    assert python["call"] <= 160 and python["c_call"] <= 241, python


# What a captured token of `generate` runs in Python: a batch with padding, whose tokens are sampled.
FILES = {
    "models/attention/causal_mask.py",  # the padding of the next mask
    "models/basics/tensors.py",  # known of the mask before
    "models/capture/classes.py",
    "models/capture/fingerprint.py",
    "models/capture/generate.py",
    "models/capture/match.py",
    "models/capture/replay.py",
    "models/capture/surroundings.py",
    "models/modules/lazy_scores.py",
    "models/modules/sampling.py",
}


@pytest.mark.usefixtures("captured")
def test_files_that_a_generated_token_crosses(simulated):
    """More than these need a reason: whoever looks for where a token goes reads all of them."""
    model = eager(model_on_mps("qwen3_moe"))
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    ids = torch.tensor([[0, 0, 3], [3, 4, 5]], device="mps")
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]], device="mps")
    options = {"do_sample": True, "top_k": 20, "max_new_tokens": 9, "pad_token_id": 0}
    crossed = FilesOfToken(7)
    with simulated.dropped():
        model.generate(ids, attention_mask=mask, stopping_criteria=[crossed], **options)
    assert captures_of(model).reason is None and crossed.files == FILES
