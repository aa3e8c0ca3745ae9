"""Images of a prompt that are encoded beside other answers, which go on meanwhile."""

import copy
import itertools
import threading

import pytest
import torch
import transformers
from support import images, tiny_models
from support.jobs import Asked, run
from support.sweep import in_sweep
from support.threads import in_threads
from torch.nn.modules import module as torch_module
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionBlock

import torch_moe_mps
from torch_moe_mps.serving.engine import engine as engines
from torch_moe_mps.serving.engine.encoder_hook import EncoderHook
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache


def llava():
    """A model, inputs with six images, and the class of its encoder's layers."""
    model, ids = images.llava(layers=3), torch.tensor([[5, *[27] * 24, 6]])
    return model, {"input_ids": ids, "pixel_values": torch.randn(6, 3, 16, 16)}, CLIPEncoderLayer


def qwen():
    """The same of a model that turns positions behind an image."""
    cls = transformers.Qwen3VLMoeForConditionalGeneration
    config = tiny_models.build_config(cls.config_class)
    config.image_token_id, config.vision_start_token_id, config.vision_end_token_id = 10, 11, 12
    vision = config.vision_config
    vision.depth, vision.deepstack_visual_indexes = 2, [0]
    torch.manual_seed(0)
    model = cls(config).eval()
    merge = vision.spatial_merge_size
    grid = torch.tensor([[1, 2 * merge, 2 * merge]] * 2)
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * vision.temporal_patch_size * vision.patch_size**2)
    ids = torch.tensor([[5, 11, *[10] * 4, 12, 6, 11, *[10] * 4, 12, 7]])
    kinds = (ids == 10).long()
    inputs = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}
    return model, inputs, Qwen3VLMoeVisionBlock


class Beside:
    """An answer that is generated while images are encoded: what happened, in order."""

    def __init__(self, made, monkeypatch, device="cpu"):
        self.own, self.inputs, layer = made()
        model = copy.deepcopy(self.own).to(device)
        torch_moe_mps.accelerate(model)
        monkeypatch.setattr(engines, "STEPS", 0)
        self.events, forward = [], layer.forward

        def forward_noted(*given, **named):
            self.events.append("layer")
            return forward(*given, **named)

        monkeypatch.setattr(layer, "forward", forward_noted)
        self.does = lambda: False
        self.victim = Asked(torch.tensor([[3, 4, 5]]), 50, self.taken)
        self.batch = Engine(model, PrefixCache(1 << 30), 4)
        self.batch.submit(self.victim.job)
        while len(self.victim.tokens) < 2:
            self.batch.step()
        del self.events[:]

    def taken(self, token: int) -> bool:
        self.events.append("token")
        return self.does()

    def seeing(self) -> Asked:
        asked = Asked(self.inputs["input_ids"], 4)
        asked.job.inputs = dict(self.inputs)
        return asked

    def expected(self, asked: Asked) -> list[int]:
        """transformers' own answer."""
        model, ids = copy.deepcopy(self.own), asked.job.inputs["input_ids"]
        answer = model.generate(**asked.job.inputs, generation_config=asked.config)
        return answer[0, ids.shape[1] :].tolist()


def check_others_go_on(beside: Beside) -> None:
    seeing = beside.seeing()
    run(beside.batch, seeing)
    events = "".join(name[0] for name in beside.events)
    assert events.count("l") > 1 and "ll" not in events
    assert not torch_module._global_forward_pre_hooks
    assert seeing.tokens == beside.expected(seeing)
    assert beside.victim.tokens == beside.expected(beside.victim)


@pytest.mark.parametrize("made", [llava, qwen])
def test_others_go_on_between_the_layers_of_an_encoder(made, monkeypatch):
    """All images are encoded together: no two layers of the encoder come without a token between them."""
    check_others_go_on(Beside(made, monkeypatch))


@pytest.mark.slow("a model in the simulator")
@pytest.mark.parametrize("made", in_sweep([llava, qwen], [qwen]))
def test_so_they_do_on_the_gpu(made, monkeypatch, simulated):
    """Where the host reads a token behind the next one."""
    check_others_go_on(Beside(made, monkeypatch, "mps"))


def test_nobody_waits_for_images_alone(monkeypatch):
    """Without another answer they are encoded at once."""
    beside = Beside(llava, monkeypatch)
    beside.does = lambda: True
    beside.batch.step()
    del beside.events[:]
    seeing = beside.seeing()
    run(beside.batch, seeing)
    assert {*beside.events} == {"layer"} and seeing.tokens == beside.expected(seeing)


@pytest.mark.parametrize("ends", ["cancelled", "error"])
def test_an_encoder_stops_where_its_answer_ends(monkeypatch, ends):
    """Cancelled between two layers, or with all that a step ends; nothing of it is kept for the next."""
    beside = Beside(llava, monkeypatch)
    seeing, again = beside.seeing(), beside.seeing()
    error = RuntimeError("of a step")

    def does() -> bool:
        if beside.events[-2:] == ["layer", "token"]:
            if ends == "error":
                monkeypatch.setattr(beside.batch.decoding, "_step", fails)
            else:
                seeing.job.cancel()
        return False

    def fails(*given) -> None:
        monkeypatch.undo()
        raise error

    beside.does = does
    run(beside.batch, seeing)
    layers = [*itertools.takewhile(lambda name: name == "layer", reversed(beside.events))]
    assert beside.events.count("layer") == 1 and not layers
    assert seeing.reasons == ["cancelled" if ends == "cancelled" else error] and not seeing.tokens
    assert beside.victim.reasons == (["length"] if ends == "cancelled" else [error])
    run(beside.batch, again)
    assert again.tokens == beside.expected(again)
    assert not torch_module._global_forward_pre_hooks


@torch.no_grad()
def test_what_other_threads_encode_is_theirs():
    model, inputs, _ = llava()
    calls = []

    def encode() -> None:
        model.model.vision_tower(inputs["pixel_values"])

    with EncoderHook(model).calling(lambda: calls.append(threading.current_thread())):
        in_threads(encode)
        assert not calls
        encode()
    assert calls and {*calls} == {threading.current_thread()}
