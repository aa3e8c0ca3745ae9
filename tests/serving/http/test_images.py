"""Images in generate and serve: answers are transformers' own, and no image is computed twice."""

import hashlib
import threading

import pytest
import torch
import transformers
from support import tiny_models
from support.images import as_url, picture, write_llava
from support.jobs import Asked, answer_of, ids_of, run
from support.serving import client_of
from transformers import DynamicCache

import torch_moe_mps
from torch_moe_mps.commands import main
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.engine.inputs import images_of
from torch_moe_mps.serving.prefix_cache.memory import CachedPrefix, Images, PrefixCache


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "model"
    write_llava(folder)
    return folder


@pytest.fixture(scope="module")
def own(checkpoint):
    """transformers' answer to a text with pictures in it."""
    model = transformers.LlavaForConditionalGeneration.from_pretrained(checkpoint)
    processor = transformers.AutoProcessor.from_pretrained(checkpoint)

    def answer(text: str, *images, tokens: int = 6) -> str:
        inputs = processor(text=text, images=[*images] or None, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        return processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return answer


@pytest.fixture
def seen(monkeypatch):
    """How many images each call of the tower gets."""
    counts, forward = [], transformers.CLIPVisionModel.forward

    def counted(self, pixel_values, *args, **kwargs):
        counts.append(len(pixel_values))
        return forward(self, pixel_values, *args, **kwargs)

    monkeypatch.setattr(transformers.CLIPVisionModel, "forward", counted)
    return counts


def test_generate(checkpoint, own, tmp_path, capsys, refused):
    """With one image and with two; what is no image is named."""
    files = [tmp_path / f"{seed}.png" for seed in range(2)]
    for seed, file in enumerate(files):
        picture(seed).save(file)
    call = ["generate", str(checkpoint), "-p", "what", "--max-tokens", "6", "--device", "cpu"]
    capsys.readouterr()
    assert main([*call, "--image", str(files[0])]) == 0
    out, err = capsys.readouterr()
    assert out == own("<image>what", picture(0)) + "\n" and "8 tokens of prompt in " in err
    assert main([*call, "--image", str(files[0]), "--image", str(files[1])]) == 0
    out, err = capsys.readouterr()
    assert out == own("<image><image>what", picture(0), picture(1)) + "\n"
    (tmp_path / "text.png").write_text("no picture")
    error = refused(*call, "--image", tmp_path / "text.png", progress=True)
    assert "cannot identify image file" in error
    error = refused(*call, "--image", files[0], "--raw", progress=True)
    assert "--image needs the chat template, got --raw" in error


def test_serve(checkpoint, own, seen, monkeypatch):
    """A conversation about an image computes it once; another image with the same text is another prompt.

    Pixels are hashed while a request is read, not on the thread that computes.
    """

    hashing, own_hash = [], hashlib.blake2b

    def blake2b(*given, **named):
        hashing.append(threading.current_thread().name)
        return own_hash(*given, **named)

    monkeypatch.setattr(hashlib, "blake2b", blake2b)

    def ask(client, chat: list, *content) -> str:
        chat.append({"role": "user", "content": [*content]})
        answer = client.chat.completions.create(
            model=str(checkpoint), messages=chat, temperature=0, max_tokens=6
        )
        said = answer.choices[0].message.content
        chat.append({"role": "assistant", "content": said.replace(" ", "")})
        return said

    def text(words: str) -> dict:
        return {"type": "text", "text": words}

    def image(seed: int) -> dict:
        return {"type": "image_url", "image_url": {"url": as_url(picture(seed))}}

    with client_of(checkpoint, "--parallel", 2) as client:
        said, other = [], []
        first = ask(client, said, image(0), text("what"))
        second = ask(client, said, text("more"))
        assert seen == [1]
        foreign = ask(client, other, image(1), text("what"))
        assert seen == [1, 1]
        plain = ask(client, [], text("what"))
        third = ask(client, said, text("again"))
        assert seen == [1, 1]
    assert hashing and all(name.startswith("reader") for name in hashing)
    assert first == own("<image>what", picture(0)) and foreign == own("<image>what", picture(1)) != first
    assert plain == own("what")
    so_far = "<image>what" + first.replace(" ", "") + "more"
    assert second == own(so_far, picture(0))
    assert third == own(so_far + second.replace(" ", "") + "again", picture(0))


@pytest.mark.parametrize(
    ("ids", "digest", "tokens"),
    [
        ([5, 1, 1, 7, 1, 1, 8, 9], "a", 7),
        ([5, 1, 1, 7, 1, 1, 6, 9], "a", 6),
        ([5, 1, 1, 6, 1, 1, 8, 9], "a", 0),
        ([5, 1, 1, 7, 1, 1, 8, 9], "b", 0),
        ([5, 1, 1, 7, 1, 1, 8, 9], None, 1),
    ],
)
def test_a_kept_prompt_is_of_use_for_all_of_its_images(ids, digest, tokens):
    """With the same text between them; a prompt without images has what comes before the first."""
    kept = CachedPrefix(torch.tensor([5, 1, 1, 7, 1, 1, 8]), DynamicCache(), images=Images("a", 1, 6))
    images = None if digest is None else Images(digest, 1, 6)
    assert kept.usable(torch.tensor(ids), images) == tokens


def test_positions_behind_an_image():
    """In a model where an image takes fewer positions than tokens; its answers are those of one prompt."""
    cls = transformers.Qwen3VLMoeForConditionalGeneration
    config = tiny_models.build_config(cls.config_class)
    config.image_token_id, config.vision_start_token_id, config.vision_end_token_id = 10, 11, 12
    torch.manual_seed(0)
    model = cls(config).eval()
    merge, patch = config.vision_config.spatial_merge_size, config.vision_config.patch_size
    grid = torch.tensor([[1, 2 * merge, 2 * merge]])
    shape = (int(grid.prod()), 3 * config.vision_config.temporal_patch_size * patch**2)
    pixels, calls = torch.randn(shape), []
    model.model.visual.register_forward_hook(lambda *_: calls.append(1))
    image = [config.vision_start_token_id, *[config.image_token_id] * 4, config.vision_end_token_id]
    ids = torch.tensor([[5, 6, 7, *image, 8, 9]])

    def given(ids: torch.Tensor) -> dict:
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": pixels,
            "image_grid_thw": grid,
            "mm_token_type_ids": (ids == config.image_token_id).long(),
            "max_new_tokens": 5,
            "do_sample": False,
        }

    prefixes = PrefixCache(1 << 30)
    for turn in range(3):
        model.model.rope_deltas = None
        expected = model.generate(**given(ids))
        del calls[:]
        more = {name: value for name, value in given(ids).items() if isinstance(value, torch.Tensor)}
        more.pop("input_ids")
        assert answer_of(model, prefixes, ids, 5, **more) == expected[0, ids.shape[1] :].tolist()
        assert len(calls) == (turn == 0)
        ids = torch.cat([expected, torch.tensor([[3, 4]])], 1)
    assert images_of(model, given(ids)) != images_of(model, given(ids) | {"pixel_values": pixels + 1})
    assert (images_of(model, given(ids)).start, images_of(model, given(ids)).end) == (4, 8)


# Sizes of an encoder of sound.
SOUND = {
    "d_model": 32,
    "downsample_hidden_size": 16,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "encoder_layers": 2,
    "output_dim": 32,
}


def test_sound_of_qwen3_omni():
    """Sounds of several prompts in one batch, by the part of the model that the server runs."""
    cls = transformers.Qwen3OmniMoeThinkerForConditionalGeneration
    config = tiny_models.build_config(cls.config_class)
    config.audio_token_id, config.image_token_id, config.video_token_id = 90, 92, 93
    config.vision_start_token_id = 91
    config.audio_config.update(SOUND)
    model = cls(config).eval()
    tiny_models.randomise(model, 0)
    torch_moe_mps.accelerate(model)
    sound, mask = torch.randn(1, config.audio_config.num_mel_bins, 60), torch.ones(1, 60, dtype=torch.long)
    asked = [Asked(torch.cat([ids_of(n, 5), torch.full((1, 8), 90), ids_of(n, 4)], 1), 6) for n in range(2)]
    for number, each in enumerate(asked):
        each.job.inputs |= {"input_features": sound * (1 + number), "feature_attention_mask": mask}
    run(Engine(model, None, 2), *asked)
    for each in asked:
        whole = model.generate(**each.job.inputs, generation_config=each.config)
        assert each.tokens == whole[0, each.job.inputs["input_ids"].shape[1] :].tolist()
    assert asked[0].tokens != asked[1].tokens
