"""Stand-ins for absent parts of a model: of multimodal models, mlx-lm writes only the language model."""

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn


class Absent(nn.Module):
    """Replaces a part without weights; using it raises RuntimeError or AttributeError."""

    def __init__(self, name: str):
        super().__init__()
        self.error = f"moe_mps: the checkpoint must have {name} for this, got a language model alone"

    def forward(self, *inputs: Any, **named: Any) -> NoReturn:
        raise RuntimeError(self.error)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(self.error) from None


def around_text(model: Any) -> tuple[set[str], str]:
    """The names of all ancestors of the token embedding, and of the innermost PreTrainedModel among them."""
    embedding = model.get_input_embeddings()
    around = {name for name, module in model.named_modules() if any(m is embedding for m in module.modules())}
    models = {name for name in around if hasattr(model.get_submodule(name), "base_model_prefix")}
    return around, max(models, key=len, default="")


def beside_text(model: Any) -> list[str]:
    """The names of the parts of a multimodal model that are outside its language model."""
    if model.config.get_text_config() is model.config:
        return []
    around, text = around_text(model)
    head = model.get_output_embeddings()
    outer = [name for name in around if name == "" or text.startswith(f"{name}.")]
    result = []
    for name in outer:
        for child, module in model.get_submodule(name).named_children():
            path = f"{name}.{child}".lstrip(".")
            if path not in around and not any(m is head for m in module.modules()):
                result.append(path)
    return result


def leave_out(model: nn.Module, names: Iterable[str]) -> None:
    """Replaces the named parts by stand-ins."""
    for name in names:
        model.set_submodule(name, Absent(name))


def absent_in(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Absent)]
