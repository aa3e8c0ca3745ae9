"""Calls of a model whose layers are spread over processes.

A call sends what the last layer here returns to the next process. Logits go from the process with the output
head to all others, or the tokens that it has sampled from them, or nothing.
"""

import contextlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..transformers.basics.state import Beside
from ..transformers.capture.exchange import exchange_by
from .handing import Call, Handing, refuse
from .peers import Peers
from .stages import Stage

# Logits of all tokens but the one that was sampled elsewhere.
_NEVER = -1e30
_RECORDED = ("output_hidden_states", "output_attentions", "output_router_logits")
_FOR_TOWERS = ("pixel_values", "pixel_values_videos", "input_features", "image_embeds")
Returns = Literal["logits", "sampled tokens", "nothing"]


class Running(Beside):
    """Joins the calls of a model in all processes. `model` is a stage, loaded and accelerated.

    Attributes:
        parts: of the model, in each process: {"layers", "bytes", "bytes_a_token"} and the bytes that are
            "free" there for sequences.
        calls: how many have begun.
        handing: of hidden states.
        returns: what processes without the output head get of a call.
        to_come: tokens of a prompt in chunks that are still to come: nobody reads the logits in front of
            these. None for a whole prompt.
        done: which sequences have ended [B], as told with the sampled tokens.
    """

    def __init__(self, model: Any, stage: Stage, peers: Peers, parts: Sequence[dict[str, Any]] = ()):
        self.model, self.stage, self.peers, self.parts = model, stage, peers, parts
        self.handing = Handing(stage, peers)
        self.calls = self._ended = 0
        self.returns: Returns = "logits"
        self.to_come: int | None = None
        self.done: Tensor | None = None
        self._signature = inspect.signature(type(model).forward)
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)
        model.register_forward_hook(self._at_the_end, always_call=True)
        exchange_by(model, self.handing)
        vars(model).update(save_pretrained=_refuse_saving, init_continuous_batching=_refuse_batching)

    @contextlib.contextmanager
    def returning(self, what: Returns) -> Iterator[None]:
        """Block whose calls return this to processes without the output head."""
        before, self.returns = self.returns, what
        try:
            yield
        finally:
            self.returns = before

    def tell(self, kind: str, tensors: list[Tensor | None]) -> None:
        """Sends something about this call to all others. Returns once all have it: what has not been sent
        when this process ends is lost.
        """
        others = [rank for rank in range(self.peers.size) if rank != self.peers.rank]
        for rank in others:
            self.peers.send(rank, kind, self.handing.call.digest, tensors)
        for rank in others:
            self.peers.flush(rank)

    def _before(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        named = dict(self._signature.bind_partial(model, *args, **kwargs).arguments)
        named = {**named, **named.pop("kwargs", {})}
        for name in _RECORDED:
            if named.get(name):
                refuse(name, "False: a process has the states of its own layers only", True)
        ids = named.get("input_ids")
        ids = named.get("inputs_embeds") if ids is None else ids
        if ids is None:
            raise ValueError("moe_mps::pipeline: input_ids must be given, got None")
        self.calls += 1
        self.handing.begin(Call(self.calls, ids, named.get("attention_mask")))
        if self.to_come is not None:
            self.to_come -= ids.shape[1]
        unused: tuple[str, ...] = () if self.stage.first else _FOR_TOWERS
        unused += () if self.stage.last else ("labels",)  # only the process with the output head has logits
        return args, {name: value for name, value in kwargs.items() if name not in unused}

    def _after(self, model: Any, args: tuple, output: Any) -> Any:
        if not hasattr(output, "logits"):
            refuse("return_dict", "True", False)
        if self.returns == "nothing" or self.to_come:
            return output
        if self.stage.last:
            if self.returns == "logits":  # else whoever samples tells the tokens
                self.tell("logits", [output.logits, getattr(output, "loss", None)])
            return output
        limit = self.handing.limit(self.stage.behind)
        first, second = self.peers.receive(self.stage.head, self.returns, self.handing.call.digest, limit)
        assert first is not None
        if self.returns == "sampled tokens":
            self.done = second
            size = len(first), 1, self.stage.vocabulary
            logits = first.new_full(size, _NEVER, dtype=torch.float32)
            output.logits = logits.scatter_(2, first.view(-1, 1, 1), 0.0).to(output.logits.device)
        else:
            output.logits = first.to(output.logits.device)
            if second is not None:
                output.loss = second.to(output.logits.device)
        return output

    def _at_the_end(self, model: Any, args: tuple, output: Any) -> None:
        """Tells the others of a call that failed after it had begun; torch gives no output then."""
        error = sys.exc_info()[1]
        if output is None and error is not None and self.calls > self._ended:
            self.peers.failed(error)
        self._ended = self.calls
        self.handing.end()


def _refuse_batching(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("moe_mps::pipeline: continuous batching must be in one process, got a pipeline")


def _refuse_saving(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("moe_mps::pipeline: a model must be whole to be saved, got one stage of a pipeline")
