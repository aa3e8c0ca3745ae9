"""A repository of the Hub's kernels: `kernels` loads it, and its layers do what transformers' code does."""

import runpy
from pathlib import Path

import kernels
import pytest
import torch
from kernels._rust import Digest, DigestAlgorithm, Metadata
from kernels.layer.layer import _create_func_module, _validate_layer
from support.processes import REPOSITORY, python
from support.shader_calls import Library
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next


def build(destination: Path, **settings) -> Path:
    path = REPOSITORY / "scripts" / "make" / "build_hub_kernels.py"
    return runpy.run_path(str(path))["build"](destination, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """For the CPU in place of Metal, which is all that differs."""
    destination = tmp_path_factory.mktemp("hub")
    build(destination, backend="cpu")
    return destination


@pytest.fixture
def layers(folder, monkeypatch, simulated):
    monkeypatch.setattr(torch.mps, "compile_shader", Library)
    return kernels.get_local_kernel(folder, backend="cpu").layers


def test_metadata_has_the_hashes_that_the_hub_checks(tmp_path):
    built = build(tmp_path, version=3)
    metadata = Metadata.read_from_file(built / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, built))
    assert built.name == "torch-metal" and str(metadata.backend.backend_type) == "metal"
    assert metadata.version == 3 and metadata.python_depends == []
    assert '#include "' not in "".join(file.read_text() for file in built.rglob("*.metal"))
    with pytest.raises(FileExistsError):
        build(tmp_path, version=3)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(found, expected, dtype=torch.float32) -> None:
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution(layers, dtype):
    """Of a prompt, and of tokens behind a state, which moves on."""
    x, weight, bias = (random(*shape, dtype=dtype) for shape in ((2, 70, 9), (70, 4), (70,)))
    close(
        layers.causal_conv1d_fn()(x, weight, bias, activation="silu", seq_idx=None),
        qwen3_next.causal_conv1d_fn(x, weight, bias, activation="silu"),
        dtype,
    )
    for tokens in (1, 3):
        states = [random(2, 70, 4, dtype=dtype) for _ in range(2)]
        asked = x.transpose(1, 2).contiguous().transpose(1, 2)[:, :, :tokens]
        found = layers.causal_conv1d_update()(asked, states[0], weight)
        close(found, qwen3_next.causal_conv1d_update(asked, states[1], weight), dtype)
        assert torch.equal(*states)
    with pytest.raises(ValueError, match="activation must be silu, swish or None, got gelu"):
        layers.causal_conv1d_fn()(x, weight, None, "gelu")


@pytest.mark.parametrize("kind", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize(("key_heads", "width"), [(2, 24), (4, 80)])
def test_gated_delta_rule(layers, kind, key_heads, width):
    """Key heads that several heads share, and a state that is given and not changed."""
    own = {
        "chunk": qwen3_next.torch_chunk_gated_delta_rule,
        "fused_recurrent": qwen3_next.torch_recurrent_gated_delta_rule,
    }[kind]
    q, k = random(2, 9, key_heads, width), random(2, 9, key_heads, width)
    v, beta, g = random(2, 9, 4, 20), random(2, 9, 4).sigmoid(), -random(2, 9, 4).abs()
    state = random(2, 4, width, 20)
    given = {"initial_state": state.clone(), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    found, after = getattr(layers, f"{kind}_gated_delta_rule")()(q, k, v, g, beta, **given)
    expected, expected_after = own(q, k, v, g, beta, **given | {"initial_state": state.clone()})
    close(found, expected)
    close(after, expected_after)
    assert torch.equal(given["initial_state"], state)
    assert getattr(layers, f"{kind}_gated_delta_rule")()(q, k, v, g, beta)[1] is None


@pytest.mark.parametrize("kind", ["chunk", "fused_recurrent"])
def test_kimi_delta_attention(layers, kind):
    own = {"chunk": kimi.chunk_kimi_delta_attention, "fused_recurrent": kimi.recurrent_kimi_delta_attention}[
        kind
    ]
    q, k, v = (random(1, 7, 3, 32) for _ in range(3))
    g, beta = -random(1, 7, 3, 32).abs(), random(1, 7, 3).sigmoid()
    given = {"initial_state": None, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    found, after = getattr(layers, f"{kind}_kda")()(q, k, v, g, beta, **given)
    expected, expected_after = own(q, k, v, g, beta, **given)
    close(found, expected)
    close(after, expected_after)


@pytest.mark.parametrize("own", [qwen3_next.Qwen3NextRMSNormGated, kimi.KimiLinearRMSNormGated])
@pytest.mark.parametrize("width", [40, 6])
def test_gated_norm(layers, own, width):
    """In place of the forward, as `kernels` puts it: with the module's own weight, and both activations."""
    module = own(width)
    torch.nn.init.normal_(module.weight)
    x, gate = random(2, 5, width), random(2, 5, width + 1)[..., :width]
    with torch.no_grad():
        close(layers.RMSNormGated.forward(module, x, gate), module(x, gate))


@pytest.mark.parametrize("turning", [16, 8])
def test_rotary_embedding(layers, turning):
    """All of a head, or its first elements; heads in front of tokens, and behind."""
    q, k = random(2, 5, 4, 16).transpose(1, 2), random(2, 2, 5, 16)
    cos, sin = random(1, 5, turning), random(1, 5, turning) / 2
    for dim in (1, 2):
        given = [x if dim == 1 else x.transpose(1, 2) for x in (q, k)]
        found = layers.apply_rotary_transformers()(*given, cos, sin, unsqueeze_dim=dim)
        turned = qwen3.apply_rotary_pos_emb(*(x[..., :turning] for x in given), cos, sin, unsqueeze_dim=dim)
        for result, part, x in zip(found, turned, given, strict=True):
            close(result, torch.cat([part, x[..., turning:]], -1))


def test_signatures_are_those_that_kernels_asks_for(layers):
    replaced = {
        "causal_conv1d_fn": qwen3_next.causal_conv1d_fn,
        "causal_conv1d_update": qwen3_next.causal_conv1d_update,
        "chunk_gated_delta_rule": qwen3_next.torch_chunk_gated_delta_rule,
        "fused_recurrent_gated_delta_rule": qwen3_next.torch_recurrent_gated_delta_rule,
        "chunk_kda": kimi.chunk_kimi_delta_attention,
        "fused_recurrent_kda": kimi.recurrent_kimi_delta_attention,
        "apply_rotary_transformers": qwen3.apply_rotary_pos_emb,
    }
    modules = {name: _create_func_module(own) for name, own in replaced.items()}
    for name, module in (modules | {"RMSNormGated": qwen3_next.Qwen3NextRMSNormGated}).items():
        _validate_layer(check_cls=module, cls=getattr(layers, name), repo=name)


@pytest.mark.sweep
def test_a_model_takes_the_folder_from_a_kernel_config(tmp_path):
    """As docs/hub_kernels.md has it, on mps, with the folder for Metal as it is published."""
    build(tmp_path / "hub")
    source = """
        import importlib.metadata, sys
        own = importlib.metadata.version  # transformers asks for a kernels that is not out yet
        importlib.metadata.version = lambda name: "0.18.2" if name == "kernels" else own(name)
        from support import simulated
        simulated.install()
        import torch
        torch.version.cuda = None  # as on a Mac: kernels asks for CUDA first
        from support import shader_calls, tiny_models
        from support.models import prompt
        from transformers import AutoModelForCausalLM, KernelConfig

        launched = []
        class Library(shader_calls.Library):
            def __getattr__(self, name):
                launched.append(name)
                return super().__getattr__(name)
        torch.mps.compile_shader = Library
        hub, folder = sys.argv[1:]
        tiny_models.tiny_model("qwen3_next").save_pretrained(folder)
        names = (
            "causal_conv1d_fn",
            "causal_conv1d_update",
            "chunk_gated_delta_rule",
            "fused_recurrent_gated_delta_rule",
            "RMSNormGated",
        )
        config = KernelConfig({name: {"mps": f"{hub}:{name}"} for name in names}, use_local_kernel=True)
        model = AutoModelForCausalLM.from_pretrained(folder, device_map="mps")
        model.set_use_kernels(True, config)
        expected = AutoModelForCausalLM.from_pretrained(folder)
        given = {"max_new_tokens": 2, "output_logits": True, "return_dict_in_generate": True}
        found, own = (each.generate(prompt().to(each.device), **given) for each in (model, expected))
        assert torch.equal(found.sequences.cpu(), own.sequences)
        for logits, others in zip(found.logits, own.logits, strict=True):
            torch.testing.assert_close(logits.cpu(), others, atol=1e-5, rtol=1e-5)
        print(*sorted({*launched}))
    """
    launched = python(source, str(tmp_path / "hub"), str(tmp_path / "model")).splitlines()[-1]
    assert launched == "causal_conv1d_update delta_scan64 rms_norm_gated"
