"""The project that builds kernels for the Hub: `kernels` loads it, and its layers do what a model does."""

import ast
import base64
import hashlib
import json
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import kernels
import pytest
import simulator
import torch
from kernels._rust import Backend, Build, Digest, DigestAlgorithm, Metadata
from kernels.benchmark import Benchmark
from kernels.layer.layer import _create_func_module, _validate_layer
from packaging.version import Version
from support.ops import family
from support.processes import REPOSITORY, environment
from torch._subclasses import FakeTensorMode
from transformers.dependency_versions_table import deps
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.laguna import modeling_laguna as laguna
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.utils import is_kernels_available

import torch_moe_mps
from torch_moe_mps.ops import OPERATORS
from torch_moe_mps.ops._samples import copies, more_samples, packet, sample_arguments

UNIQUE = "_moe_mps_metal_1a2b3c4"  # as the builder names a build
REGISTRATION = """
    #pragma once
    #define TORCH_LIBRARY_EXPAND(NAME, MODULE) TORCH_LIBRARY(NAME, MODULE)
    #define REGISTER_EXTENSION(NAME)
"""
OPS = f"""
import torch
from pathlib import Path
torch.ops.load_library(str(next(Path(__file__).parent.glob("*.so"))))
ops = torch.ops.{UNIQUE}
def add_op_namespace_prefix(op_name):
    return f"{UNIQUE}::{{op_name}}"
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    path = REPOSITORY / "scripts" / "make" / "build_hub_kernels.py"
    return runpy.run_path(str(path))["build"](tmp_path_factory.mktemp("hub") / "project")


def test_the_settings_name_every_source(project):
    settings = tomllib.loads((project / "build.toml").read_text())
    assert settings["general"]["name"].replace("-", "_") == "moe_mps" and settings["general"]["edition"] == 5
    assert settings["general"]["backends"] == ["metal"]
    (kernel,) = settings["kernel"].values()
    assert kernel["backend"] == "metal" and kernel["depends"] == ["torch"]
    files = {str(f.relative_to(project)) for f in (project / "moe_mps_metal").rglob("*") if f.is_file()}
    # Of a kernel's list the builder gives headers and Metal files to its Metal compiler.
    assert all(name.endswith(".mm") for name in kernel["src"])
    assert {*kernel["src"], *settings["torch"]["src"]} == files | {"torch-ext/torch_binding.cpp"}
    host = {f.name for f in (REPOSITORY / "torch_moe_mps" / "csrc").rglob("*.mm")}
    assert {Path(name).name for name in files if name.endswith(".mm")} == host
    binding = (project / "torch-ext" / "torch_binding.cpp").read_text()
    assert "TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops)" in binding
    assert re.findall(r'ops\.def\(R"\((\w+)\(', binding) == sorted(OPERATORS)
    shipped = {f.suffix for f in (project / "torch-ext" / "moe_mps").rglob("*") if f.is_file()}
    assert shipped <= {f".{end}" for end in settings["torch"]["pyext"]}


def test_every_header_is_in_the_project(project):
    """Where the compiler looks for it: in the folder of the file that includes it, then in the kernel's."""
    settings, found = tomllib.loads((project / "build.toml").read_text()), 0
    folders = [
        project / folder for (kernel,) in [settings["kernel"].values()] for folder in kernel["include"]
    ]
    for file in (project / "moe_mps_metal").rglob("*"):
        named = re.findall(r'^#include "(.+)"', file.read_text(), re.MULTILINE) if file.is_file() else []
        missing = [
            name for name in named if not any((each / name).is_file() for each in (file.parent, *folders))
        ]
        assert missing == [], file.relative_to(project)
        found += len(named)
    assert found > 100


def test_kernels_reads_the_settings(project):
    """By its own parser, which refuses what it does not know. Alpha: version 0."""
    assert Build.open(project).general.backends == [Backend.Metal]
    text = (project / "build.toml").read_text()
    assert tomllib.loads(text)["general"]["version"] == 0
    (project / "build.toml").write_text(text + "\n[unknown]\n")
    try:
        with pytest.raises(ValueError, match="unknown"):
            Build.open(project)
    finally:
        (project / "build.toml").write_text(text)


def test_the_builder_is_locked(project):
    """flake.lock has each input that flake.nix and the builder name, by its hash."""
    lock = json.loads((project / "flake.lock").read_text())
    nodes, left = lock["nodes"], [lock["root"]]
    assert set(nodes[lock["root"]]["inputs"]) == {
        *re.findall(r"^    ([\w-]+)\.url = ", (project / "flake.nix").read_text(), re.MULTILINE)
    }
    seen = set()
    while left:
        seen.add(name := left.pop())
        left += [each for each in nodes[name].get("inputs", {}).values() if isinstance(each, str)]
        if name != lock["root"]:
            assert re.fullmatch(r"sha256-[\w+/]{43}=", nodes[name]["locked"]["narHash"]), name
            assert re.fullmatch(r"[0-9a-f]{40}", nodes[name]["locked"]["rev"]), name
    assert seen == {*nodes}


def test_transformers_asks_for_a_newer_kernels():
    """Than PyPI has: docs/hub_kernels.md names both, and goes when this fails."""
    least = re.search(r">=([\d.]+)", deps["kernels"])[1]
    page = " ".join((REPOSITORY / "docs" / "hub_kernels.md").read_text().split())
    assert f"asks for `kernels` {least} (the newest on PyPI is {kernels.__version__}" in page
    assert Version(kernels.__version__) < Version(least)


def test_python_is_of_3_9(project):
    """No syntax of later versions, no `strict`, and no union of types that is evaluated."""
    files = [
        file for folder in ("torch-ext", "tests", "benchmarks") for file in (project / folder).rglob("*.py")
    ]
    assert len(files) > 6
    for file in files:
        text = file.read_text()
        nodes = [*ast.walk(ast.parse(text, feature_version=(3, 9)))]
        later = "from __future__ import annotations" in text  # then no annotation is evaluated
        for node in nodes:
            types = (
                node.args[1:] if isinstance(node, ast.Call) and "isinstance" in ast.dump(node.func) else []
            )
            types += [] if later else [getattr(node, name, None) for name in ("annotation", "returns")]
            parts = [part for each in types if each is not None for part in ast.walk(each)]
            assert not any(isinstance(part, ast.BinOp) for part in parts), (file, node.lineno)
            assert not isinstance(node, ast.Match | ast.TryStar), (file, node.lineno)
        assert "strict=" not in text, file


@pytest.fixture(scope="module")
def sources(project, tmp_path_factory):
    """What the builder compiles, and the folders of its headers, with the builder's own."""
    headers = tmp_path_factory.mktemp("headers")
    (headers / "registration.h").write_text(REGISTRATION)
    files = [*sorted((project / "moe_mps_metal").rglob("*.mm")), project / "torch-ext/torch_binding.cpp"]
    return files, [project / "moe_mps_metal", headers]


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac compiles with its own tools")
def test_the_host_code_compiles_for_macos(sources):
    """As `scripts/macos/check_macos` compiles the package's, against torch's headers and libraries."""
    import macos

    files, include = sources
    flags = [f"-DTORCH_EXTENSION_NAME={UNIQUE}", *(f"-I{folder}" for folder in include)]
    result = macos.check(macos.DEFAULT, files, flags, units=2)
    assert result.faults == [] and result.files == len(files) and result.bound > 40, result


@pytest.fixture(scope="module")
def folder(project, sources, tmp_path_factory):
    """A build variant, compiled for the simulated device."""
    destination, (files, include) = tmp_path_factory.mktemp("built"), sources
    flags = [f"-DTORCH_EXTENSION_NAME={UNIQUE}"]
    library = simulator.extension(UNIQUE, files, include=include, flags=flags, units=3)
    variant = destination / "build" / "torch-metal"
    shutil.copytree(project / "torch-ext" / "moe_mps", variant)
    shutil.copyfile(library, variant / f"{UNIQUE}.so")
    (variant / "_ops.py").write_text(OPS)
    hashes = {
        str(f.relative_to(variant)): base64.b64encode(hashlib.sha256(f.read_bytes()).digest()).decode()
        for f in sorted(variant.rglob("*"))
        if f.is_file()
    }
    metadata = {
        **{"id": UNIQUE, "name": "moe-mps", "version": 0, "license": "BSD-3-Clause", "python-depends": []},
        **{"backend": {"type": "metal"}, "digest": {"algorithm": "sha256", "files": hashes}},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata))
    return destination


@pytest.fixture(scope="module")
def kernel(folder):
    return kernels.get_local_kernel(folder, backend="metal")


@pytest.fixture
def layers(kernel, simulated):
    return kernel.layers


@pytest.mark.sweep
def test_metadata_is_what_kernels_reads(folder):
    (variant,) = (folder / "build").iterdir()
    metadata = Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


@pytest.mark.sweep
def test_operators_have_a_namespace_of_their_own(kernel, simulated):
    """Beside the package's in one process, behind checks of their own."""
    ours, theirs = torch.ops.moe_mps, getattr(torch.ops, UNIQUE)
    logits = random(5, 16).to("mps")
    for found, expected in zip(
        kernel.moe_router_topk_softmax(logits, 4, norm_topk_prob=True),
        torch_moe_mps.ops.moe_router_topk_softmax(logits, 4, norm_topk_prob=True),
        strict=True,
    ):
        assert torch.equal(found.cpu(), expected.cpu())
    assert (
        str(ours.moe_gate.default._schema).partition("::")[2]
        == str(theirs.moe_gate.default._schema).partition("::")[2]
    )
    with pytest.raises(
        ValueError, match=r"moe_mps::fused_norm_add: norm_weight must be of shape \[H\] = \(64,\)"
    ):
        kernel.fused_norm_add(*(random(2, 64).to("mps"),) * 2, random(63).to("mps"), norm_eps=1e-6)
    with pytest.raises(ValueError, match="top_k must be between 1 and 16, the smaller of E and 64, got 17"):
        kernel.moe_router_topk_softmax(logits, 17, norm_topk_prob=True)
    x, scale = random(3, 64).to("mps"), random(8).abs().to("mps")
    gate = (x, random(8, 64).to("mps"), random(64).to("mps"), scale, 2)
    options = {"norm_eps": 1e-6, "renormalize_after_scale": True}
    both = (function(*gate, **options) for function in (kernel.moe_gate, torch_moe_mps.ops.moe_gate))
    for found, expected in zip(*both, strict=True):
        assert torch.equal(found.cpu(), expected.cpu())


@pytest.mark.sweep
def test_functions_refuse_what_the_packages_operators_refuse(kernel, simulated):
    """In the same words; and they return what they write."""

    def zeros(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device="mps")

    for name in sorted({*kernel.__all__} - {"layers"}):
        good = sample_arguments(name, "mps", torch.float32)
        wrong = [changes for _, changes in getattr(family(name), f"invalid_{name}", lambda _: [])(zeros)]
        for argument in packet(name).default._schema.arguments:
            value = good.get(argument.name)
            if str(argument.type) == "float":
                wrong.append({argument.name: 1e39})
            if argument.name.endswith("_"):
                wrong += [
                    {argument.name: value[:1].expand_as(value)},
                    {argument.name: good["expert_out"].flatten(0, -2)[: len(value)]},
                ]
            elif isinstance(value, torch.Tensor):
                wrong += [
                    {argument.name: value.to(torch.complex64)},
                    # A scalar may be one number; logits and ids may have any leading dimensions.
                    {
                        argument.name: value[None, None, None]
                        if argument.name == "scalar"
                        else value.flatten()[0]
                    },
                ]
        for changes in wrong:
            found, expected = (
                refusal(getattr(of, name), good | changes) for of in (kernel, torch_moe_mps.ops)
            )
            assert found == expected and expected is not None, (name, changes)
    residual, slots, weights = zeros(2, 64), random(2, 3, 64).to("mps"), random(2, 3).to("mps")
    assert kernel.weighted_sum_residual_stacked_(residual, slots, weights) is residual


@pytest.mark.sweep
def test_fake_operators_have_the_shapes_of_results(kernel, simulated):
    """And torch.compile takes them whole."""
    functions = {name: getattr(kernel.operators, name) for name in vars(kernel.operators)["DECLARED"]}
    for name, function in functions.items():
        for changes in ({}, *more_samples(name, "mps", torch.float32)):
            arguments = sample_arguments(name, "mps", torch.float32) | changes
            with FakeTensorMode() as mode:
                fakes = {
                    n: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()
                }
                found = function(**fakes)
            expected = function(**copies(arguments))
            pairs = zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, expected)), strict=True)
            assert all((a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) for a, b in pairs), name
    compiled = torch.compile(kernel.moe_router_topk_softmax, backend="aot_eager", fullgraph=True)
    logits = random(5, 16).to("mps")
    for found, expected in zip(
        compiled(logits, 4, True), kernel.moe_router_topk_softmax(logits, 4, norm_topk_prob=True), strict=True
    ):
        assert torch.equal(found.cpu(), expected.cpu())


@pytest.mark.sweep
def test_benchmarks(project, kernel, simulated):
    """Each workload gives what PyTorch gives, within the bound of `kernels benchmark`."""
    classes = runpy.run_path(str(project / "benchmarks" / "benchmark.py"))
    workloads = 0
    for cls in classes.values():
        if not (isinstance(cls, type) and issubclass(cls, Benchmark) and cls is not Benchmark):
            continue
        for name in (each.removeprefix("benchmark_") for each in dir(cls) if each.startswith("benchmark_")):
            case = cls()
            case.kernel, case.device = kernel, "mps"
            getattr(case, f"setup_{name}", case.setup)()
            getattr(case, f"benchmark_{name}")()
            torch.testing.assert_close(case.out, getattr(case, f"verify_{name}")(), atol=1e-2, rtol=1e-5)
            workloads += 1
    assert workloads == 5


def refusal(function, arguments: dict) -> str | None:
    try:
        function(**arguments)
    except ValueError as error:
        return str(error)
    return None


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def on_mps(*tensors):
    return [tensor.to("mps") if isinstance(tensor, torch.Tensor) else tensor for tensor in tensors]


def close(found, expected, dtype=torch.float32) -> None:
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)


def filled(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.parameters():
        parameter.data = random(*parameter.shape) / max(1, parameter.shape[-1]) ** 0.5
    return module.requires_grad_(False)


def moved(module: torch.nn.Module) -> torch.nn.Module:
    return module.to("mps")


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["qwen3_5", "laguna"])
def test_routers(layers, family):
    if family == "qwen3_5":
        sizes = {"hidden_size": 64, "num_experts": 16, "num_experts_per_tok": 4}
        module = qwen3_5.Qwen3_5MoeTopKRouter(type("Config", (), sizes))
    else:
        sizes = {"hidden_size": 64, "num_experts": 16, "num_experts_per_tok": 4}
        module = laguna.LagunaTopKRouter(type("Config", (), sizes | {"moe_router_logit_softcapping": 5.0}))
    module, x = filled(module), random(3, 5, 64)
    expected = module(x)
    found = layers.SoftmaxTopKRouter.forward(moved(module), x.to("mps"))
    for one, other in zip(found, expected, strict=True):
        close(one, other)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution(layers, dtype):
    """Of a prompt, and of tokens behind a state, which moves on."""
    x, weight, bias = (random(*shape, dtype=dtype) for shape in ((2, 70, 9), (70, 4), (70,)))
    close(
        layers.causal_conv1d_fn()(*on_mps(x, weight, bias), activation="silu", seq_idx=None),
        qwen3_next.causal_conv1d_fn(x, weight, bias, activation="silu"),
        dtype,
    )
    for tokens in (1, 3):
        states = [random(2, 70, 4, dtype=dtype), random(2, 70, 4, dtype=dtype).to("mps")]
        asked = x.transpose(1, 2).contiguous().transpose(1, 2)[:, :, :tokens]
        found = layers.causal_conv1d_update()(asked.to("mps"), states[1], weight.to("mps"))
        close(found, qwen3_next.causal_conv1d_update(asked, states[0], weight), dtype)
        assert torch.equal(states[1].cpu(), states[0])
    with pytest.raises(ValueError, match="activation must be silu, swish or None, got gelu"):
        layers.causal_conv1d_fn()(*on_mps(x, weight), None, "gelu")


@pytest.mark.sweep
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
    given = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    on_device = on_mps(q, k, v, g, beta)
    held = state.to("mps")
    found, after = getattr(layers, f"{kind}_gated_delta_rule")()(*on_device, initial_state=held, **given)
    expected, expected_after = own(q, k, v, g, beta, initial_state=state.clone(), **given)
    close(found, expected)
    close(after, expected_after)
    assert torch.equal(held.cpu(), state)
    assert getattr(layers, f"{kind}_gated_delta_rule")()(*on_device)[1] is None


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["chunk", "fused_recurrent"])
def test_kimi_delta_attention(layers, kind):
    own = {"chunk": kimi.chunk_kimi_delta_attention, "fused_recurrent": kimi.recurrent_kimi_delta_attention}[
        kind
    ]
    q, k, v = (random(1, 7, 3, 32) for _ in range(3))
    g, beta = -random(1, 7, 3, 32).abs(), random(1, 7, 3).sigmoid()
    given = {"initial_state": None, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    found, after = getattr(layers, f"{kind}_kda")()(*on_mps(q, k, v, g, beta), **given)
    expected, expected_after = own(q, k, v, g, beta, **given)
    close(found, expected)
    close(after, expected_after)


@pytest.mark.sweep
@pytest.mark.parametrize("own", [qwen3_next.Qwen3NextRMSNormGated, kimi.KimiLinearRMSNormGated])
@pytest.mark.parametrize("width", [40, 6])
def test_gated_norm(layers, own, width):
    """In place of the forward, as `kernels` puts it: with the module's own weight, and both activations."""
    module = filled(own(width))
    x, gate = random(2, 5, width), random(2, 5, width + 1)[..., :width]
    expected = module(x, gate)
    close(layers.RMSNormGated.forward(moved(module), *on_mps(x, gate)), expected)


@pytest.mark.sweep
def test_layers_that_compile(layers):
    """Those that say so, in one graph."""
    router = laguna.LagunaTopKRouter(
        type(
            "Config",
            (),
            {
                "hidden_size": 64,
                "num_experts": 16,
                "num_experts_per_tok": 4,
                "moe_router_logit_softcapping": 5.0,
            },
        )
    )
    modules = {
        "RMSNorm": (qwen3.Qwen3RMSNorm(64), random(3, 64)),
        "RMSNormZeroCentered": (qwen3_5.Qwen3_5MoeRMSNorm(64), random(3, 64)),
        "RMSNormGated": (qwen3_next.Qwen3NextRMSNormGated(64), random(3, 64), random(4, 64)[:3]),
        "SoftmaxTopKRouter": (router, random(3, 64)),
    }
    says = {name for name, each in vars(layers).items() if getattr(each, "can_torch_compile", False)}
    assert says == {*modules}
    for name, (module, *given) in modules.items():
        module, given = moved(filled(module)), on_mps(*given)
        forward = getattr(layers, name).forward
        expected = forward(module, *given)
        torch._dynamo.reset()
        found = torch.compile(forward, backend="aot_eager", fullgraph=True)(module, *given)
        torch.testing.assert_close(found, expected)


@pytest.mark.sweep
@pytest.mark.parametrize("own", [qwen3, gpt_oss], ids=["whole head", "pairs"])
def test_rotary_embedding(layers, own):
    """With tables of all elements of a head, or of its pairs; heads in front of tokens, and behind."""
    q, k = random(2, 5, 4, 16).transpose(1, 2), random(2, 2, 5, 16)
    width = 16 if own is qwen3 else 8
    cos, sin = random(1, 5, width), random(1, 5, width) / 2
    for dim in (1, 2):
        given = [x if dim == 1 else x.transpose(1, 2) for x in (q, k)]
        found = layers.apply_rotary_transformers()(*on_mps(*given, cos, sin), unsqueeze_dim=dim)
        for result, expected in zip(found, own.apply_rotary_pos_emb(*given, cos, sin, dim), strict=True):
            close(result, expected)


# By transformers' own `set_use_kernels`.
WHOLE = """
    import json, sys
    import simulator
    simulator.install(strict=True)
    import torch
    from support import tiny_models
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import KernelConfig

    class Called(TorchDispatchMode):
        names = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == sys.argv[2]:
                self.names.add(function._schema.name.partition("::")[2])
            return function(*args, **(kwargs or {}))

    folder, _, architecture, *layers = sys.argv[1:]
    model = tiny_models.tiny_model(architecture).eval()
    ids = torch.randint(1, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        expected, tokens = model(ids).logits, model.generate(ids, **options)
        model, ids = model.to("mps"), ids.to("mps")
        mapping = {own: {"mps": f"{folder}:{ours}"} for own, ours in (pair.split("=") for pair in layers)}
        model.set_use_kernels(True, KernelConfig(mapping, use_local_kernel=True))
        with Called() as called:
            difference = (model(ids).logits.cpu() - expected).abs().max().item()
        same = torch.equal(model.generate(ids, **options).cpu(), tokens)
    print(json.dumps([difference / expected.abs().max().item(), same, sorted(called.names)]))
"""
BY_THEIR_NAMES = (
    *("RMSNormZeroCentered", "RMSNormGated", "SoftmaxTopKRouter", "chunk_gated_delta_rule"),
    *("fused_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update"),
)
COMMON = ("RMSNorm=RMSNorm", "rotary_pos_emb=apply_rotary_transformers")
OF_MODELS = {
    "qwen3_moe": (COMMON, {"rms_norm", "rope"}),
    "gpt_oss": (
        (*COMMON, "MegaBlocksMoeMLP=MegaBlocksMoeMLP"),
        {"rms_norm", "rope", "moe_router", "expert_mm", "expert_activation", "moe_weighted_reduce"},
    ),
    "qwen3_5_moe": (
        [f"{name}={name}" for name in BY_THEIR_NAMES],
        {"rms_norm", "rms_norm_gated", "moe_router", "gated_delta_rule_", "causal_conv1d_update_"},
    ),
}


@pytest.mark.sweep
@pytest.mark.skipif(
    not is_kernels_available(), reason=f"transformers asks for {deps['kernels']}, which PyPI does not have"
)
@pytest.mark.parametrize("architecture", sorted(OF_MODELS))
def test_whole_model(folder, architecture):
    """Logits and tokens are those of transformers' own layers on the CPU; no stack is copied in a call."""
    layers, operators = OF_MODELS[architecture]
    command = [sys.executable, "-c", textwrap.dedent(WHOLE), folder, UNIQUE, architecture, *layers]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
    assert result.returncode == 0 and "copied in every call" not in result.stderr, result.stderr
    difference, same, called = json.loads(result.stdout.splitlines()[-1])
    assert difference < 1e-5 and same and {*called} == operators


def gpt_oss_with(width: int) -> tuple:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2}
    module = moved(filled(gpt_oss.GptOssMLP(gpt_oss.GptOssConfig(**sizes))))
    module.router.weight.data = random(8, width).to("mps")
    return module, random(1, 3, width).to("mps")


HEADS = [(1, 3, 2, 8), (1, 3, 2, 8), (1, 3, 3, 4), (1, 3, 3), (1, 3, 3)]
BAD = {
    "RMSNorm": (
        lambda: (moved(filled(qwen3.Qwen3RMSNorm(40))), random(2, 39).to("mps")),
        "weight must be of shape",
    ),
    "RMSNormGated": (
        lambda: (moved(filled(kimi.KimiLinearRMSNormGated(40))), *on_mps(random(2, 40), random(3, 40))),
        "gate must be of shape",
    ),
    "MegaBlocksMoeMLP": (lambda: gpt_oss_with(48), "hidden_states must be of width 64, got 48"),
    "apply_rotary_transformers": (
        lambda: (None, *on_mps(random(2, 4, 5, 16), random(2, 2, 5, 16), random(1, 5, 12), random(1, 5, 12))),
        r"cos must be of shape \[B or 1, T, D or D / 2\], with B, D = \(2, 16\), got \(1, 5, 12\)",
    ),
    "causal_conv1d_update": (
        lambda: (None, *on_mps(random(2, 70, 3), random(2, 70, 2), random(70, 4))),
        "conv_state must be of 3 positions or more, got 2",
    ),
    "chunk_gated_delta_rule": (
        lambda: (None, *on_mps(*(random(*shape) for shape in HEADS))),
        "value must be of a multiple of the key's 2 heads, got 3",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_a_layer_is_one_line(layers, name):
    make, message = BAD[name]
    module, *given = make()
    layer = getattr(layers, name)
    with pytest.raises(ValueError, match=message) as error:
        layer.forward(layer() if module is None else module, *given)
    assert len(str(error.value).splitlines()) == 1
    if name.startswith("RMSNorm"):
        with pytest.raises(ValueError, match="must be float32 or float16 or bfloat16"):
            layer.forward(module, *(x.to(torch.complex64) for x in given))


@pytest.mark.sweep
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
    modules |= {
        "RMSNorm": qwen3.Qwen3RMSNorm,
        "RMSNormZeroCentered": qwen3_5.Qwen3_5MoeRMSNorm,
        "RMSNormGated": qwen3_next.Qwen3NextRMSNormGated,
        "SoftmaxTopKRouter": laguna.LagunaTopKRouter,
        "MegaBlocksMoeMLP": gpt_oss.GptOssMLP,
    }
    for name, module in modules.items():
        _validate_layer(check_cls=module, cls=getattr(layers, name), repo=name)
