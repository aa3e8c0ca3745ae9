"""Adapter training over transformers' Trainer: batches, steps and checkpoints."""

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from peft.utils import load_peft_weights
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from ..transformers.adapters.lora import quiet
from ..transformers.basics.interface import experts_of, projections
from ..transformers.upstream import TRAINER_STATE_NAME, PrinterCallback, TrainerState
from .examples import Example
from .memory import Ranks

_SHOWN = 100  # lines of progress, at most


@dataclass
class Plan:
    """Hyperparameters of a training.

    Attributes:
        batch: examples per step.
        steps: None takes the steps of `epochs`.
        save_every: steps after which a checkpoint is written.
    """

    batch: int
    epochs: float
    steps: int | None
    learning_rate: float
    seed: int
    save_every: int

    def steps_for(self, examples: int) -> int:
        an_epoch = -(-examples // self.batch)
        return self.steps or max(1, round(self.epochs * an_epoch))


def adapter_of(model: Any, targets: Collection[str], ranks: Ranks) -> LoraConfig:
    """LoraConfig of an adapter, with a rank for linear layers and one for experts.

    Args:
        targets: the names of linear layers.
    """
    experts = [
        f"{name.rpartition('.')[2]}.{projection}"
        for name, module in experts_of(model).items()
        for projection in projections(module)
    ]
    own = dict.fromkeys(experts if ranks.experts else (), ranks.experts)
    return LoraConfig(
        r=ranks.linear,
        lora_alpha=2 * ranks.linear,
        target_modules=[*targets],
        target_parameters=list(own) or None,
        rank_pattern=own,
        alpha_pattern={name: 2 * rank for name, rank in own.items()},
        task_type="CAUSAL_LM",
    )


def with_new_adapter(model: Any, targets: Collection[str], ranks: Ranks, base: str) -> Any:
    """The model with a new adapter, whose B factors are zero.

    Args:
        targets: the names of linear layers.
        base: the name that the adapter's config has for the model.
    """
    with _quiet():
        adapted = get_peft_model(model, adapter_of(model, targets, ranks))
    adapted.peft_config["default"].base_model_name_or_path = base
    return adapted


def batch_of(examples: Sequence[Example], pad: int) -> dict[str, Tensor]:
    """input_ids, labels and attention_mask [B, T] of examples, right-padded."""
    longest = max(len(example.ids) for example in examples)

    def padded(numbers: list[int], with_: int) -> list[int]:
        return numbers + [with_] * (longest - len(numbers))

    rows = {
        "input_ids": [padded(example.ids, pad) for example in examples],
        "labels": [padded(example.labels, -100) for example in examples],
        "attention_mask": [padded([1] * len(example.ids), 0) for example in examples],
    }
    return {name: torch.tensor(values) for name, values in rows.items()}


@torch.no_grad()
def held_out_loss(model: Any, examples: Sequence[Example], batch: int, pad: int) -> float:
    """Mean loss per token of held-out examples, in nats."""
    was_training, total, count = model.training, 0.0, 0
    model.eval()
    for start in range(0, len(examples), batch):
        some = examples[start : start + batch]
        learnt = sum(example.learnt for example in some)
        inputs = {name: tensor.to(model.device) for name, tensor in batch_of(some, pad).items()}
        total += learnt * model(**inputs, use_cache=False).loss.item()
        count += learnt
    model.train(was_training)
    return total / count


class _Shown(TrainerCallback):
    """Prints the progress, and ends the training after a step when told to."""

    def __init__(self, show: Callable[[str], None]):
        self.show, self.is_told_to_end = show, False
        self._began, self._tokens_before, self._steps_before = 0.0, 0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()
        self._tokens_before, self._steps_before = state.num_input_tokens_seen, state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.is_told_to_end:
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" not in (logs or {}):
            return
        if not math.isfinite(logs["loss"]):
            _refuse_losses(f"{logs['loss']} at step {state.global_step}")
        seconds = time.perf_counter() - self._began
        read = logs.get("num_tokens", state.num_input_tokens_seen)  # TRL counts by itself
        speed = (read - self._tokens_before) / seconds
        state.log_history[-1]["tokens_a_second"] = speed
        left = (state.max_steps - state.global_step) * seconds / (state.global_step - self._steps_before)
        self.show(
            f"step {state.global_step} of {state.max_steps}: loss {logs['loss']:.4f}, {speed:.0f} tokens/s, "
            f"{int(left) // 60}:{int(left) % 60:02} left"
        )


class Training:
    """A training run, from the start or from the last checkpoint.

    Attributes:
        trainer: transformers' own.
    """

    def __init__(
        self,
        model: Any,
        examples: Sequence[Example],
        pad: int,
        plan: Plan,
        folder: Path,
        show: Callable[[str], None],
        count: int | None = None,
    ):
        """`folder`: of the checkpoints; `count`: of the lines, where they are not `examples`."""
        self._folder, self._shown = folder, _Shown(show)
        steps = plan.steps_for(len(examples) if count is None else count)
        with _quiet():
            arguments: dict[str, Any] = {
                "output_dir": str(folder),
                "per_device_train_batch_size": plan.batch,
                "max_steps": steps,
                "learning_rate": plan.learning_rate,
                "lr_scheduler_type": "cosine",
                "warmup_steps": max(1, steps // 20),
                "seed": plan.seed,
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": False},
                "logging_steps": max(1, steps // _SHOWN),
                "logging_nan_inf_filter": False,
                "save_steps": plan.save_every,
                "save_total_limit": 1,
                "report_to": [],
                "disable_tqdm": True,
                "use_cpu": model.device.type == "cpu",
                "dataloader_pin_memory": False,
            }
            self.trainer = self._trainer(model, arguments, examples, pad)
        self.trainer.remove_callback(PrinterCallback)

    def _trainer(self, model: Any, arguments: dict[str, Any], examples: Sequence[Example], pad: int) -> Any:
        counted = {"remove_unused_columns": False, "include_num_input_tokens_seen": "non_padding"}
        return Trainer(
            model,
            TrainingArguments(**arguments, **counted),
            train_dataset=list(examples),
            data_collator=lambda some: batch_of(some, pad),
            callbacks=[self._shown],
        )

    def end(self) -> None:
        """Ends the training after the current step, with a checkpoint."""
        self._shown.is_told_to_end = True

    def run(self, resume: bool) -> bool:
        """Returns: whether all steps were taken.

        Raises: ValueError for a loss that is not finite.
        """
        checkpoint = last_checkpoint(self._folder) if resume else None
        if resume and checkpoint is None:
            self._shown.show(f"{self._folder} has no whole checkpoint: the training begins anew")
        if checkpoint is not None:
            self.trainer.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
            if self.trainer.state.global_step >= self.trainer.args.max_steps:  # ended behind its last step
                set_peft_model_state_dict(self.trainer.model, load_peft_weights(str(checkpoint)))
                return True
        with _quiet():
            self.trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        if not all(p.isfinite().all() for p in self.trainer.model.parameters() if p.requires_grad):
            _refuse_losses(f"an adapter that is not at step {self.trainer.state.global_step}")
        return self.trainer.state.global_step >= self.trainer.state.max_steps

    def curve(self) -> list[dict[str, float]]:
        """Step, loss and tokens per second of each line of progress."""
        names = {"step": "step", "loss": "loss", "tokens_a_second": "tokens_a_second"}
        rows = (row for row in self.trainer.state.log_history if "loss" in row)
        return [{name: row[key] for name, key in names.items() if key in row} for row in rows]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that `quiet` leaves out, and one of a base model that PEFT looks for."""
    with quiet():
        warnings.filterwarnings("ignore", "(Unable to fetch|Could not find a config)", UserWarning)
        yield


def save_adapter(adapted: Any, folder: Path) -> None:
    """Writes an adapter as PEFT does."""
    with _quiet():
        adapted.save_pretrained(folder, save_embedding_layers=False)


def _refuse_losses(came: str) -> NoReturn:
    raise ValueError(f"the loss must be finite, got {came}: a smaller --learning-rate may help")


def last_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint that is whole: Trainer writes its state behind all else."""
    whole = [file.parent for file in folder.glob(f"checkpoint-*/{TRAINER_STATE_NAME}")]
    return max(whole, key=lambda checkpoint: int(checkpoint.name.rpartition("-")[2]), default=None)
