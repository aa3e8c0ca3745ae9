"""The part of a model that a process holds: its own layers, and stand-ins for the others."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.absent import beside_text, leave_out
from ..models.programs import cache_among, count_tokens
from .loop import Loop


class Elsewhere(nn.Module):
    """Replaces a layer that another process has: passes on its input, and counts its tokens.

    Masks take their lengths from the cache, so this layer has keys and values in it, too: one number for each
    token.

    Attributes:
        results: set to what the layer returned in the other process, just before the model is called.
    """

    def __init__(self, module: nn.Module, index: int, loop: Loop):
        super().__init__()
        classes = [cls for cls in reversed(type(module).__mro__) if cls not in nn.Module.__mro__]
        values = {name: value for holder in (*classes, module) for name, value in vars(holder).items()}
        plain = {k: v for k, v in values.items() if isinstance(v, str | int | float | bool | None)}
        vars(self).update({k: v for k, v in plain.items() if not k.startswith("_")})
        self.index, self.results = index, loop.results
        self.convolves = index in loop.convolving
        self.arrives: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if (cache := cache_among(kwargs)) is not None:
            count_tokens(cache, self.index, hidden, self.convolves)
        # Where nothing arrives, nobody reads what follows from this.
        results = [hidden] * (self.results or 1) if self.arrives is None else self.arrives(hidden.device)
        return results[0] if self.results is None else tuple(results)


class NoEmbedding(nn.Module):
    """Replaces an embedding that only the first stage needs: gives its shape, without memory."""

    def __init__(self, embedding: Any, dtype: torch.dtype):
        super().__init__()
        self.size, self.dtype = embedding.embedding_dim, dtype

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=ids.device).expand(*ids.shape, self.size)


class NoHead(nn.Module):
    """Replaces an output head that only the last stage needs: gives logits that nobody reads."""

    weight: Tensor

    def __init__(self, head: Any):
        super().__init__()
        weight = torch.zeros(1, head.in_features, dtype=head.weight.dtype, device="cpu")
        self.register_buffer("weight", weight, persistent=False)  # some models compute with it themselves

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.new_zeros(()).expand(*hidden.shape[:-1], 1)


class Stage:
    """The part of a model in one process.

    Layers run from the last process to the first: rank 0 has the logits and samples; other processes need
    only the sampled tokens.

    Args:
        rank, shares: of the process, and the number of layers of each.
        loop: of the model.

    Attributes:
        own: indices of this process's layers.
        first, last: whether they are the first ones, behind the embedding, or the last ones, with the head.
        previous, next: the ranks of the neighbours.
        before, behind: number of stages before and after this one.
        layers: this process's layers, and stand-ins for the others, once the model is cut.
    """

    head = 0  # the rank with the output head

    def __init__(self, rank: int, shares: Sequence[int], loop: Loop):
        begin = sum(shares[rank + 1 :])
        self.own = range(begin, begin + shares[rank])
        self.before, self.behind = len(shares) - 1 - rank, rank
        self.first, self.last = self.before == 0, self.behind == 0
        self.previous, self.next = rank + 1, rank - 1
        self.loop = loop

    def cut(self, model: Any) -> None:
        """Replaces what other processes have by stand-ins. The model has no weights yet."""
        self.base: Any = model.get_submodule(self.loop.base)
        self.layers: Any = model.get_submodule(self.loop.layers)
        removed = []
        for index, layer in enumerate(self.layers):
            if index not in self.own:
                self.layers[index] = Elsewhere(layer, index, self.loop)
                removed.append(f"{self.loop.layers}.{index}")
        if not self.first:  # towers of vision and audio give embeddings, which only the first stage needs
            towers = [n for n in beside_text(model) if any(True for _ in model.get_submodule(n).parameters())]
            leave_out(model, towers)
            removed += towers
        removed += self._ends(model)
        present = model.state_dict()
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        model.all_tied_weights_keys = {t: s for t, s in tied.items() if t in present and s in present}
        ignored = {rf"^{re.escape(module)}\." for module in removed}
        ignored |= {*(model._keys_to_ignore_on_load_unexpected or ())}
        model._keys_to_ignore_on_load_unexpected = ignored

    def _ends(self, model: Any) -> Iterator[str]:
        tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        names = {module: name for name, module in model.named_modules()}
        if not self.first and not self.loop.uses_embeddings and not (tied and self.last):
            yield names[embedding]
            model.set_input_embeddings(NoEmbedding(embedding, embedding.weight.dtype))
        if not self.last:
            yield names[head]
            model.set_output_embeddings(NoHead(head))
