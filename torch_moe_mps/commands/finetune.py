"""`finetune MODEL DATA.jsonl`: train a LoRA adapter on a model with frozen weights.

The folder it writes has the adapter in PEFT's layout, the record of the training, and `checkpoints`.
"""

import argparse
import functools
import json
import resource
import shlex
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .._interrupts import at_ctrl_c
from .._text import split_gguf
from ..macs import machine_memory, this_mac
from ..training.examples import Example, read_examples
from ..training.record import ADAPTER, RECORD, begun
from ..transformers.basics.report import in_unit
from .fit import size_when_loaded
from .results import locked, written_whole
from .sources import check_generates, context_of, folder_of, load, skeleton_of, tokenizer_of, usable_device

if TYPE_CHECKING:
    from ..training import memory, steps
    from ..training.preferences import Task

_CHECKPOINTS = "checkpoints"
_MOST_HELD_OUT = 100  # examples, unless --held-out says how many


def run(options: argparse.Namespace) -> None:
    """Raises: ValueError, OSError, RuntimeError with a one-line message."""
    if options.dry_run:
        return _run(options)
    with locked(Path(options.output), options.output):
        _run(options)


def _run(options: argparse.Namespace) -> None:
    from ..training import memory, steps

    output, about = Path(options.output), begun(options)
    if "finished" in about and (output / ADAPTER).is_file():
        print(f"{output} has an adapter whose training is finished: nothing is left to do")
        return
    device = usable_device(options.device)
    folder = folder_of(options.model, options.revision, weights=False)
    check_generates(options, folder)
    tokenizer = tokenizer_of(folder_of(options.model, options.revision) if _is_gguf(options) else folder)
    source, model = skeleton_of(options, folder)
    context = context_of(model.config)
    task = _task(options, tokenizer, context)
    examples, held_out = list[Any](), list[Any]()
    if task is None:
        examples, held_out = _examples(options, tokenizer, min(options.max_length, context))
    ranks = memory.Ranks(options.rank, options.expert_rank, options.targets)
    targets = memory.short_names(model, memory.targets_in(model, options.targets))
    tokens = task.tokens if task else [len(example.ids) for example in (*examples, *held_out)]
    rows, length = _rows(options, len(tokens)), max(tokens)
    weights, size = size_when_loaded(options, source, model, folder)
    peak = memory.peak_of(model, weights, ranks, rows, length, size)
    print(_predicted(peak, memory.parameters_of(model, ranks), rows, length), flush=True)
    _check_fits(peak, device)
    if options.dry_run:
        return
    folder = folder_of(options.model, options.revision)
    torch.manual_seed(options.seed)  # for the first weights of the adapter
    model = load(options, folder, device, trains=True)
    pad = next((each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id) if each is not None), 0)
    adapter = targets, ranks, options.model
    training = _training(options, model, adapter, task or examples, pad)
    adapted = training.trainer.model
    if held_out:
        if "before" not in about:
            about["before"] = steps.held_out_loss(adapted, held_out, options.batch, pad)
        print(f"held-out loss before: {about['before']:.4f}", flush=True)
    _write(output, about)
    with at_ctrl_c(training.end):
        is_done = training.run(options.resume)
    if not is_done:
        print(f"{output} has a checkpoint: the same command with --resume goes on behind it", file=sys.stderr)
        raise KeyboardInterrupt
    about["curve"] = training.curve()
    if held_out:
        about["after"] = steps.held_out_loss(adapted, held_out, options.batch, pad)
        print(f"held-out loss after: {about['after']:.4f}")
    print(f"{_memory_taken(device) / 1e9:.2f} GB of memory were taken, at most: {_counted(device)}")
    about["finished"] = time.strftime("%Y-%m-%d")
    steps.save_adapter(adapted, output)
    _write(output, about)
    print(f"wrote {output}. To ask it:\n{_use_of(options)}")


def _rows(options: argparse.Namespace, examples: int) -> int:
    """Rows of a step: of GRPO all answers to a prompt, of DPO better answers and worse ones."""
    if options.method == "grpo":
        return int(options.batch)
    return min(options.batch, examples) * (2 if options.method == "dpo" else 1)


def _training(
    options: argparse.Namespace,
    model: Any,
    adapter: "tuple[list[str], memory.Ranks, str]",
    data: "Task | list[Any]",
    pad: int,
) -> "steps.Training":
    """The training of a new adapter, by a task of DPO or GRPO, or on examples."""
    from ..training import steps

    checkpoints, show = Path(options.output) / _CHECKPOINTS, functools.partial(print, flush=True)
    plan = steps.Plan(
        options.batch, options.epochs, options.steps, options.learning_rate, options.seed, options.save_every
    )
    if isinstance(data, list):
        adapted = steps.with_new_adapter(model, *adapter)
        return steps.Training(adapted, data, pad, plan, checkpoints, show)
    from ..training.preferences import Preferring

    return Preferring(model, adapter, data, plan, checkpoints, show)


def _task(options: argparse.Namespace, tokenizer: Any, context: int) -> "Task | None":
    """The task of DPO or GRPO; None for SFT."""
    if options.method == "sft":
        return None
    from ..training.preferences import dpo_task, grpo_task

    if options.method == "dpo":
        task = dpo_task(options.data, tokenizer, min(options.max_length, context))
    else:
        sizes = options.generations, options.answer_length, context
        task = grpo_task(options.data, tokenizer, options.reward, *sizes)
    print(f"{len(task.tokens)} lines to train on, by {options.method}")
    return task


def _is_gguf(options: argparse.Namespace) -> bool:
    return split_gguf(options.model)[1] is not None


def _examples(
    options: argparse.Namespace, tokenizer: Any, longest: int
) -> tuple[list[Example], list[Example]]:
    """(training examples, held-out examples)."""
    examples = read_examples(options.data, tokenizer, longest)
    count = options.held_out
    if count is None:
        count = min(_MOST_HELD_OUT, -(-len(examples) // 10)) if len(examples) > 1 else 0
    if count >= len(examples):
        raise ValueError(f"--held-out must leave a line to train on, got {count} of {len(examples)}")
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(options.seed)).tolist()
    held_out = {*order[:count]}
    trained = [example for place, example in enumerate(examples) if place not in held_out]
    kinds = Counter(example.kind for example in examples)
    on = {
        "answers": "on the answers of {} conversations",
        "conversation": "on all tokens of {} conversations, whose template does not show where answers are",
        "completion": "on {} completions",
        "text": "on all tokens of {} texts",
    }
    losses = ", ".join(words.format(kinds[kind]) for kind, words in on.items() if kinds[kind])
    tokens = sum(len(example.ids) for example in examples)
    print(f"{len(trained)} lines to train on, {count} held out, {tokens:,} tokens; the loss is {losses}")
    if cut := sum(example.is_cut for example in examples):
        print(f"{cut} of them are cut to {longest} tokens (--max-length)")
    return trained, [examples[place] for place in order[:count]]


def _predicted(peak: Any, parameters: int, rows: int, length: int) -> str:
    parts = {
        "weights": peak.weights,
        "adapter with Adam": peak.adapter,
        "checkpoints": peak.checkpoints,
        "a layer": peak.layer,
        "its attention": peak.attention,
        "the loss": peak.loss,
    }
    show = in_unit(peak.total)
    inner = ", ".join(f"{name} {show(size)}" for name, size in parts.items())
    return (
        f"{parameters:,} parameters are trained\n"
        f"predicted peak of the tensors of {rows} x {length} tokens: {show(peak.total)} ({inner})"
    )


def _check_fits(peak: Any, device: str) -> None:
    """Raises: ValueError where the memory is too small."""
    limit = this_mac().limit if device == "mps" and sys.platform == "darwin" else machine_memory()
    if peak.total > limit:
        show = in_unit(limit)
        raise ValueError(
            f"the training must fit in {show(limit)}, got {show(peak.total)}: smaller --bits, --max-length, "
            "--batch, --rank or --expert-rank take less"
        )


def _counted(device: str) -> str:
    """Names of what `_memory_taken` counts beside the tensors whose peak was predicted."""
    if device == "mps":
        return "with what torch keeps of the GPU's memory for later"
    return "by the process, with Python, libraries and quantised weights decoded for the CPU"


def _memory_taken(device: str) -> int:
    """Bytes of GPU memory that torch holds now; on a CPU, bytes of the process."""
    if device == "mps":
        return torch.mps.driver_allocated_memory()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _write(output: Path, about: dict[str, Any]) -> None:
    with written_whole(str(output / RECORD)):
        (output / RECORD).write_text(json.dumps(about, indent=1) + "\n")


def _use_of(options: argparse.Namespace) -> str:
    """Command that prompts the model with the adapter."""
    own = ("--bits", "--group-size")
    given = [(name, getattr(options, name[2:].replace("-", "_"))) for name in own]
    asked = [part for name, value in given if value is not None for part in (name, str(value))]
    question = ("--adapter", options.output, "-p", "Who are you?")
    return shlex.join(("torch-moe-mps", "generate", options.model, *asked, *question))
