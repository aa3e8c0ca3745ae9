"""The Trainer's state and callbacks."""

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, TrainerState

__all__ = ["TRAINER_STATE_NAME", "PrinterCallback", "TrainerState"]
