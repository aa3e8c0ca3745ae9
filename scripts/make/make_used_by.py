"""Writes tests/pinned/used_by.txt: for each operator, the architectures whose recorded steps call it.

A tiny model of each architecture runs a prompt and five tokens in the simulator, dense and in 4 bits: what it
calls is what its modules call, and what its captured decode step consists of.
"""

import os
import sys
from collections import defaultdict
from typing import Any
from unittest import mock

import paths

if __name__ == "__main__":
    paths.words(__doc__)

import simulator
import torch
import transformers
from support.simulated import install

if __name__ == "__main__":
    os.environ["MOE_MPS_CHECK"] = "0"  # kernels whose dispatches are dropped compute nothing
    install()  # in front of whatever asks torch for MPS

from support import tiny_models
from support.launches import NotCaptured, captured_call, model_on_mps
from support.models import CountOperators

import torch_moe_mps
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.ops import OPERATORS

USED_BY = paths.REPOSITORY / "tests" / "pinned" / "used_by.txt"


def operators_of(architecture: str, **options: object) -> set[str]:
    model = model_on_mps(architecture)
    with mock.patch.dict(os.environ, {"MOE_MPS_CAPTURE": "1"}):
        torch_moe_mps.accelerate(model, check=False, **options)
    called = CountOperators()
    ids = torch.randint(1, 90, (1, 9), generator=torch.Generator().manual_seed(0)).to("mps")
    with simulator.dropped(), torch.no_grad():
        with called:
            model(ids)
        try:
            captured_call(model)
        except (NotCaptured, RuntimeError, TypeError) as error:
            print(f"{architecture}: {type(error).__name__}: {error}", file=sys.stderr)
    captures = captures_of(model)
    programs = [] if captures is None else captures.programs
    recorded = {name for program in programs for name in map(name_of, program.operators)}
    return {*OPERATORS} & ({*called.counts} | recorded)


def name_of(operator: Any) -> str:
    return str(operator).removeprefix("moe_mps.").removesuffix(".default")


def text() -> str:
    transformers.logging.set_verbosity_error()
    used = defaultdict(set)
    for architecture in (*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES):
        for options in ({}, {"bits": 4, "group_size": 32}):
            for name in operators_of(architecture, **options):
                used[name].add(architecture)
        print(architecture, file=sys.stderr)
    return "".join(f"{name}: {', '.join(sorted(used[name]))}\n" for name in sorted(OPERATORS))


if __name__ == "__main__":
    USED_BY.write_text(text())
