"""Calls of a model whose layers are spread over processes.

A call sends what the last layer here returns to the next process. The process with the output head sends its
logits to all others, but for calls of the engine: there it samples alone.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..models.programs import UntrackedState
from .exchange import ModelCall, StageExchange, refuse
from .peers import Peers
from .stages import Stage

_RECORDED = ("output_hidden_states", "output_attentions", "output_router_logits")
_FOR_TOWERS = ("pixel_values", "pixel_values_videos", "input_features", "image_embeds")


class Running(UntrackedState):
    """Joins the calls of a model in all processes. `model` is a stage, loaded and accelerated.

    Attributes:
        parts: of the model, in each process: {"layers", "bytes", "bytes_a_token"} and the bytes that are
            "free" there for sequences.
        calls: how many have begun.
        exchange: passes hidden states to the next stage.
        executor: makes the engine's executor of the model.
        shares_logits: whether processes without the output head get the logits of a call.
    """

    def __init__(self, model: Any, stage: Stage, peers: Peers, parts: Sequence[dict[str, Any]] = ()):
        self.model, self.stage, self.peers, self.parts = model, stage, peers, parts
        self.exchange = StageExchange(stage, peers)
        self.calls = self._ended = 0
        self.shares_logits = True
        self.executor: Callable[..., Any] = _refuse_engine
        self._signature = inspect.signature(type(model).forward)
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)
        model.register_forward_hook(self._at_the_end, always_call=True)
        refused = {"init_continuous_batching": _refuse_batching, "save_pretrained": _refuse_saving}
        vars(model).update(pipeline=self, **refused)

    @contextlib.contextmanager
    def without_logits(self) -> Iterator[None]:
        """Block whose calls give logits to the process with the output head alone."""
        before, self.shares_logits = self.shares_logits, False
        try:
            yield
        finally:
            self.shares_logits = before

    def _before(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Arguments of a model's call that this stage needs; starts the exchange.

        Raises: ValueError for a call without input ids, and for one that asks for states of all layers.
        """
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
        self.exchange.start_call(ModelCall(self.calls, ids, named.get("attention_mask")))
        unused: tuple[str, ...] = () if self.stage.first else _FOR_TOWERS
        unused += () if self.stage.last else ("labels",)  # only the process with the output head has logits
        return args, {name: value for name, value in kwargs.items() if name not in unused}

    def _after(self, model: Any, args: tuple, output: Any) -> Any:
        """Output of a call; where all ranks share logits, the last stage sends its own to the others."""
        if not hasattr(output, "logits"):
            refuse("return_dict", "True", False)
        if not self.shares_logits:
            return output
        call, device = self.exchange.call.digest, output.logits.device
        if self.stage.last:
            others = [rank for rank in range(self.peers.size) if rank != self.peers.rank]
            for rank in others:
                self.peers.send(rank, "logits", call, [output.logits, getattr(output, "loss", None)])
            for rank in others:  # logits still unsent when this process ends are lost
                self.peers.flush(rank)
            return output
        limit = self.exchange.limit(self.stage.behind)
        logits, loss = self.peers.receive(self.stage.head, "logits", call, limit)
        assert logits is not None
        output.logits = logits.to(device)
        if loss is not None:
            output.loss = loss.to(device)
        return output

    def _at_the_end(self, model: Any, args: tuple, output: Any) -> None:
        """Tells the others of a call that failed after it had begun; torch gives no output then."""
        error = sys.exc_info()[1]
        if output is None and error is not None and self.calls > self._ended:
            self.peers.failed(error)
        self._ended = self.calls
        self.exchange.end()


def _refuse_batching(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("moe_mps::pipeline: continuous batching must be in one process, got a pipeline")


def _refuse_saving(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("moe_mps::pipeline: a model must be whole to be saved, got one stage of a pipeline")


def _refuse_engine(*args: Any) -> Any:
    raise ValueError(
        "torch_moe_mps: several answers at once need a model in one process, got a pipeline: the commands "
        "generate them there, and its generate() in every process one after the other"
    )
