"""Hidden states of a call: they go from each stage to the next one."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .peers import Peers, on_the_host
from .stages import Stage

_TOKENS = 512  # tokens of a call for each `Timeouts.decoding`


def refuse(argument: str, expected: str, got: Any) -> Any:
    raise ValueError(f"moe_mps::pipeline: {argument} must be {expected}, got {got!r}")


@dataclass
class ModelCall:
    """A call of the model.

    Args:
        number: counts all calls.
        ids, mask: the tokens [B, T], or their embeddings, and the attention mask, if there is one.

    Attributes:
        given: the names of what the layers get beside the tokens.
    """

    number: int
    ids: Tensor
    mask: Any = None
    given: list[str] = field(default_factory=list)

    @cached_property
    def digest(self) -> str:
        """Digest of the arguments, computed while waiting for the device."""
        state = hashlib.blake2b(" ".join(self.given).encode(), digest_size=8)
        for tensor in (self.ids, self.mask):
            if isinstance(tensor, Tensor):
                host = on_the_host(tensor)
                state.update(f"{host.dtype} {[*host.shape]}".encode())
                state.update(host.view(-1).view(torch.uint8).numpy().data)
        return f"{self.number} {state.hexdigest()}"


class Handover(NamedTuple):
    """Common values of a stage's calls that are alike, besides their tensors."""

    given: list[str]
    device: torch.device | None  # None: nothing arrives
    present: list[bool]  # whether each thing that arrives is a tensor


class StageExchange:
    """The exchange of a stage with its neighbours, by hooks in its model's modules.

    While a call is recorded, these exchange nothing.

    Attributes:
        call: that runs now, or ran last.
    """

    def __init__(self, stage: Stage, peers: Peers):
        self.stage, self.peers, self.call = stage, peers, ModelCall(0, torch.empty(0))
        self._arrived: list[Tensor | None] | None = None
        self._sent: list[Tensor | None] = []
        self._device: torch.device | None = None
        self._as_input: Callable[[Tensor], Tensor] | None = None  # while a token is captured
        stage.base.register_forward_pre_hook(self._before_layers, with_kwargs=True)
        if not stage.last:
            stage.layers[stage.own.stop - 1].register_forward_hook(self._leave)
        if not stage.first:
            stage.layers[stage.own.start - 1].arrives = self._receive  # the stand-in in front of its layers

    def start_call(self, call: ModelCall) -> None:
        self.call, self._arrived = call, None

    def end(self) -> None:
        self._arrived = None

    def limit(self, stages: int) -> float:
        """Seconds that this many stages may take for the tokens of this call."""
        return self.peers.timeouts.decoding * math.ceil(self.call.ids.shape[1] / _TOKENS) * max(1, stages)

    def _before_layers(self, base: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Layers must get the same inputs in every process; only one process has features of images."""
        arguments = {
            name for name, value in kwargs.items() if isinstance(value, Tensor | list | tuple | dict)
        }
        self.call.given = sorted(arguments - {"input_ids", "inputs_embeds"})

    def _leave(self, layer: Any, args: tuple, output: Any) -> None:
        results = [*output] if isinstance(output, tuple) else [output]
        wanted = self.stage.loop.results or 1
        if len(results) != wanted or not all(r is None or isinstance(r, Tensor) for r in results):
            refuse("what a layer returns", f"{wanted} tensors", [type(r).__name__ for r in results])
        self._sent = results
        if self._as_input is None:
            self.send(results)

    def send(self, results: list[Tensor | None]) -> None:
        """Sends what the last layer here has returned."""
        if not self.stage.last:
            self.peers.send(self.stage.next, "hidden states", self.call.digest, results, self.limit(1))

    def _receive(self, device: torch.device) -> list[Tensor | None]:
        self._device = device
        if self._arrived is None:
            limit = self.limit(self.stage.before)
            with _disable_current_modes():
                tensors = self.peers.receive(self.stage.previous, "hidden states", self.call.digest, limit)
                self._arrived = [None if t is None else t.to(device) for t in tensors]
        if self._as_input is None:
            return self._arrived
        return [None if t is None else self._as_input(t) for t in self._arrived]

    def record(
        self, run: Callable[[], Any], as_input: Callable[[Tensor], Tensor]
    ) -> tuple[Any, list[Tensor | None], Handover]:
        """Result of a call that is captured, the tensors it would have sent, and what calls like it share.

        `as_input` gives an input of the captured call that is like a tensor.
        """
        self._as_input, self._sent, self._device = as_input, [], None
        try:
            result = run()
        finally:
            self._as_input = None
        present = [t is not None for t in self._arrived or []]
        sent, self._sent = self._sent, []
        return result, [] if self.stage.last else sent, Handover(self.call.given, self._device, present)

    def arriving(self, handover: Handover) -> list[Tensor] | None:
        """The tensors that arrive for a captured call; None where they are not of its kind, `handover`."""
        self.call.given = handover.given
        if handover.device is None:
            return []
        tensors = self._receive(handover.device)
        alike = [t is not None for t in tensors] == handover.present
        return [t for t in tensors if t is not None] if alike else None
