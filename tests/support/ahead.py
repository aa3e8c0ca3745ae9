"""Steps that the engine has encoded on mps when the host reads a token."""

import copy

import simulator
import torch
from transformers import GenerationConfig

import torch_moe_mps
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.engine.job import Job

from . import tiny_models
from .models import eager

_NEW, _STEADY = 24, slice(4, 12)  # tokens of each answer, and those at which all answers go on


def _encoded(model, conversations: int, reads_late: bool) -> list[int]:
    """Dispatches that are encoded when the host reads each token of the last answer, since its first one."""
    encoded = list[int]()

    def note(token: int) -> bool:
        encoded.append(torch.ops.moe_mps._encoded_dispatches())
        return False

    batch = Engine(model, None, conversations)
    batch.decoding.reads_late = reads_late
    config = GenerationConfig(max_new_tokens=_NEW, pad_token_id=0, eos_token_id=None)
    inputs = {"input_ids": torch.arange(2, 6)[None]}
    for number in range(conversations):
        taken = note if number == conversations - 1 else lambda token: False
        batch.submit(Job(dict(inputs), config, taken, lambda reason: None))
    with simulator.dropped():  # the order does not depend on what is computed
        while batch.has_work:
            batch.step()
    return [count - encoded[0] for count in encoded]


def steps_ahead(conversations: int) -> list[float]:
    """Steps that are encoded behind a token when the host reads it: one number for each of some tokens, at
    which as many conversations go on."""
    model = copy.deepcopy(eager(tiny_models.tiny_model("qwen3_moe"))).to("mps")
    torch_moe_mps.accelerate(model)
    _encoded(model, conversations, True)  # captures
    at_once, late = (_encoded(model, conversations, reads_late)[_STEADY] for reads_late in (False, True))
    of_step = at_once[1] - at_once[0]
    return [(b - a) / of_step for a, b in zip(at_once, late, strict=True)]
