"""What runs a packed model, on GGUF files that our rows read: each result is that of the class's eager code
with the values of the blocks."""

import copy
import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import peft
import pytest
import torch
from support.capturing import answer, assert_equal, without_capture
from support.gguf_models import small_model, text_state, write_model
from support.jobs import Asked, ids_of, run
from support.models import eager, output, prompt, stored
from support.sweep import in_sweep

import torch_moe_mps
from torch_moe_mps.commands import main
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache

# Latents; a recurrent state and attention; a shared expert of its own width; two ways to choose experts; a
# row of files that declare experts.
ROWS = [
    *("deepseek2", "qwen3next", "nemotron_h_moe"),
    *("glm4moe", "granitehybrid", "hunyuan-moe", "ernie4_5-moe", "llama4", "lfm2moe", "phimoe"),
    *("mimo2", "mistral4", "qwen3vlmoe", "step35", "llama:mixtral"),
]
EACH = pytest.mark.parametrize("architecture", in_sweep(ROWS, ("deepseek2", "qwen3next")))
KIND = "q8_0"
# mlx-lm has no class of the first, and reads sizes of the second that transformers 5 does not have.
NOT_IN_MLX = {
    "hunyuan-moe": "must be one of afmoe, ",
    "mimo2": "config must be that of the original checkpoint",
}
BIASES = ("e_score_correction_bias", "expert_bias")  # buffers of routers, which `fit` does not count


@functools.cache
def made(architecture: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    with TemporaryDirectory() as folder:
        return of_files(Path(folder), architecture)


def of_files(folder: Path, architecture: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The packed model of a file, and transformers' model with the values of its blocks."""
    written = small_model(architecture)
    path = write_model(folder / "model.gguf", architecture, written, KIND)
    values = write_model(folder / "values.gguf", architecture, written, KIND, packed=False)
    packed, read = (torch_moe_mps.from_pretrained(p, device_map="cpu", check=False) for p in (path, values))
    written.load_state_dict({**written.state_dict(), **text_state(read)})
    return packed, eager(written)


def both(architecture: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    return tuple(copy.deepcopy(model) for model in made(architecture))


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.slow("answers of three models, one of which is captured twice")
@EACH
@torch.no_grad()
def test_captured_tokens_of_one_sequence_and_of_two(architecture):
    """Equal to those module by module, which are close to the eager ones."""
    packed, dense = both(architecture)
    plain = without_capture(copy.deepcopy(packed))
    for padding in (0, 3):
        found = answer(packed, "cpu", padding)
        assert_equal(found, answer(plain, "cpu", padding))
        for ours, theirs in zip(found, answer(dense, "cpu", padding), strict=True):
            close(ours, theirs)


@EACH
@torch.no_grad()
def test_prompts_in_a_batch_and_behind_a_kept_one(architecture):
    packed, dense = both(architecture)
    engine = Engine(packed, PrefixCache(1 << 30), 2)
    first, second = Asked(ids_of(1, 20), 5), Asked(ids_of(2, 7), 5)
    run(engine, first, second)
    ids = torch.cat((first.job.inputs["input_ids"], torch.tensor([first.tokens]), ids_of(3, 3)), 1)
    again = Asked(ids, 4)
    run(engine, again)
    assert again.job.usage.cached_tokens >= 20
    for asked in (first, second, again):
        ids = asked.job.inputs["input_ids"]
        shown = {"attention_mask": torch.ones_like(ids)}  # the token of padding is one as any other here
        expected = dense.generate(ids, generation_config=asked.config, **shown)
        assert asked.tokens == expected[0, ids.shape[1] :].tolist()


@pytest.mark.slow("two checkpoints are written and read")
@EACH
def test_converted_to_ours_and_to_mlx(architecture, tmp_path, capsys):
    written = small_model(architecture)
    path = write_model(tmp_path / "model.gguf", architecture, written, KIND)
    _, dense = both(architecture)
    assert main(["fit", str(path), "--json", str(tmp_path / "fit.json")]) == 0
    (size, *_) = json.loads((tmp_path / "fit.json").read_text())["sizes"]
    loaded = torch_moe_mps.from_pretrained(path, device_map="cpu", check=False, dtype=torch.bfloat16)
    biases = sum(bias.nbytes for name, bias in loaded.named_buffers() if name.endswith(BIASES))
    assert size["bytes"] == sum(tensor.nbytes for tensor in stored(loaded)) - biases
    assert "as it is" in capsys.readouterr().out
    ours = str(tmp_path / "ours")
    assert main(["convert", str(path), ours, "--dtype", "float32"]) == 0
    ids = prompt(1)
    close(output(torch_moe_mps.from_pretrained(ours, check=False), ids), output(dense, ids))
    mlx = str(tmp_path / "mlx")
    if architecture in NOT_IN_MLX:
        assert main(["convert", str(path), mlx, "--to", "mlx", "--bits", "8"]) == 1
        assert NOT_IN_MLX[architecture] in capsys.readouterr().err
        return
    if architecture == "ernie4_5-moe":  # mlx-lm ignores its router's correction, and a warning says so
        dense.model.layers[1].mlp.gate.moe_statics.e_score_correction_bias.detach().zero_()
    recipe = ["--to", "mlx", "--bits", "8", "--group-size", "32", "--dtype", "float32"]
    assert main(["convert", str(path), mlx, *recipe]) == 0
    torch_moe_mps.accelerate(dense, 8, 32, linear_bits=8)
    close(output(torch_moe_mps.from_pretrained(mlx, check=False), ids), output(dense, ids))


@EACH
def test_adapters_of_packed_experts(architecture):
    """Logits and gradients, as PEFT computes them on the dense model."""
    packed, dense = both(architecture)
    ends = ("q_proj", "o_proj", "q_b_proj")  # by full names, for a tower has some of them
    names = [name for name, _ in packed.named_modules() if name.rpartition(".")[2] in ends]
    found = []
    for model in (packed, dense):
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=4,
            init_lora_weights=False,
            target_modules=names,
            target_parameters=["experts.down_proj"],
        )
        adapted = peft.get_peft_model(model, config).eval()
        logits = adapted(input_ids=prompt(1)).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), prompt(1).flatten()).backward()
        gradients = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
        found.append((logits.detach(), gradients))
    (ours, of_ours), (theirs, of_theirs) = found
    close(ours, theirs)
    assert of_ours.keys() == of_theirs.keys() and any("experts" in name for name in of_ours)
    for name, gradient in of_theirs.items():
        assert (of_ours[name] - gradient).norm() <= 1e-4 * gradient.norm(), name
