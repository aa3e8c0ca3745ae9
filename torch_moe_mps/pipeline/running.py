"""Calls of a model whose layers are spread over processes, and `generate`.

A call sends what the last layer here returns to the next process. Logits go from the last process to all
others. While `generate` samples, only the last process chooses the token ids, and sends them instead.
"""

import contextlib
import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..transformers.basics.scoped import Seeded
from ..transformers.capture.exchange import exchange_by
from ..transformers.upstream.calls import cache_among
from .peers import PeerError, Peers, as_octets, from_octets, on_the_host
from .stages import Stage

# The time limit of a call is for this many tokens.
_TOKENS = 512
# Logits of all tokens but the one that the last process chose.
_NEVER = -1e30
# Arguments of `generate` with which it needs the logits of every token in every process.
_NEED_LOGITS = (
    "assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "custom_generate", "dola_layers",
    "penalty_alpha", "logits_processor", "prefix_allowed_tokens_fn", "negative_prompt_ids", "output_scores",
    "output_logits", "constraints", "force_words_ids", "stop_strings",
)  # fmt: skip
_FOREVER = 1e9  # seconds
_RECORDED = ("output_hidden_states", "output_attentions", "output_router_logits")
_FOR_TOWERS = ("pixel_values", "pixel_values_videos", "input_features", "image_embeds")


class Handover(NamedTuple):
    """Common values of a stage's calls that are alike, besides their tensors."""

    given: list[str]
    device: torch.device | None  # None: nothing arrives
    present: list[bool]  # whether each thing that arrives is a tensor


class Running:
    """Joins the calls of a model in all processes. `model` is a stage, loaded and accelerated."""

    def __init__(self, model: Any, stage: Stage, peers: Peers):
        self.model, self.stage, self.peers = model, stage, peers
        self.calls = self._ended = 0
        self._samples = False  # whether token ids go back instead of logits, chosen by `generate`
        self._greedy = False  # whether the likeliest token's id goes back instead of logits
        self._leads = False
        self.answering: Any = None  # generates for `leading` and `follow`, if not `generate` itself
        self._streamer: Any = None
        self._rest: int | None = None  # tokens of a prompt in chunks that are still to come
        self._done: Tensor | None = None
        self._arrived: list[Tensor | None] | None = None
        self._sent: list[Tensor | None] = []
        self._device: torch.device | None = None
        self._as_input: Callable[[Tensor], Tensor] | None = None  # while a token is captured
        self._signature = inspect.signature(type(model).forward)
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)
        model.register_forward_hook(self._at_the_end, always_call=True)
        stage.base.register_forward_pre_hook(self._before_layers, with_kwargs=True)
        if not stage.last:
            stage.layers[stage.own.stop - 1].register_forward_hook(self._send)
        if not stage.first:
            stage.layers[stage.own.start - 1].arrives = self._receive  # the stand-in in front of its layers
        exchange_by(model, self)
        vars(model).update(
            generate=self.generate, save_pretrained=self._refuse_saving, init_continuous_batching=self._refuse
        )

    # Calls

    def _before(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        named = dict(self._signature.bind_partial(model, *args, **kwargs).arguments)
        named = {**named, **named.pop("kwargs", {})}
        for name in _RECORDED:
            if named.get(name):
                self._fail(name, "False: a process has the states of its own layers only", True)
        ids = named.get("input_ids")
        ids = named.get("inputs_embeds") if ids is None else ids
        if ids is None:
            raise ValueError("moe_mps::pipeline: input_ids must be given, got None")
        self.calls += 1
        self._inputs = ids, named.get("attention_mask")
        self._tokens = ids.shape[1]
        self._digest = ""
        self._arrived = None
        if self._rest is not None:
            self._rest -= self._tokens
        unused: tuple[str, ...] = () if self.stage.first else _FOR_TOWERS
        unused += () if self.stage.last else ("labels",)  # only the last process has logits
        return args, {name: value for name, value in kwargs.items() if name not in unused}

    def _before_layers(self, base: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Layers must get the same inputs in every process; only the first process has features of images."""
        arguments = {
            name for name, value in kwargs.items() if isinstance(value, Tensor | list | tuple | dict)
        }
        self._given = sorted(arguments - {"input_ids", "inputs_embeds"})

    def _call(self) -> str:
        """Digest of this call's arguments, computed while waiting for the device."""
        if not self._digest:
            state = hashlib.blake2b(" ".join(self._given).encode(), digest_size=8)
            for tensor in self._inputs:
                if isinstance(tensor, Tensor):
                    host = on_the_host(tensor)
                    state.update(f"{host.dtype} {[*host.shape]}".encode())
                    state.update(host.view(-1).view(torch.uint8).numpy().data)
            self._digest = f"{self.calls} {state.hexdigest()}"
        return self._digest

    def _limit(self, stages: int) -> float:
        """Seconds that this many stages may take for the tokens of this call."""
        return self.peers.timeouts.decoding * math.ceil(self._tokens / _TOKENS) * max(1, stages)

    def _send(self, layer: Any, args: tuple, output: Any) -> None:
        results = [*output] if isinstance(output, tuple) else [output]
        wanted = self.stage.loop.results or 1
        if len(results) != wanted or not all(r is None or isinstance(r, Tensor) for r in results):
            self._fail("what a layer returns", f"{wanted} tensors", [type(r).__name__ for r in results])
        self._sent = results
        if self._as_input is None:
            self.send(results)

    def send(self, results: list[Tensor | None]) -> None:
        """Sends what the last layer here has returned."""
        if not self.stage.last:
            self.peers.send(self.peers.rank + 1, "hidden states", self._call(), results, self._limit(1))

    def _receive(self, device: torch.device) -> list[Tensor | None]:
        self._device = device
        if self._arrived is None:
            rank = self.peers.rank
            with _disable_current_modes():
                tensors = self.peers.receive(rank - 1, "hidden states", self._call(), self._limit(rank))
                self._arrived = [None if t is None else t.to(device) for t in tensors]
        if self._as_input is None:
            return self._arrived
        return [None if t is None else self._as_input(t) for t in self._arrived]

    # Captured tokens: see capture.exchange.Exchange

    def record(
        self, run: Callable[[], Any], as_input: Callable[[Tensor], Tensor]
    ) -> tuple[Any, list[Tensor | None], Handover]:
        self._as_input, self._sent, self._device = as_input, [], None
        try:
            result = run()
        finally:
            self._as_input = None
        present = [t is not None for t in self._arrived or []]
        sent, self._sent = self._sent, []
        return result, [] if self.stage.last else sent, Handover(self._given, self._device, present)

    def arriving(self, handover: Handover) -> list[Tensor] | None:
        self._given = handover.given
        if handover.device is None:
            return []
        tensors = self._receive(handover.device)
        alike = [t is not None for t in tensors] == handover.present
        return [t for t in tensors if t is not None] if alike else None

    def _after(self, model: Any, args: tuple, output: Any) -> Any:
        if not hasattr(output, "logits"):
            self._fail("return_dict", "True", False)
        if self._rest:
            return output  # nobody reads logits of a chunk in the middle of a prompt
        if self.stage.last:
            if self._samples:
                pass  # `_DecidedByTheLast` tells what is chosen
            elif self._greedy:
                self._tell_others("tokens", [output.logits[:, -1].argmax(-1), None])
            else:
                self._tell_others("logits", [output.logits, getattr(output, "loss", None)])
            return output
        last, kind = self.peers.size - 1, "tokens" if self._samples or self._greedy else "logits"
        limit = self._limit(last - self.peers.rank)
        first, second = self.peers.receive(last, kind, self._call(), limit)
        assert first is not None
        if kind == "tokens":
            self._done = second
            logits = first.new_full((len(first), 1, self.stage.vocabulary), _NEVER, dtype=torch.float32)
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
        self._ended, self._arrived = self.calls, None

    def _tell_others(self, kind: str, tensors: list[Tensor | None]) -> None:
        """Returns once all have it: what has not been sent when this process ends is lost."""
        others = range(self.peers.size - 1)
        for rank in others:
            self.peers.send(rank, kind, self._call(), tensors)
        for rank in others:
            self.peers.flush(rank)

    def _fail(self, argument: str, expected: str, got: Any) -> Any:
        raise ValueError(f"moe_mps::pipeline: {argument} must be {expected}, got {got!r}")

    @contextlib.contextmanager
    def greedy(self) -> Iterator[None]:
        """Inside the block, calls give only the likeliest next token: all other logits are very low."""
        self._greedy = True
        try:
            yield
        finally:
            self._greedy = False

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Inside the block, calls are pieces of a prompt whose logits nobody reads: none are sent."""
        self._rest = sys.maxsize
        try:
            yield
        finally:
            self._rest = None

    # generate

    def generate(self, *args: Any, by: Any = None, **kwargs: Any) -> Any:
        """Result of the model's `generate`, or its stand-in's; failures are sent to the other processes."""
        if self._leads:
            return self._lead(*args, **kwargs)
        config = kwargs.get("generation_config") or self.model.generation_config

        def given(name: str) -> Any:
            value = kwargs.get(name)
            return getattr(config, name, None) if value is None else value

        beams = (given("num_beams") or 1) > 1 or (given("guidance_scale") or 1) != 1
        if not beams and not any(map(given, _NEED_LOGITS)):
            kwargs["custom_generate"] = self._sample
            self._streamer = kwargs.get("streamer")  # transformers gives it to its own functions only
        calls = self.calls
        try:
            by = self.model if by is None else by
            return type(by).generate(by, *args, **kwargs)
        except BaseException as error:
            if self.calls > calls or isinstance(error, PeerError):
                self.peers.failed(error)
            raise  # every process refuses the same arguments

    def _sample(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        self._samples = True
        if not self.stage.last:  # its logits are all made up; the last process has chosen the token
            logits_processor = LogitsProcessorList()
        vars(model)["_prefill"] = self._prefill
        try:
            return type(model)._sample(
                model,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=_DecidedByTheLast(stopping_criteria, self),
                generation_config=generation_config,
                synced_gpus=synced_gpus,
                streamer=self._streamer,
                **model_kwargs,
            )
        finally:
            self._samples = False
            del vars(model)["_prefill"]

    def _prefill(self, input_ids: Tensor, generation_config: Any, model_kwargs: dict, **kwargs: Any) -> Any:
        """Reads a prompt in chunks: a process starts the next one as soon as it has sent one."""
        if generation_config.prefill_chunk_size is not None:
            cache, mask = cache_among(model_kwargs), model_kwargs.get("attention_mask")
            before = 0 if cache is None else int(cache.get_seq_length())
            known = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
            tokens = input_ids.shape[1]
            self._rest = tokens - before if known == tokens else tokens
        try:
            return type(self.model)._prefill(self.model, input_ids, generation_config, model_kwargs, **kwargs)
        finally:
            self._rest = None

    # One process leads, the others follow

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Inside the block, `generate` in the first process makes processes in `follow` generate the same."""
        self._leads = True
        try:
            yield
        finally:
            self._leads = False
            with contextlib.suppress(PeerError):
                self._request({"end": True}, {})
                for rank in range(1, self.peers.size):
                    self.peers.flush(rank)  # this process may end now

    def _lead(self, *args: Any, streamer: Any = None, tokenizer: Any = None, **kwargs: Any) -> Any:
        arguments = dict(zip(("inputs", "generation_config"), args, strict=False)) | kwargs
        arguments = {name: value for name, value in arguments.items() if value is not None}
        config = arguments.pop("generation_config", None)
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        options = {name: value for name, value in arguments.items() if name not in tensors}
        for name, value in options.items():
            if not isinstance(value, str | int | float | bool):
                self._fail(name, "a tensor or a number, which other processes can be told", value)
        seed = int(torch.randint(1 << 31, ()))  # all processes draw the same
        told = {"options": options, "config": None if config is None else config.to_dict(), "seed": seed}
        prompts = getattr(self.answering, "prompts", None)
        told["kept"] = [kept.number for kept in prompts.kept] if prompts else []
        self._request(told, tensors)
        patient = None if streamer is None else _Patient(streamer)
        self._leads = False
        try:
            result = self._answer(seed, generation_config=config, streamer=patient, **tensors, **options)
        finally:
            self._leads = True
        if patient is not None and patient.error is not None:
            raise patient.error
        return result

    def _request(self, told: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        text = as_octets({**told, "tensors": [*tensors]})
        for rank in range(1, self.peers.size):
            self.peers.send(rank, "request", "", [text, *tensors.values()])

    def follow(self) -> None:
        """Generates what the first process generates within `leading`, until that ends."""
        while True:
            text, *values = self.peers.receive(0, "request", "", _FOREVER)
            told = from_octets(text)
            if told.get("end"):
                return
            config = told["config"] and GenerationConfig.from_dict(told["config"])
            tensors = {
                name: value.to(self.model.device)
                for name, value in zip(told["tensors"], values, strict=True)
                if value is not None
            }
            if prompts := getattr(self.answering, "prompts", None):  # the first process has given up others
                prompts.kept = [kept for kept in prompts.kept if kept.number in told["kept"]]
            with contextlib.suppress(ValueError, TypeError):  # the first process has it, too, and tells
                self._answer(told["seed"], generation_config=config, **tensors, **told["options"])

    def _answer(self, seed: int, **given: Any) -> Any:
        with Seeded(self.model.device, seed):
            return (self.answering or self).generate(**given)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("moe_mps::pipeline: continuous batching must be in one process, got a pipeline")

    def _refuse_saving(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("moe_mps::pipeline: a model must be whole to be saved, got one stage of a pipeline")


class _Patient:
    """A streamer whose error ends nothing, since the other processes go on: it is raised at the end."""

    def __init__(self, streamer: Any):
        self.streamer = streamer
        self.error: BaseException | None = None

    def put(self, value: Any) -> None:
        self._try(self.streamer.put, value)

    def end(self) -> None:
        self._try(self.streamer.end)

    def _try(self, function: Any, *args: Any) -> None:
        if self.error is None:
            try:
                function(*args)
            except BaseException as error:
                self.error = error


class _DecidedByTheLast(StoppingCriteriaList):
    """Stopping criteria that the last process evaluates for all; it sends the tokens that it sampled."""

    def __init__(self, criteria: Any, running: Running):
        super().__init__(criteria)
        self.running = running

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        running = self.running
        if running.stage.last:
            done = super().__call__(input_ids, scores, **kwargs)
            running._tell_others("tokens", [input_ids[:, -1], done])
            return done
        assert running._done is not None
        return running._done.to(input_ids.device)
