"""`from_pretrained` in every process of a pipeline: each reads its own layers."""

import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers

from ..checkpoints.cutting import cutting
from ..checkpoints.quantize.sizes import bytes_a_token, total_bytes
from ..checkpoints.source import Source, sample_of_checkpoint
from ..serving.engine.memory import Memory
from ..transformers import loading
from .loop import CannotBeCut, find_loop
from .peers import PeerError, Peers, Timeouts
from .running import Running
from .shares import Machine, given_shares, shares_of, this_machine
from .stages import Stage

_PACKAGE = __package__.partition(".")[0]
_OTHERS = ("tp_size", "fsdp_size", "dp_replicate_size", "ep_size")
_PATH = "name_or_path"  # may differ


def from_pretrained(
    name: str,
    model_class: type | None = None,
    *,
    distributed_config: Any = None,
    shares: Sequence[int] | None = None,
    loading_timeout: float = 1800.0,
    decoding_timeout: float = 60.0,
    **kwargs: Any,
) -> Any:
    """Load consecutive layers of a model in each process of torch.distributed, and accelerate them.

    Every process calls this, then the model or its `generate`, with the same arguments: docs/distributed.md.

    Args:
        name, model_class, kwargs: as in `torch_moe_mps.from_pretrained`; GGUF files are refused.
        distributed_config: transformers' DistributedConfig, with pp_size as the number of processes.
        shares: how many layers each process has; by default as many as its memory and bandwidth suggest.
        loading_timeout, decoding_timeout: how many seconds a process waits until the others have loaded, and
            until the layers of another have run on 512 tokens.

    Returns: the model of `torch_moe_mps.from_pretrained`; each call runs in all processes.

    Raises: ValueError for what `torch_moe_mps.from_pretrained` refuses, for a model that cannot be cut, and
        for sizes and shares that do not fit. PeerError if another process fails or differs.
    """
    if _size_of(distributed_config, "pp_size") == 1:
        if shares is not None:
            expected = "given with distributed_config=DistributedConfig(pp_size=...)"
            raise ValueError(f"moe_mps::from_pretrained: shares must be {expected}, got none")
        return loading.from_pretrained(name, model_class, distributed_config=distributed_config, **kwargs)
    timeouts = Timeouts(loading_timeout, decoding_timeout)
    part = functools.partial(PipelineLoading, name, distributed_config, shares, timeouts)
    return loading.from_pretrained(name, model_class, part=part, **kwargs)


def _size_of(distributed: Any, kind: str) -> int:
    """The "pp_size", "ep_size" and so on of an argument `distributed_config`; 1 by default."""
    return getattr(distributed, kind, None) or 1


class PipelineLoading:
    """Loading in one of the processes.

    Args:
        name, distributed, shares, timeouts: as in `from_pretrained`.
        source: the checkpoint.
        asked: other arguments, which must be the same in all processes.

    Raises: ValueError for a model that cannot be cut, before anything is read of the weights; PeerError if
        the processes differ.
    """

    def __init__(
        self, name: str, distributed: Any, shares: Any, timeouts: Timeouts, source: Source, asked: Any
    ):
        size = distributed.pp_size
        for other in _OTHERS:
            if (count := _size_of(distributed, other)) > 1:
                self._fail(other, f"1 beside pp_size={size}", count)
        if source.gguf is not None:
            raise ValueError("moe_mps::from_pretrained: a pipeline must be of safetensors, got a GGUF file")
        model = source.skeleton()
        try:
            loop = find_loop(model)
        except CannotBeCut as error:
            expected = "of layers that a pipeline can be cut between"
            raise CannotBeCut(f"moe_mps::from_pretrained: the model must be {expected}: {error}") from None
        layers: Any = model.get_submodule(loop.layers)
        self.peers = Peers(timeouts)
        with self._telling():
            if self.peers.size != size:
                self._fail("pp_size", f"the number of processes, {self.peers.size}", size)
            if len(layers) < size:
                self._fail("pp_size", f"at most the number of layers, {len(layers)}", size)
            facts = self.peers.gather(_facts(name, source.config, asked, shares))
            _check_alike(self.peers, facts)
            if shares is None:
                machines = [Machine(f["memory"], f["bandwidth"]) for f in facts]
                ends = [model.get_input_embeddings(), model.get_output_embeddings()]
                sizes, of_ends = [[*map(total_bytes, parts)] for parts in (layers, ends)]
                shares = shares_of(sizes, of_ends, _apart(machines, self.peers.hosts)[::-1])[::-1]
            self.stage = Stage(self.peers.rank, given_shares(shares, size, len(layers)), loop)

    def _fail(self, argument: str, expected: str, got: Any) -> None:
        raise ValueError(f"moe_mps::from_pretrained: {argument} must be {expected}, got {got!r}")

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Lets the other processes know of an error inside the block."""
        try:
            yield
        except BaseException as error:
            self.peers.failed(error)
            raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Inside the block, a model that is loaded keeps only the layers of this process."""
        with cutting(lambda model, device: self.stage.cut(model)), self._telling():
            yield

    def finish(self, model: Any) -> None:
        """Waits until all processes have their layers, and takes over the calls of the model."""
        part = {
            "layers": len(self.stage.own),
            "bytes": total_bytes(model),
            "bytes_a_token": bytes_a_token(model),
            "free": Memory(model).free,
        }
        Running(model, self.stage, self.peers, self.peers.gather(part))


def _facts(name: str, config: Any, asked: Any, shares: Any) -> dict[str, Any]:
    machine = this_machine()
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        _PACKAGE: sys.modules[_PACKAGE].__version__,
        "config": _digest(json.dumps(_plain(config.to_dict()), sort_keys=True).encode()),
        "checkpoint": _checkpoint(name, asked),
        "arguments": json.dumps(_plain({**asked, "shares": shares}), sort_keys=True),
        "memory": machine.memory,
        "bandwidth": machine.bandwidth,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {str(k): v for k, v in value.items() if k != _PATH}
        return {k: _plain(v) for k, v in kept.items() if not k.startswith("_")}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _checkpoint(name: str, asked: Mapping[str, Any]) -> str:
    """Digest of a sample of each tensor in a checkpoint's safetensors files."""
    sample = sample_of_checkpoint(name, asked)
    return "unknown" if sample is None else _digest(sample)


def _check_alike(peers: Peers, facts: list[dict[str, Any]]) -> None:
    """Raises: PeerError that names the first difference."""
    for fact in ("torch", "transformers", _PACKAGE, "config", "checkpoint", "arguments"):
        for rank, other in enumerate(facts):
            if other[fact] != facts[0][fact]:
                raise PeerError(
                    f"moe_mps: {peers.name(rank)} has {fact} {other[fact]}, {peers.name(0)} has "
                    f"{facts[0][fact]}: all processes need the same"
                )


def _apart(machines: list[Machine], hosts: list[str]) -> list[Machine]:
    """Processes on one host share its memory."""
    return [
        m._replace(memory=None if m.memory is None else m.memory // hosts.count(host))
        for m, host in zip(machines, hosts, strict=True)
    ]
