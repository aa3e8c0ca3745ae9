"""DPO (pairs of a better and a worse answer) and GRPO (a reward function) by TRL's trainers.

The reference model is the same model with its adapter off.
"""

import asyncio
import functools
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._text import first_line, shown
from ..transformers.adapters.lora import quiet
from .examples import read_preferences
from .memory import Ranks
from .steps import Plan, Training, adapter_of

Reward = Callable[..., list[float]]
_SHOWN = 5  # lines that are named, at most


def reward_of(file: str) -> Reward:
    """The function `reward` of a Python file, with its results and errors checked at each call.

    Raises: ValueError.
    """
    spec = importlib.util.spec_from_file_location("reward", file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise ValueError(f"--reward must be a Python file, got {file}")
    module = importlib.util.module_from_spec(spec)
    _run(file, spec.loader.exec_module, module)
    function = getattr(module, "reward", None)
    if not callable(function):
        raise ValueError(f"--reward must be a file with a function `reward`, got none in {file}")

    @functools.wraps(function)
    def checked(*, completions: Sequence[Any], **given: Any) -> list[float]:
        found = _run(file, function, completions=completions, **given)
        if inspect.isawaitable(found):
            found = _run(file, asyncio.run, found)
        try:
            numbers = [float(number) for number in found]
        except (TypeError, ValueError):
            numbers = []
        if len(numbers) != len(completions) or not all(map(math.isfinite, numbers)):
            expected = f"must return a finite number for each of {len(completions)} completions"
            raise ValueError(f"the reward of {file} {expected}, got {shown(found)}")
        return numbers

    return checked


def _run(file: str, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """The result of user code. Raises: ValueError for any error of it, sys.exit included."""
    try:
        return function(*given, **named)
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"--reward {file} must run without an error, got {what}") from error


@dataclass(frozen=True)
class Task:
    """The training data of DPO or GRPO.

    Attributes:
        data: a Dataset of the rows that are trained on.
        tokens: of each row that are read together, at most.
        reward: of GRPO; None for DPO.
        generations: answers to each prompt that GRPO compares.
        answer: tokens of such an answer, at most.
        longest: tokens of a prompt with its answer that DPO reads.
    """

    data: Any
    tokens: list[int]
    tokenizer: Any
    reward: Reward | None
    generations: int
    answer: int
    longest: int


def dpo_task(file: str, tokenizer: Any, longest: int) -> Task:
    """The rows of a file whose prompts leave room for an answer; a line names the others.

    Raises: ValueError with file and line number; where no row is left.
    """
    rows = read_preferences(file, "dpo")
    _check_end(tokenizer, "dpo")
    tokens = {number: _tokens(file, number, row["prompt"], tokenizer) for number, row in rows.items()}
    if dropped := [number for number, count in tokens.items() if count >= longest]:
        names = ", ".join(map(str, dropped[:_SHOWN])) + ", ..." * (len(dropped) > _SHOWN)
        full = f"{file}: {len(dropped)} of {len(rows)} lines have prompts of {longest} tokens or more"
        if len(dropped) == len(rows):
            raise ValueError(f"{full}, and none is left: --max-length must be longer")
        print(f"{full} (--max-length) and are left out: {names}")
    kept = {number: row for number, row in rows.items() if tokens[number] < longest}
    read = []
    for number, row in kept.items():
        answers = (_tokens(file, number, row[key], tokenizer) for key in ("chosen", "rejected"))
        read.append(min(longest, tokens[number] + max(answers)))
    return Task(_dataset(file, kept), read, tokenizer, None, 0, 0, longest)


def grpo_task(file: str, tokenizer: Any, reward: str, generations: int, answer: int, context: int) -> Task:
    """The rows of a file, and the reward, which is called once with empty answers.

    Raises: ValueError with file and line number for a prompt that leaves no room for an answer; for a reward
        that does not run.
    """
    rows, function = read_preferences(file, "grpo"), reward_of(reward)
    _check_end(tokenizer, "grpo")
    read = []
    for number, row in rows.items():
        read.append(_tokens(file, number, row["prompt"], tokenizer) + answer)
        if read[-1] > context:
            expected = f"the prompt and --answer-length {answer} must fit in the model's {context} tokens"
            raise ValueError(f"{file}:{number}: {expected}, got a prompt of {read[-1] - answer}")
    data = _dataset(file, rows)
    first = data[0]
    empty: Any = "" if isinstance(first["prompt"], str) else [{"role": "assistant", "content": ""}]
    columns = {key: [value] * generations for key, value in first.items() if key != "prompt"}
    given = {"prompts": [first["prompt"]] * generations, "completion_ids": [[]] * generations}
    helpers = {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
    function(completions=[empty] * generations, **columns, **given, **helpers)
    return Task(data, read, tokenizer, function, generations, answer, context)


def _ignore(*given: Any) -> None:
    """In place of what TRL writes to a log."""


def _dataset(file: str, rows: dict[int, dict[str, Any]]) -> Any:
    datasets: Any = importlib.import_module("datasets")  # types differ where it is installed
    try:
        return datasets.Dataset.from_list([*rows.values()])
    except (TypeError, ValueError, OverflowError) as error:  # Arrow does not hold it
        expected = "one type under each key, and numbers of at most 64 bits"
        raise ValueError(f"{file} must have {expected}, got {first_line(error)}") from None


def _check_end(tokenizer: Any, method: str) -> None:
    if tokenizer.eos_token is None:
        raise ValueError(f"--method {method} needs a tokenizer with an end token, got one without")


def _tokens(file: str, number: int, value: str | list[dict[str, Any]], tokenizer: Any) -> int:
    """How many tokens a text has, or messages with the mark that asks for an answer."""
    if isinstance(value, str):
        return len(tokenizer(value)["input_ids"])
    try:
        text = tokenizer.apply_chat_template(value, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # whatever the template raises, or that there is none
        expected = "must have messages that the chat template takes"
        raise ValueError(f"{file}:{number}: {expected}, got {first_line(error)}") from None
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


class Preferring(Training):
    """Adapter training by TRL.

    Args:
        model: without an adapter; `trainer.model` is the one with it.
        adapter: its targets, ranks and the name of its base, as `steps.with_new_adapter` takes them.
    """

    def __init__(
        self,
        model: Any,
        adapter: tuple[Sequence[str], Ranks, str],
        task: Task,
        plan: Plan,
        folder: Path,
        show: Callable[[str], None],
    ):
        self._adapter, self._task = adapter, task
        super().__init__(model, [], 0, plan, folder, show, len(task.tokens))

    def _trainer(self, model: Any, arguments: dict[str, Any], examples: Any, pad: int) -> Any:
        trl: Any = importlib.import_module("trl")  # types differ where it is installed
        (targets, ranks, base), task = self._adapter, self._task
        given = {"train_dataset": task.data, "processing_class": task.tokenizer, "callbacks": [self._shown]}
        given["peft_config"] = adapter_of(model, targets, ranks)
        arguments |= {"bf16": False}  # the model keeps its own
        with quiet():
            if task.reward is None:
                how = trl.DPOConfig(**arguments, max_length=task.longest)
                trainer = trl.DPOTrainer(model, args=how, **given)
            else:
                sizes = {"num_generations": task.generations, "max_completion_length": task.answer}
                how = trl.GRPOConfig(**arguments, **sizes)
                trainer = trl.GRPOTrainer(model, task.reward, how, **given)
        trainer.model.peft_config["default"].base_model_name_or_path = base
        return trainer
