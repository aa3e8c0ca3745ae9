"""A prompt in chunks on several stages: on a clock of its own, which only the layers move.

Stages are threads here. A message carries the time at which it was sent; who receives it goes on no earlier.
"""

import functools
import queue

import pytest
import torch
from support import tiny_models
from support.models import prompt
from support.threads import in_threads
from transformers import DynamicCache

from torch_moe_mps.models.upstream.calls import cache_argument
from torch_moe_mps.pipeline.loop import find_loop
from torch_moe_mps.pipeline.peers import Timeouts
from torch_moe_mps.pipeline.running import Running
from torch_moe_mps.pipeline.stages import Stage

LAYERS = 4


class ClockedPeers:
    """In the place of Peers: messages are put into queues, with the time."""

    def __init__(self, rank, links):
        self.rank, self.size, self.links = rank, max(b for _, b in links) + 1, links
        self.timeouts, self.now, self.kinds = Timeouts(), 0.0, []

    def send(self, to, kind, call, tensors, limit=None):
        self.kinds.append(kind)
        self.links[self.rank, to].put((self.now, kind, call, tensors))

    def flush(self, to, limit=None):
        pass  # a queue has what was sent

    def receive(self, source, kind, call, limit):
        sent, *about, tensors = self.links[source, self.rank].get(timeout=60)
        assert about == [kind, call]
        self.now = max(self.now, sent)
        return tensors

    def failed(self, error):
        raise error


def stages(count):
    """The model in one piece, and its stages; a layer takes a unit of time for each token."""
    whole = tiny_models.tiny_model("llama", num_hidden_layers=LAYERS)
    loop = find_loop(whole)
    links = {(a, b): queue.Queue() for a in range(count) for b in range(count) if a != b}
    found = []
    for rank in range(count):
        model = tiny_models.tiny_model("llama", num_hidden_layers=LAYERS)
        stage, peers = Stage(rank, [LAYERS // count] * count, loop), ClockedPeers(rank, links)
        stage.cut(model)

        def work(module, args, output, peers=peers):
            peers.now += args[0].shape[1]

        for index in stage.own:
            model.model.layers[index].register_forward_hook(work)
        found.append(Running(model, stage, peers))
    return whole, found


def run(count, ids, chunk):
    """The time at which the last stage, of rank 0, has the first token, and the kinds of what each has sent.

    Calls are those of an engine: logits stay in rank 0.
    """
    whole, found = stages(count)
    results = [None] * count

    @torch.no_grad()
    def call(running):
        cache = DynamicCache(config=running.model.config)
        with running.without_logits():
            for part in ids.split(chunk, 1):
                out = running.model(input_ids=part, **cache_argument(running.model, cache), use_cache=True)
        results[running.peers.rank] = out.logits

    in_threads(*(functools.partial(call, running) for running in found))
    with torch.no_grad():
        expected = whole(input_ids=ids, use_cache=False).logits[:, -1]
    assert torch.allclose(results[0][:, -1], expected, atol=1e-5)
    return found[0].peers.now, [running.peers.kinds for running in found]


@pytest.mark.parametrize("count", [2, 4])
def test_stages_work_at_the_same_time(count):
    """n chunks of t tokens on N stages of L layers each: (n + N - 1) t L, instead of n N t L."""
    tokens, chunk = 64, 8
    ids = prompt(batch=1, length=tokens)
    time, kinds = run(count, ids, chunk)
    assert time == (tokens // chunk + count - 1) * chunk * (LAYERS // count)
    alone, _ = run(count, ids, tokens)
    assert alone == tokens * LAYERS
    assert kinds[-1] == ["hidden states"] * (tokens // chunk) and kinds[0] == []


def test_a_prompt_that_is_no_multiple_of_the_chunk():
    time, _ = run(2, prompt(batch=2, length=21), 8)
    assert time == 8 * 2 + (8 + 8 + 5) * 2  # the second stage waits for the first chunk only
