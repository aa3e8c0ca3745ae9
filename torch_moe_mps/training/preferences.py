"""Adapters by TRL: DPO from pairs of a better and a worse answer, GRPO from a reward function.

What they compare with is the model with its adapter off: there is no second one.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..transformers.adapters.lora import quiet
from .examples import read_rows
from .memory import Ranks
from .steps import Plan, Training, adapter_of

FORMS = {"dpo": ("prompt", "chosen", "rejected"), "grpo": ("prompt",)}  # the keys that a line must have
Reward = Callable[..., list[float]]


def rows_for(method: str, file: str) -> list[dict[str, Any]]:
    """The rows of a file with a JSON object in each line.

    Raises: ValueError with file and line number for a line without what the method reads.
    """
    return read_rows(file, FORMS[method])


def reward_of(file: str) -> Reward:
    """The function `reward` of a Python file. Raises: ValueError."""
    spec = importlib.util.spec_from_file_location("reward", file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise ValueError(f"--reward must be a Python file, got {file}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, "reward", None)
    if not callable(function):
        raise ValueError(f"--reward must be a file with a function `reward`, got none in {file}")
    made: Reward = function
    return made


@dataclass(frozen=True)
class Task:
    """A file of examples, and the training task.

    Args:
        rows: as `rows_for` reads them.
        reward: of GRPO; None for DPO.
        generations: answers to each prompt that GRPO compares.
        answer: tokens of such an answer, at most.
        longest: tokens of a prompt with its answer that DPO reads.
    """

    rows: Sequence[dict[str, Any]]
    tokenizer: Any
    reward: Reward | None
    generations: int
    answer: int
    longest: int

    @property
    def tokens(self) -> list[int]:
        """Tokens of each row that are read together, at most."""
        keys = ("prompt",) if self.reward is not None else FORMS["dpo"]
        each = [[self._count(row[key]) for key in keys] for row in self.rows]
        if self.reward is not None:
            return [prompt + self.answer for (prompt,) in each]
        return [min(self.longest, prompt + max(answers)) for prompt, *answers in each]

    def _count(self, value: str | list[dict[str, Any]]) -> int:
        text = value if isinstance(value, str) else "".join(str(part.get("content")) for part in value)
        return len(self.tokenizer(text)["input_ids"])


class Preferring(Training):
    """The training of an adapter by TRL.

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
        super().__init__(model, [], 0, plan, folder, show, len(task.rows))

    def _trainer(self, model: Any, arguments: dict[str, Any], examples: Any, pad: int) -> Any:
        trl: Any = importlib.import_module("trl")  # types differ where it is installed
        datasets: Any = importlib.import_module("datasets")
        (targets, ranks, base), task = self._adapter, self._task
        data = datasets.Dataset.from_list([*task.rows])
        given = {"train_dataset": data, "processing_class": task.tokenizer, "callbacks": [self._shown]}
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
