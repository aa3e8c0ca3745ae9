"""Models spread over processes of this machine: starts them, and defines what each does.

`launch("equal", ...)` runs the function `equal` below in every process and gives what it returned there.
"""

import contextlib
import functools
import io
import json
import os
import shutil
import signal
import socket
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from support import mlx_models, recipes, tiny_models  # noqa: F401  (recipes: of tiny models)
from support.models import generate, prompt
from support.processes import Recorded
from torch_moe_mps.models.upstream.calls import cache_argument

_RESULT = "RESULT "
_RUN = "import sys; from support import pipeline; pipeline.run(*sys.argv[1:])"


def run(function: str, arguments: str) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(_RESULT + json.dumps(globals()[function](*json.loads(arguments))), flush=True)


def start(function: str, *arguments: Any, processes: int = 2) -> list[Recorded]:
    """The processes, with the variables that torchrun sets."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"WORLD_SIZE": processes, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1", "MOE_MPS_CHECK": 0}
    return [
        Recorded(_RUN, function, json.dumps(arguments), RANK=rank, LOCAL_RANK=rank, **shared)
        for rank in range(processes)
    ]


def ends_of(started: list[Recorded], timeout: float = 300) -> list[tuple[int, str, str]]:
    """(return code, output, errors) of each process; none is left running."""
    deadline = time.monotonic() + timeout
    return [process.end(max(deadline - time.monotonic(), 0)) for process in started]


def launch(function: str, *arguments: Any, processes: int = 2) -> list[Any]:
    """What the function returned in each process."""
    results = []
    for code, output, errors in ends_of(start(function, *arguments, processes=processes)):
        assert code == 0, errors[-3000:]
        (line,) = [line for line in output.splitlines() if line.startswith(_RESULT)]
        results.append(json.loads(line.removeprefix(_RESULT)))
    return results


def rank() -> int:
    return int(os.environ["RANK"])


def staged(folder: str | Path, cls: Any = None, **options: Any) -> Any:
    from transformers.distributed import DistributedConfig

    from torch_moe_mps import pipeline

    parallel = DistributedConfig(pp_size=int(os.environ["WORLD_SIZE"]))
    options = {"decoding_timeout": 30.0} | options
    return pipeline.from_pretrained(str(folder), cls, distributed_config=parallel, **options)


# Cases: what a model generates


def two_turns(model: Any, ids: torch.Tensor) -> torch.Tensor:
    cache = transformers.DynamicCache(config=model.config)
    first = generate(model, ids, **cache_argument(model, cache), max_new_tokens=4)
    return generate(model, torch.cat([first, ids], 1), **cache_argument(model, cache), max_new_tokens=4)


def left_padded(model: Any, ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return generate(model, ids, attention_mask=mask, max_new_tokens=6)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


class Collected:
    """A streamer."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.flatten())

    def end(self) -> None:
        self.values.append(torch.tensor([-1]))


def assistant() -> torch.nn.Module:
    """The same smaller model in every process."""
    with tiny_models.sizes(num_hidden_layers=1):
        return tiny_models.tiny_model("qwen3_moe").eval()


def streamed(model: Any, ids: torch.Tensor) -> torch.Tensor:
    streamer = Collected()
    generate(model, ids[:1], max_new_tokens=5, streamer=streamer)
    return torch.cat(streamer.values)


FEW = {
    "plain": lambda m, ids: generate(m, ids, max_new_tokens=6),
    "left padded": left_padded,
    "second turn": two_turns,
}
MANY = FEW | {
    "static cache": lambda m, ids: generate(m, ids, cache_implementation="static", max_new_tokens=6),
    "sampling": lambda m, ids: generate(m, ids, do_sample=True, top_k=20, temperature=1.5, max_new_tokens=8),
    "repetition penalty": lambda m, ids: generate(m, ids, repetition_penalty=1.3, max_new_tokens=6),
    "length penalty": lambda m, ids: generate(
        m, ids, exponential_decay_length_penalty=(2, 1.5), eos_token_id=7, max_new_tokens=8
    ),
    "scores": lambda m, ids: generate(
        m, ids, max_new_tokens=3, output_scores=True, return_dict_in_generate=True
    ).scores[1],
    "end of one sequence": lambda m, ids: generate(
        m, ids, eos_token_id=int(generate(m, ids, max_new_tokens=3)[0, -1]), max_new_tokens=6
    ),
    "chunked prefill": lambda m, ids: generate(m, ids, prefill_chunk_size=4, max_new_tokens=4),
    "beams": lambda m, ids: generate(m, ids, num_beams=3, max_new_tokens=5),
    "prompt lookup": lambda m, ids: generate(m, ids[:1], prompt_lookup_num_tokens=3, max_new_tokens=8),
    "assistant": lambda m, ids: generate(m, ids[:1], assistant_model=assistant(), max_new_tokens=8),
    "streamer": streamed,
    "without cache": lambda m, ids: generate(m, ids, use_cache=False, max_new_tokens=3),
    "logits": logits,
    "loss": lambda m, ids: m(input_ids=ids, labels=ids).loss.detach(),
}


# Each captures programs anew; the first turn is what "plain" has.
CAPTURED = {name: FEW[name] for name in ("left padded", "second turn")}


def cases_of(architecture: str, form: str) -> dict[str, Any]:
    if form.endswith("captured"):
        return CAPTURED
    return MANY if (architecture, form) == ("qwen3_moe", "quantised") else FEW


def result_of(case: Any, model: Any) -> torch.Tensor | str:
    torch.manual_seed(3)
    try:
        return case(model, prompt())
    except (ValueError, RuntimeError, TypeError, AttributeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"


def in_one_process(load: Any, cases: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """{case: its result or error} of the whole model, and {parameter: its bytes}: from the first process."""
    shared: list[Any] = [None]
    if rank() == 0:
        whole = load()
        results = {name: result_of(case, whole) for name, case in cases.items()}
        shared = [(results, {name: p.nbytes for name, p in whole.state_dict().items()})]
    dist.broadcast_object_list(shared)
    return shared[0]


def compared(expected: dict[str, Any], load: Any, cases: dict[str, Any]) -> dict[str, str]:
    """{case: "equal", or what differs}. `load` gives the stage; a failure ends it."""
    found, model = {}, load()
    for name, case in cases.items():
        if isinstance(expected[name], str):
            found[name] = "does not run in one process"
            continue
        result = result_of(case, model)
        if isinstance(result, str):
            found[name], model = result, load()
        else:
            found[name] = "equal" if torch.equal(result, expected[name]) else "other values"
    return found


# Functions of `launch`


def saved(architecture: str, folder: str, form: str) -> tuple[Any, dict[str, Any]]:
    """A tiny model as the first process writes it, and the options that load it."""
    import torch_moe_mps

    cls = tiny_models.model_class(architecture)
    if rank() == 0:
        with tiny_models.groups_of_32():
            model = tiny_models.tiny_model(architecture)
        if form.startswith("quantised") and form != "quantised while it is read":
            torch_moe_mps.accelerate(model, bits=4, group_size=32)
        Path(folder).mkdir(parents=True, exist_ok=True)
        if form == "mlx":
            mlx_models.write(model, Path(folder), 4)
        else:
            model.save_pretrained(folder)
    dist.barrier()
    options = {"bits": 4, "group_size": 32} if form == "quantised while it is read" else {}
    if form == "mlx":
        folder = f"{folder}/mlx"
    return folder, {"cls": cls, **options, "dtype": torch.float32}


def equal(root: str, wanted: list[list[str]]) -> dict[str, Any]:
    """{architecture, form: {case: outcome}} and what this process holds."""
    import torch_moe_mps
    from torch_moe_mps.models.capture.classes import captures_of

    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for architecture, form in wanted:
        folder, options = saved(architecture, f"{root}/{architecture}-{form}", form)
        cls = options.pop("cls")
        cases, stages = cases_of(architecture, form), []

        def load_whole(folder=folder, cls=cls, options=options) -> Any:
            return torch_moe_mps.from_pretrained(folder, cls, **options)

        def load(folder=folder, cls=cls, options=options, stages=stages, form=form) -> Any:
            os.environ["MOE_MPS_CAPTURE"] = "1" if form.endswith("captured") else "0"
            stages.append(staged(folder, cls, **options))
            os.environ["MOE_MPS_CAPTURE"] = "0"
            return stages[-1]

        expected, sizes = in_one_process(load_whole, cases)
        outcome: dict[str, Any] = {"cases": {}, "all": sizes}
        try:
            outcome["cases"] = compared(expected, load, cases)
            outcome["parameters"] = {n: p.nbytes for n, p in stages[0].state_dict().items()}
            outcome["tokens"] = str(captures_of(stages[0]))
        except ValueError as error:
            outcome["refused"] = str(error)
        found[f"{architecture}, {form}"] = outcome
    return found


def commands(lines: list[list[str]], said: list[str]) -> list[str]:
    """What this process prints of each command; `said` is what a chat is told."""
    import builtins

    from torch_moe_mps.commands import main as run

    told = iter(said)
    builtins.input = lambda prompt: next(told)
    printed = []
    for arguments in lines:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert run(arguments) == 0
        printed.append(output.getvalue())
    return printed


def engines(scenarios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each scenario, the jobs of an engine in the first process: see `answers_of` for the arguments
    beside "folder", "kv_bits" and "patched", the name of a function here that changes this process. Scenarios
    of a folder share the model: one that fails comes last.

    Returns: the answers; what the calls here compute: [rows, tokens] of each; the tokens of the prefixes that
    are cached in the end; how many draft tokens were verified; the error of `generate_batch`, without an
    engine that leads.
    """
    import torch_moe_mps

    @functools.cache
    def loaded(folder: str, kv_bits: int | str | None = None) -> tuple[Any, str]:
        model, prompts = staged(folder, kv_bits=kv_bits), [torch.ones(3, dtype=torch.int64)]
        return model, outcome(lambda: torch_moe_mps.generate_batch(model, prompts))

    found = []
    for scenario in scenarios:
        model, refused = loaded(scenario.pop("folder"), scenario.pop("kv_bits", None))
        found.append(_engine(model, **scenario) | {"refused": refused})
    return found


def _engine(model: Any, patched: str | None = None, **given: Any) -> dict[str, Any]:
    from torch_moe_mps.pipeline import executor
    from torch_moe_mps.pipeline.follower import Follower
    from torch_moe_mps.serving.engine import scheduler

    scheduler.LARGEST_CHUNK = 16
    calls: list[list[int]] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append([*kwargs["input_ids"].shape]), with_kwargs=True
    )
    answers, following, drafted = None, Follower(model.pipeline), 0
    with contextlib.nullcontext() if patched is None else globals()[patched]():
        if rank() > 0:
            cached = following._prefix_cache
            with contextlib.suppress(MemoryError):
                following.run()
        else:
            executor.lead(model)
            answers, cached, drafted = answers_of(model, **given)
            executor.end_all()
    hook.remove()
    kept = [prefix.ids.tolist() for prefix in cached.kept]
    return {"answers": answers, "calls": calls, "cached": kept, "drafted": drafted}


def answers_of(
    model: Any,
    jobs: list[dict[str, Any]],
    together: int = 1,
    drafts: bool = False,
    memory: int = 1 << 30,
    cancelled: int | None = None,
) -> tuple[list[Any], Any, int]:
    """The tokens of the answers of jobs {"ids", "seed", and settings}, or the line of an error; the prefix
    cache in the end; and how many draft tokens were verified.

    Args:
        together, drafts, memory: of the engine and of its prefix cache.
        cancelled: the number of a job that is cancelled behind its second token.
    """
    from torch_moe_mps.serving.engine.engine import Engine
    from torch_moe_mps.serving.engine.job import Job
    from torch_moe_mps.serving.prefix_cache.memory import PrefixCache
    from torch_moe_mps.serving.speculative.asked import drafting_of

    prefixes = PrefixCache(memory)
    drafting = drafting_of(model, "lookup", prefixes, "test", width=4) if drafts else None
    engine, answers = Engine(model, prefixes, together, drafting=drafting), list[_Answer]()
    for number, given in enumerate(jobs):
        settings = {**given}
        inputs, seed = {"input_ids": torch.tensor([settings.pop("ids")])}, settings.pop("seed", None)
        config, answer = transformers.GenerationConfig(**settings), _Answer()
        answers.append(answer)
        job = Job(inputs, config, answer.take, answer.end, seed=seed)
        answer.job = job if number == cancelled else None
        engine.submit(job)
    while engine.has_work:
        engine.step()
    drafted = 0 if drafting is None else drafting.accepted + drafting.rejected
    return [answer.error or answer.tokens for answer in answers], prefixes, drafted


class _Answer:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error, self.job = "", None

    def take(self, token: int) -> bool:
        self.tokens.append(token)
        if self.job is not None and len(self.tokens) == 2:
            self.job.cancel()
        return False

    def end(self, reason: Any) -> None:
        if isinstance(reason, Exception):
            self.error = str(reason)


@contextlib.contextmanager
def not_batchable() -> Any:
    """The first process says that sequences cannot be batched."""
    from torch_moe_mps.serving.engine.abilities import Abilities

    with patch.object(Abilities, "not_batchable", "tested"):
        yield


@contextlib.contextmanager
def second_raises() -> Any:
    """A process that follows fails in its third step of a batch."""
    from torch_moe_mps.pipeline import follower

    step, steps = follower.step_of, list[int]()

    def failing(*given: Any) -> None:
        steps.append(1)
        if len(steps) == 3:
            _raise()
        step(*given)

    with patch.object(follower, "step_of", failing):
        yield


@contextlib.contextmanager
def second_has_no_rows() -> Any:
    """A process that follows cannot batch its layers' caches."""
    from torch_moe_mps.models.caches.batched import BatchedCache, NotBatchable

    if rank() == 0:
        yield
        return
    with patch.object(BatchedCache, "admit", side_effect=NotBatchable("tested")):
        yield


# Failures


def _stall() -> None:
    time.sleep(3.5)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise MemoryError("no memory left")


WITHIN = {"stalls": _stall, "stops": _stop, "dies": _die, "raises": _raise}


def outcome(call: Any) -> str:
    try:
        return str(call().tolist())
    except (ValueError, RuntimeError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"


def failing(folder: str, failures: list[str], culprit: int = 1) -> dict[str, str]:
    """{failure: how the call ended here}."""
    from torch_moe_mps.pipeline import loading as pipeline_loading

    found = {}
    for failure in failures:
        is_culprit, ids = rank() == culprit, prompt()
        if failure == "other weights":
            found[failure] = outcome(
                lambda: staged(_changed(folder) if rank() == culprit else folder).forward
            )
            continue
        if failure == "stops while loading":
            if is_culprit:
                pipeline_loading.this_machine = _stop
            found[failure] = outcome(lambda: staged(folder, loading_timeout=3.0).forward)
            continue
        model = staged(folder, decoding_timeout=2.0)
        if is_culprit and failure == "other ids":
            ids = ids + 1
        elif is_culprit and failure in WITHIN:
            _at_third_call(model, WITHIN[failure])
        found[failure] = outcome(lambda m=model, i=ids: generate(m, i, max_new_tokens=6))
        if failure == "raises":
            found["afterwards"] = outcome(lambda m=model: generate(m, prompt(), max_new_tokens=2))
    return found


def _changed(folder: str) -> str:
    """A copy of a checkpoint in which one number of one tensor is another."""
    other = shutil.copytree(folder, f"{folder}-changed")
    file = other + "/model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.self_attn.o_proj.weight"
    middle = weights[name].numel() // 2
    weights[name].view(-1)[middle] += 1
    save_file(weights, file, metadata={"format": "pt"})
    return other


def _at_third_call(model: Any, action: Any) -> None:
    calls: list[int] = []

    def hook(module: Any, args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            action()

    model.register_forward_pre_hook(hook)
