"""Attention as transformers calls it: with sinks, and in place of torch's for few new tokens."""

import pytest
import torch
from support import tiny_models
from support.launches import launches, prompted
from support.memory import Memory
from support.models import assert_close, eager, in_parts, operators_of, output, prompt
from support.recognition import by_operators
from support.sweep import covering, in_sweep
from support.values import EACH_DTYPE
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma2Config,
    GptOssConfig,
    GptOssForCausalLM,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)
from transformers.integrations import sdpa_attention
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

import torch_moe_mps
from torch_moe_mps.models.attention.attention import attention, attention_mask
from torch_moe_mps.models.attention.causal_mask import CausalMask
from torch_moe_mps.models.basics.state import state_of
from torch_moe_mps.models.caches.prompt_cache import new_cache
from torch_moe_mps.models.families.glm5_next import indexer as kpool_indexer
from torch_moe_mps.models.upstream.calls import cache_among, cache_argument
from torch_moe_mps.models.upstream.reach import hold_reach
from torch_moe_mps.selfcheck import units
from torch_moe_mps.selfcheck.long_sums import is_wrong
from torch_moe_mps.selfcheck.units import chunks_run_sdpa

NAME = "moe_mps_test"


@pytest.fixture
def registered(monkeypatch):
    for interface, function in ((AttentionInterface, attention), (AttentionMaskInterface, attention_mask)):
        monkeypatch.setitem(interface._global_mapping, NAME, function)


def config(**changes):
    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": 6,
        "pad_token_id": 0,
    }
    return GptOssConfig(**{**sizes, **changes})


def layer() -> gpt_oss.GptOssAttention:
    module = gpt_oss.GptOssAttention(config(), 0).eval()
    torch.nn.init.normal_(module.sinks)
    return module.requires_grad_(False)


def inputs(device, dtype, tokens, keys):
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((2, 4, tokens, 8), (2, 2, keys, 8), (2, 2, keys, 8))
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]


def additive(tokens, keys, window, dtype):
    distance = torch.arange(keys - tokens, keys)[:, None] - torch.arange(keys)
    seen = (distance >= 0) & (distance < window)
    return torch.zeros(1, 1, tokens, keys, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


def calls_of(monkeypatch) -> list:
    """The calls of the model's own code from here on."""
    calls, eager = [], gpt_oss.eager_attention_forward
    monkeypatch.setattr(gpt_oss, "eager_attention_forward", lambda *a, **k: calls.append(a) or eager(*a, **k))
    return calls


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_as_the_model(device, dtype, monkeypatch):
    """Few tokens and prompts, with a mask or without."""
    module, calls = layer().to(dtype), calls_of(monkeypatch)
    eager = gpt_oss.eager_attention_forward
    for tokens, keys in ((1, 20), (8, 30), (30, 30)):
        q, k, v = inputs("cpu", dtype, tokens, keys)
        mask = additive(tokens, keys, 6, dtype)
        expected, _ = eager(module, q, k, v, mask, scaling=0.3)
        calls.clear()
        on_device = [t.to(device) for t in (q, k, v)]
        moved = layer().to(dtype).to(device)
        moved.sinks.copy_(module.sinks)
        masks = [mask.to(device), (mask == 0).to(device)]
        for given in [*masks, None] if tokens in (1, keys) else masks:
            out, _ = attention(
                moved, *on_device, given, scaling=0.3, sliding_window=6, s_aux=moved.sinks, position_ids=None
            )
            tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
            torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)
        assert not calls


@pytest.mark.parametrize("window", [None, 6])
def test_soft_caps(device, window):
    """As Gemma 2's code in float64, for a token, a few and prompts, over earlier keys and without."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    module = gemma2.Gemma2Attention(Gemma2Config(num_hidden_layers=1, **sizes), 0).eval()
    for tokens, keys in ((1, 20), (3, 20), (8, 8), (8, 30), (30, 30), (20, 34)):
        q, k, v = inputs("cpu", torch.float32, tokens, keys)
        own = additive(tokens, keys, window or keys, torch.float64)
        expected, _ = gemma2.eager_attention_forward(
            module, q.double(), k.double(), v.double(), own, scaling=0.9, softcap=2.0
        )
        described = CausalMask((2, 1, tokens, keys), keys, window, torch.float32, device)
        for mask in (described, own.float().to(device)):
            given = [module, *(t.to(device) for t in (q, k, v)), mask]
            run = lambda given=given: attention(*given, scaling=0.9, softcap=2.0)  # noqa: E731
            out, weights = by_operators(run, "cached_attention")
            assert weights is None
            torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-6, atol=1e-6)
    without, _ = gemma2.eager_attention_forward(module, q, k, v, own.float(), scaling=0.9)
    assert (without - expected).abs().max() > 0.01


def test_the_models_code_where_it_is_needed(monkeypatch):
    """For gradients, dropout, attention's weights and masks of single heads."""
    module, calls = layer(), calls_of(monkeypatch)
    q, k, v = inputs("cpu", torch.float32, 2, 10)
    mask = additive(2, 10, 6, torch.float32)

    def call(query, mask=mask, **options):
        return attention(module, query, k, v, mask, scaling=0.3, s_aux=module.sinks, **options)

    assert call(q)[1] is None and not calls
    out, weights = call(q.clone().requires_grad_())
    out.sum().backward()
    assert weights.shape == (2, 4, 2, 10)
    call(q, dropout=0.1)
    call(q, output_attentions=True)
    call(q, mask.expand(1, 4, -1, -1))
    assert len(calls) == 4
    with torch.no_grad():
        assert call(q.clone().requires_grad_())[1] is None and len(calls) == 4


def test_a_config_that_asks_for_weights():
    """transformers takes `config.output_attentions` beside "eager" alone, which the config names; a call may
    ask for them, too."""
    model, ids = tiny_models.tiny_model("gpt_oss").eval(), prompt()
    model.set_attn_implementation("eager")
    expected = model(ids, output_attentions=True).attentions
    torch_moe_mps.accelerate(model)
    assert "cached_attention" in operators_of(lambda: output(model, ids))
    for weights, own in zip(model(ids, output_attentions=True).attentions, expected, strict=True):
        assert_close(weights, own, 1e-5)
    model.config.output_attentions = True
    for weights, own in zip(model(ids).attentions, expected, strict=True):
        assert torch.equal(weights, own)
    model.config.output_attentions = False
    assert "cached_attention" in operators_of(lambda: output(model, ids))


@pytest.mark.slow("imports torch's compiler")
@pytest.mark.filterwarnings("error:.*lru_cache")
def test_torch_compile_warns_of_no_cache_of_ours():
    module = layer()
    q, k, v = inputs("cpu", torch.float32, 2, 10)

    def call(q):
        return attention(module, q, k, v, None, scaling=0.3, s_aux=module.sinks)[0]

    with torch.no_grad():
        assert_close(torch.compile(call, backend="eager")(q), call(q), 1e-5)


def test_masks_of_key_heads():
    """The operator takes them; a model's own code gets one for each of its heads."""
    module = layer()
    q, k, v = inputs("cpu", torch.float32, 2, 10)
    mask = torch.cat([additive(2, 10, window, torch.float32) for window in (6, 3)], 1)

    def call(query):
        return attention(module, query, k, v, mask, scaling=0.3, s_aux=module.sinks)[0].detach()

    ours = by_operators(lambda: call(q), "cached_attention")
    torch.testing.assert_close(call(q.clone().requires_grad_()), ours, rtol=1e-5, atol=1e-5)


def test_several_tokens_without_a_mask_are_the_first(device):
    """Of a static cache that is empty but for them."""
    module = layer().to(device)
    q, k, v = inputs(device, torch.float32, 5, 12)
    options = {"scaling": 0.3, "sliding_window": 3, "s_aux": module.sinks}
    out, _ = by_operators(lambda: attention(module, q, k, v, None, **options), "cached_attention")
    shown = [t[:, :, :5].cpu() for t in (q, k, v)]
    expected, _ = gpt_oss.eager_attention_forward(
        module.cpu(), *shown, additive(5, 5, 3, torch.float32), scaling=0.3
    )
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_without_code_of_the_model():
    module = torch.nn.Identity()
    q, k, v = inputs("cpu", torch.float32, 9, 9)
    with pytest.raises(
        RuntimeError, match="attention of Identity must be in a file with eager_attention_forw"
    ):
        attention(module, q, k, v, None, scaling=0.3, dropout=0.1)


@pytest.mark.parametrize(("cache", "padded"), covering(("dynamic", "static"), (False, True)))
def test_generate(device, registered, cache, padded):
    """The tokens of eager attention, with sliding windows, on every kind of cache."""
    torch.manual_seed(0)
    model = GptOssForCausalLM._from_config(config(), attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    ids = torch.randint(1, 50, (2, 11))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :4] = 0
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    options |= {"eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, attention_mask=mask, **options)
    model.set_attn_implementation(NAME)
    model.to(device)
    options |= {"attention_mask": mask.to(device)}
    actual = by_operators(lambda: model.generate(ids.to(device), **options), "cached_attention")
    assert torch.equal(actual.sequences.cpu(), expected.sequences)
    for ours, own in zip(actual.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours.cpu(), own, rtol=1e-4, atol=1e-4)


# Models ------------------------------------------------------------------------------------------------


def steps(model, ids) -> list[torch.Tensor]:
    """The logits of a prompt, of a few tokens and of one token more."""
    return in_parts(model, ids, 3, 1)[0]


def attention_kernels(simulated, run) -> list[str]:
    with simulated.trace() as commands:
        run()
    return [line.split()[0] for line in commands if line.startswith("attention")]


TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
WINDOWED = {name: {"sliding_window": 6, **TWO_KINDS} for name in ("gemma2", "gemma4", "gpt_oss")}
# Architectures whose padded prompts make no mask in any layer.
WITHOUT_MASKS = ["mixtral", "gemma2", "gemma4", "deepseek_v3", "gpt_oss", "hy_v4"]
OFTEN, OFTEN_PADDED = ("deepseek_v3",), ("gemma4",)
NO_CACHE = ["openai_privacy_filter"]
OTHERS = sorted(set(tiny_models.architectures()) - {*WITHOUT_MASKS, *NO_CACHE})


def compared(simulated, model, ids, call, expected=None) -> tuple[list, list[torch.Tensor]]:
    """The attention kernels and the results of an accelerated model, which are those of its own code.

    expected: other results, where its own code is wrong.
    """
    expected, results = call(model, ids) if expected is None else expected, []
    torch_moe_mps.accelerate(model)
    kernels = attention_kernels(simulated, lambda: results.extend(call(model, ids)))
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-4)
    return kernels, expected


@pytest.mark.parametrize("name", in_sweep(WITHOUT_MASKS, OFTEN))
def test_models(simulated, name):
    """Few new tokens run on the operator, and the prompts of gpt-oss and DeepSeek."""
    model = tiny_models.tiny_model(name).to("mps").eval()
    decoder = model.get_decoder()
    layers = sum(getattr(module, "is_causal", False) is True for module in decoder.modules())
    ids = torch.randint(1, 50, (1, 20), generator=torch.Generator().manual_seed(1)).to("mps")
    kernels, _ = compared(simulated, model, ids, steps)
    assert len(kernels) == (2 if name in ("mixtral", "gemma4") else 3) * layers
    torch_moe_mps.restore(model)
    assert attention_kernels(simulated, lambda: steps(model, ids)) == []


PADDED = (9, 2, 0)  # first tokens of each row
STEPS = ((0, 16), (16, 19), (19, 20))


def padded_steps(model, ids) -> list[torch.Tensor]:
    """The logits of a prompt that is padded, of a few tokens and of one; those of padding are left out."""
    results, cache = [], None
    shown = torch.ones_like(ids)
    for row, padded in zip(shown, PADDED, strict=True):
        row[:padded] = 0
    with torch.no_grad():
        for start, stop in STEPS:
            out = model(
                input_ids=ids[:, start:stop],
                attention_mask=shown[:, :stop],
                **cache_argument(model, cache),
                use_cache=True,
            )
            assert out[0].isfinite().all()
            results.append(out[0].float().cpu()[shown[:, start:stop].cpu() == 1])
            cache = cache_among(out)
    return results


@torch.no_grad()
def rows_alone(model, ids) -> list[torch.Tensor]:
    """What `padded_steps` gives, by a call of each row without its padding."""
    rows = [model(input_ids=row[None, p:])[0][0].float().cpu() for row, p in zip(ids, PADDED, strict=True)]
    return [
        torch.cat([row[max(start - p, 0) : stop - p] for row, p in zip(rows, PADDED, strict=True)])
        for start, stop in STEPS
    ]


@pytest.mark.parametrize("name", in_sweep([*WITHOUT_MASKS, *OTHERS], OFTEN_PADDED))
def test_padded_prompts(simulated, name, monkeypatch):
    """They run on the operator, as the tokens behind them do, but for layers whose own code makes a mask."""
    model = tiny_models.tiny_model(name, **WINDOWED.get(name, {})).to("mps").eval()
    layers = sum(hasattr(module, "is_causal") for module in model.get_decoder().modules())
    layers *= model._supports_sdpa or model._supports_attention_backend  # Inkling 2's has no implementations
    ids = torch.randint(1, 50, (3, 20), generator=torch.Generator().manual_seed(1)).to("mps")
    # Jamba's own code takes the first columns of the mask of a step for those of its tokens.
    expected = rows_alone(model, ids) if name == "jamba" else None
    kernels, _ = compared(simulated, model, ids, padded_steps, expected)
    assert 2 * layers <= len(kernels) <= 3 * layers
    if name in WITHOUT_MASKS:
        assert len(kernels) == 3 * layers
        monkeypatch.setattr(CausalMask, "elements", lambda mask: pytest.fail(f"{mask} was made"))
        padded_steps(model, ids)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_windows_of_an_encoder(simulated, padded, monkeypatch):
    """Two-sided ones, of prompts and of few tokens: on the operator, and no mask is made."""
    model = tiny_models.tiny_model("openai_privacy_filter", sliding_window=6).to("mps").eval()
    ids = torch.randint(1, 50, (2, 30), generator=torch.Generator().manual_seed(1)).to("mps")
    shown = torch.ones_like(ids)
    if padded:
        shown[0, :9], shown[1, 25:] = 0, 0

    def call(model, ids):
        outs = [(model(ids[:, :n], attention_mask=shown[:, :n])[0], shown[:, :n]) for n in (30, 11, 4, 1)]
        return [out.float().cpu()[real.cpu() == 1] for out, real in outs]

    kernels, _ = compared(simulated, model, ids, call)
    assert len(kernels) == 4 * model.config.num_hidden_layers
    monkeypatch.setattr(CausalMask, "elements", lambda mask: pytest.fail(f"{mask} was made"))
    call(model, ids)


OTHER_GEMMAS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OTHER_GEMMAS |= {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "vocab_size": 97}


@torch.no_grad()
def test_cross_attention_beside_soft_caps(device):
    """T5Gemma's shares its config with causal layers; without a mask it still sees all keys."""
    decoder = {**OTHER_GEMMAS, "cross_attention_hidden_size": 32}
    config = T5GemmaConfig(encoder=OTHER_GEMMAS, decoder=decoder, vocab_size=97)
    model = T5GemmaForConditionalGeneration(config).to(device).eval()
    ids = torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)
    shown = torch.ones_like(ids)
    shown[0, :4] = 0

    def run() -> list[torch.Tensor]:
        logits = [model(input_ids=ids, decoder_input_ids=ids, attention_mask=m).logits for m in (None, shown)]
        cache = None
        for part in ids.split([5, 3, 1], 1):
            out = model(input_ids=ids, decoder_input_ids=part, **cache_argument(model, cache))
            logits.append(out.logits)
            cache = cache_among(out)
        return logits

    expected = run()
    torch_moe_mps.accelerate(model)
    torch.testing.assert_close(by_operators(run, "cached_attention"), expected, rtol=1e-4, atol=1e-4)


def in_windows(model, ids) -> list[torch.Tensor]:
    """The logits of a prompt, of one that follows it, of a few tokens and of one; in windows of 6."""
    return in_parts(model, ids, 12, 3, 1)[0]


@pytest.mark.parametrize("name", in_sweep(["gemma2", "gemma4", "gpt_oss"], ["gpt_oss"]))
def test_windows(simulated, name):
    """Prompts in windows, and those over earlier ones, run on the operator."""
    model = tiny_models.tiny_model(name, sliding_window=6, **TWO_KINDS).to("mps").eval()
    ids = torch.randint(1, 50, (1, 36), generator=torch.Generator().manual_seed(1)).to("mps")
    kernels, expected = compared(simulated, model, ids, in_windows)
    assert len(kernels) == (7 if name == "gemma4" else 8)  # torch's runs the first prompt without a window
    with_gradients = model(input_ids=ids[:, :20])[0]
    with_gradients.sum().backward()
    torch.testing.assert_close(with_gradients.detach().float().cpu(), expected[0], rtol=1e-4, atol=1e-4)


@pytest.fixture
def with_sdpa(simulated, monkeypatch):
    """A simulated M5 whose torch has a kernel for its tensor units, which was faster."""
    monkeypatch.setenv("SIMULATED_GPU", "Apple M5 Max")
    monkeypatch.setattr(units, "was_faster", lambda way: True)
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    chunks_run_sdpa.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    chunks_run_sdpa.cache_clear()


LACKING = {
    "the measurement": lambda patch: patch.setattr(units, "was_faster", lambda way: False),
    "units": lambda patch: patch.setenv("SIMULATED_GPU", "Apple M4 Max"),
    "torch": lambda patch: patch.setattr(torch, "__version__", "2.14.1"),
    "macOS": lambda patch: patch.setattr(units, "macos", lambda: (26, 1)),
}


@pytest.mark.parametrize("lacks", LACKING)
def test_no_chunk_runs_sdpa_without(simulated, with_sdpa, lacks):
    LACKING[lacks](with_sdpa)
    assert not chunks_run_sdpa()


def test_chunks_run_sdpa_where_it_has_tensor_units(simulated, with_sdpa):
    """The second chunk of a prompt; the first does anyway, and few tokens never."""
    model = tiny_models.tiny_model("mixtral", num_hidden_layers=1).to("mps").eval()
    ids = torch.randint(1, 50, (1, 36), generator=torch.Generator().manual_seed(1)).to("mps")
    kernels, _ = compared(simulated, model, ids, in_windows)
    assert len(kernels) == 2


@pytest.mark.parametrize(
    ("call", "rows", "window", "count"), [(in_windows, 1, 6, 4), (padded_steps, 3, None, 3)]
)
def test_chunks_that_sdpa_would_compute_in_vain(simulated, with_sdpa, call, rows, window, count):
    """Keys outside of a window, and padding, which sees no key: its results would be NaN."""
    model = tiny_models.tiny_model("mixtral", num_hidden_layers=1, sliding_window=window).to("mps").eval()
    ids = torch.randint(1, 50, (rows, 36), generator=torch.Generator().manual_seed(1)).to("mps")
    kernels, _ = compared(simulated, model, ids, call)
    assert len(kernels) == count


@pytest.mark.parametrize("name", in_sweep(["gemma4", "gpt_oss"], ["gpt_oss"]))
def test_a_token_makes_no_mask(simulated, name):
    """Not even where its windows are full."""
    model = tiny_models.tiny_model(name, sliding_window=6, **TWO_KINDS).to("mps").eval()
    token = torch.ones(1, 1, dtype=torch.int64, device="mps")
    torch_moe_mps.accelerate(model)
    cache = prompted(model, [1] * 20)
    counts = launches(simulated, lambda: model(token, **cache_argument(model, cache)))
    assert counts["embedding"] == 1
    assert not counts.keys() & {"le", "gt", "bitwise_and", "where", "new_ones"}


# Memory ------------------------------------------------------------------------------------------------


class MemoryOfMasks(Memory):
    """What a causal mask makes is counted, too."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(cls, CausalMask) for cls in types):
            return NotImplemented
        return super().__torch_dispatch__(function, types, args, kwargs)


class TorchsAttention(TorchFunctionMode):
    """In place of torch's attention on MPS, which keeps no scores of heads up to 256."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.nn.functional.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        query, _, value = args
        assert query.shape[3] == value.shape[3] <= 256
        return torch.empty((*query.shape[:3], value.shape[3]), dtype=query.dtype, device=query.device)


def without_values(model) -> None:
    """Weights on mps without memory, within a FakeTensorMode."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="mps")
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    tensors[name] = torch.nn.Parameter(made, requires_grad=False) if is_parameter else made


def peak_of_a_prompt(model, *prompts: int, padded: bool = False) -> int:
    """Of several prompts, each after the ones before it; with a 2D mask if they are padded."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        without_values(model)
        cache = new_cache(model)
        with TorchsAttention(), MemoryOfMasks() as memory:
            for i, tokens in enumerate(prompts):
                ids = torch.ones(1, tokens, dtype=torch.int64, device="mps")
                shown = torch.ones(1, sum(prompts[: i + 1]), dtype=torch.int64, device="mps")
                options = {"attention_mask": shown} if padded else {}
                model(ids, **cache_argument(model, cache), use_cache=True, logits_to_keep=1, **options)
    return memory.peak


ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_global_key_value_heads": 1}
OF_A_PROMPT = {
    "gemma3n": TWO_KINDS | {"num_kv_shared_layers": 0},
    "gemma4": TWO_KINDS | ONE_HEAD | {"global_head_dim": 288},  # wider than torch's attention takes
}
PROMPTED = ("qwen3_moe", "deepseek_v3", "gpt_oss", "gemma2", "gemma4", "gemma3n")


def is_padded(monkeypatch) -> None:
    """From here on every causal mask has a range of keys, which no 2D mask without values could give."""
    of = CausalMask.of

    def padded(**options):
        mask = of(**{**options, "attention_mask": None})
        mask.key_range = torch.zeros(1, 2, dtype=torch.int32, device=mask.device)
        return mask

    monkeypatch.setattr(CausalMask, "of", padded)


@pytest.mark.parametrize("name", in_sweep(PROMPTED, ("deepseek_v3", "gemma4")))
def test_memory_of_a_prompt(simulated, name, monkeypatch):
    """It grows as the prompt does: no tensor has an element for each pair of tokens, scores or mask.

    No kernel of torch's or ours runs; the operators' references, which keep scores, do not either.
    """
    model = tiny_models.tiny_model(name, **OF_A_PROMPT.get(name, {}))
    torch_moe_mps.accelerate(model)
    short, long = peak_of_a_prompt(model, 4096), peak_of_a_prompt(model, 32768)
    assert 7 < long / short < 8.1
    assert long < 32768**2 / 3
    assert peak_of_a_prompt(model, 32768, 4096) < 1.25 * long
    is_padded(monkeypatch)
    assert peak_of_a_prompt(model, 32768, padded=True) < 1.01 * long


# Inkling's own code makes the distances of all tokens from all keys.
_NOT_TRIED = {"inkling", "inkling2", "inkling2_loop"}


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name", sorted({*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES} - _NOT_TRIED)
)
def test_memory_of_a_prompt_of_every_architecture(simulated, name, monkeypatch):
    assert not is_wrong()  # asked while tensors have values
    model = tiny_models.tiny_model(name, **OF_A_PROMPT.get(name, {}))
    torch_moe_mps.accelerate(model)
    # Whether a prompt is padded is asked of a mask's values, which there are none of here.
    monkeypatch.setattr(kpool_indexer, "_is_padded", lambda mask, layer: False)
    short, long = peak_of_a_prompt(model, 4096), peak_of_a_prompt(model, 32768)
    assert long / short < 8.1, (short, long)


@pytest.mark.parametrize("window", [None, 3])
def test_chosen_keys_that_a_mask_hides(window):
    """Later ones, those in front of the window, and -1 count as none."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, n, 16, generator=generator) for h, n in ((4, 2), (2, 9), (2, 9)))
    indices = torch.tensor([[[8, 6, 1, 5], [3, -1, 8, 6]]], dtype=torch.int32)
    mask = CausalMask((1, 1, 2, 9), 9, window, torch.float32, "cpu")
    out, _ = attention(torch.nn.Identity(), q, k, v, mask, scaling=0.25, indices=indices)
    shown = torch.full((2, 9), -torch.inf, dtype=torch.float64)
    for token, keys in enumerate(([6, 1, 5], [3, 8, 6]) if window is None else ([6, 5], [8, 6])):
        shown[token, keys] = 0
    q, k, v = q.double(), k.double().repeat_interleave(2, 1), v.double().repeat_interleave(2, 1)
    right = torch.softmax(q @ k.mT * 0.25 + shown, -1) @ v
    torch.testing.assert_close(out.double(), right.transpose(1, 2), rtol=1e-5, atol=1e-5)


class Biased(torch.nn.Module):
    """A layer of three queries a key head that an operator may run."""

    is_causal, num_key_value_groups = True, 3


@pytest.mark.parametrize("device", ["mps"], indirect=True)
@pytest.mark.parametrize(
    ("tokens", "heads", "mask", "is_ours"),
    [
        (1, 6, None, True), (1, 1, "bool", True), (3, 6, "bool", True), (3, 6, "added", True),
        (3, 6, None, False), (12, 6, "bool", False),
    ],
)  # fmt: skip
def test_summands_of_each_head(tokens, heads, mask, is_ours, device, monkeypatch):
    """Of scores, as models with relative positions hand them to torch's attention: of few tokens in order."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = (2, 6, tokens, 8), (2, 2, 16, 8), (2, 2, 16, 8), (2, heads, tokens, 16)
    q, k, v, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    keys = 16 if mask is not None or tokens == 1 else tokens
    shown = additive(tokens, 16, 9, torch.float32)
    given = {None: None, "bool": shown == 0, "added": shown}[mask]
    layer = Biased()
    state_of(layer).is_attention = True
    calls = []
    own = sdpa_attention.torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **o: calls.append(1) or own(*a, **o)
    )
    reach = hold_reach("transformers")  # noqa: F841  # while it lives
    tensors = [q, k[:, :, :keys], v[:, :, :keys], given, bias[..., :keys]]
    *arguments, summands = (x if x is None else x.to(device) for x in tensors)
    sdpa = AttentionInterface._global_mapping["sdpa"]
    out, _ = sdpa(layer, *arguments, scaling=0.3, position_bias=summands)
    assert (not calls) == is_ours
    order = additive(tokens, keys, keys if mask is None else 9, torch.float64)
    k, v = (x[:, :, :keys].double().repeat_interleave(3, 1) for x in (k, v))
    scores = q.double() @ k.mT * 0.3 + bias[..., :keys].double() + order
    torch.testing.assert_close(
        out.cpu().double(), (scores.softmax(-1) @ v).transpose(1, 2), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", in_sweep([*WITHOUT_MASKS, *OTHERS], ("deepseek_v4", "minimax")))
@torch.no_grad()
def test_weights_that_a_call_asks_for(name):
    """Of a prompt and of tokens behind it: those of the eager code, in the same layers."""
    model = tiny_models.tiny_model(name)
    last = [1, 1, 1] if name == "jamba" else [3]  # whose own code forgets its states before several tokens
    model.set_attn_implementation("eager")
    model = eager(model)
    found, ids = [], prompt(1, 18)
    for accelerates in (False, True):
        if accelerates:
            torch_moe_mps.accelerate(model, capture=True)
        cache = None
        for piece in ids.split([11, 1, 1, 1, 1, *last], 1):
            out = model(piece, **cache_argument(model, cache), use_cache=True, output_attentions=True)
            cache = cache_among(out)
            found += out.get("attentions") or out.get("decoder_attentions") or ()
    half = len(found) // 2
    torch.testing.assert_close(found[half:], found[:half], rtol=1e-4, atol=1e-5)
