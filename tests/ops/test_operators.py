"""What holds for every operator: schema, registration, ways to call it."""

import threading

import expecttest
import pytest
import torch
import torch._dynamo.testing
from support.operators import MODULES, positional, wrapped
from torch.utils._python_dispatch import TorchDispatchMode

from torch_moe_mps.ops import OPERATORS
from torch_moe_mps.ops._checks import ACTIVATION_DTYPES as DTYPES
from torch_moe_mps.ops._registry import DECLARED
from torch_moe_mps.ops._samples import CALLS, copies, more_samples, packet, sample_arguments
from torch_moe_mps.ops.norms import rms_norm

# What is tested here does not depend on the order of threads.
pytestmark = pytest.mark.one_schedule


class TestSchemas(expecttest.TestCase):
    def test_all(self):
        schemas = [str(packet(name).default._schema) for name in OPERATORS]
        self.assertExpectedInline(
            "\n".join(wrapped(schema) for schema in schemas),
            """\
moe_mps::layer_norm(Tensor input, Tensor? weight, Tensor? bias, float eps, float weight_offset=0.) -> Tensor
moe_mps::rms_norm(Tensor input, Tensor? weight, float eps, float weight_offset=0., float factor=1.) ->
    Tensor
moe_mps::rms_norm_gated(Tensor input, Tensor gate, Tensor weight, float eps, float weight_offset=0., str
    activation="silu", bool gate_first=False, int? group=None) -> Tensor
moe_mps::fused_norm_add(Tensor residual, Tensor input, Tensor weight, float eps, float weight_offset=0.) ->
    Tensor
moe_mps::fused_norm_add_scalar(Tensor residual, Tensor input, Tensor weight, Tensor scalar, float eps, float
    weight_offset=0.) -> Tensor
moe_mps::fused_residual_norm(Tensor residual, Tensor input, Tensor weight, float eps, bool write_sum=True,
    float weight_offset=0., float factor=1.) -> (Tensor, Tensor)
moe_mps::fused_residual_norm_scalar(Tensor residual, Tensor input, Tensor weight, Tensor scalar, float eps,
    float weight_offset=0.) -> Tensor
moe_mps::rope(Tensor q, Tensor? k, Tensor? cos, Tensor? sin, Tensor? q_weight=None, Tensor? k_weight=None,
    float eps=9.9999999999999995e-07, float weight_offset=0., *, str pairs="half", int? rotary_dim=None,
    bool rotary_last=False) -> (Tensor, Tensor)
moe_mps::rope_cache_(Tensor? q, Tensor k, Tensor? v, Tensor(a3!) keys_, Tensor(a4!)? values_, Tensor? cos,
    Tensor? sin, Tensor? q_weight=None, Tensor? k_weight=None, float eps=9.9999999999999995e-07, float
    weight_offset=0., *, str pairs="half", int? rotary_dim=None, bool rotary_last=False, bool norm_v=False,
    Tensor? v_weight=None, Tensor? k_bias=None) -> Tensor
moe_mps::rope_tables(Tensor position_ids, Tensor inv_freq, float scaling, ScalarType dtype, str
    layout="halves", Tensor? axes=None) -> (Tensor, Tensor)
moe_mps::attention(Tensor q, Tensor k, Tensor v, float scale, *, Tensor? mask=None, int? window=None,
    Tensor? key_range=None, float? softcap=None, Tensor? sinks=None, Tensor? k_scales=None, Tensor?
    k_biases=None, Tensor? v_scales=None, Tensor? v_biases=None, Tensor? indices=None, int index_block=1,
    Tensor? gate=None, str gate_activation="sigmoid", int lookahead=0, Tensor? k_tail=None, Tensor?
    v_tail=None, int tail_rate=1, SymInt position=0, Tensor? relative=None, ScalarType? dtype=None) ->
    Tensor
moe_mps::rope_attention_(Tensor q, Tensor k, Tensor v, Tensor(a3!) keys_, Tensor(a4!) values_, Tensor? cos,
    Tensor? sin, float scale, Tensor? q_weight=None, Tensor? k_weight=None, float
    eps=9.9999999999999995e-07, float weight_offset=0., *, str pairs="half", int? rotary_dim=None, bool
    rotary_last=False, bool norm_v=False, Tensor? v_weight=None, int? window=None, Tensor? key_range=None,
    float? softcap=None, Tensor? sinks=None, Tensor? gate=None, str gate_activation="sigmoid") -> Tensor
moe_mps::write_cache_quantized_(Tensor states, Tensor(a1!) packed_, Tensor(a2!) scales_, Tensor(a3!)
    biases_, SymInt start) -> ()
moe_mps::silu_mul_stacked(Tensor gate, Tensor up) -> Tensor
moe_mps::weighted_sum_stacked(Tensor slots, Tensor weights) -> Tensor
moe_mps::weighted_sum_residual_stacked_(Tensor(a0!) residual_, Tensor slots, Tensor weights) -> ()
moe_mps::weighted_sum_residual_norm_stacked_(Tensor(a0!) residual_, Tensor slots, Tensor weights, Tensor
    norm_weight, float eps) -> Tensor
moe_mps::moe_weighted_reduce(Tensor weights, Tensor expert_out, Tensor? shared_gate=None, Tensor?
    shared_out=None, Tensor? residual=None, bool gate_is_logit=False) -> Tensor
moe_mps::expert_mm(Tensor x, Tensor weight, Tensor ids, Tensor? bias=None, bool transposed=False) -> Tensor
moe_mps::moe_experts(Tensor x, Tensor gate_up, Tensor down, Tensor ids, Tensor weights, *, Tensor?
    gate_up_bias=None, Tensor? down_bias=None, str activation="silu", float? alpha=None, float? limit=None,
    bool gated=True, bool interleaved=False, bool transposed=False, Tensor? shared_gate=None, Tensor?
    shared_out=None, Tensor? residual=None, bool gate_is_logit=False, Tensor? norm_weight=None, float
    norm_eps=9.9999999999999995e-07, float norm_offset=0.) -> Tensor
moe_mps::heads_mm(Tensor x, Tensor weight, *, bool transposed=False, Tensor? tail=None) -> Tensor
moe_mps::heads_quantized(Tensor x, Tensor packed, Tensor scales, Tensor? biases, str format, *, bool
    transposed=False, Tensor? tail=None, ScalarType? dtype=None) -> Tensor
moe_mps::hyper_update(Tensor streams, Tensor out, Tensor post, Tensor? comb=None) -> Tensor
moe_mps::hyper_connection(Tensor streams, Tensor fn, Tensor base, Tensor scale, *, Tensor? out=None, Tensor?
    post=None, Tensor? comb=None, float norm_eps=9.9999999999999995e-07, float eps=9.9999999999999995e-07,
    int iterations=20, float post_factor=2., float post_eps=0.) -> (Tensor, Tensor, Tensor, Tensor)
moe_mps::index_topk(Tensor q, Tensor k, Tensor? weights, int top_k, float scale, *, Tensor? key_range=None,
    str reduce="heads", int block=1, int tail=0, SymInt keys=0, bool as_bits=False) -> Tensor
moe_mps::linear_quantized(Tensor x, Tensor packed, Tensor scales, Tensor? biases, Tensor? bias, str format,
    Tensor? residual=None, Tensor? order=None, Tensor? norm_weight=None, float
    norm_eps=9.9999999999999995e-07, float norm_offset=0., str? activation=None, int? activated=None, float
    factor=1.) -> Tensor
moe_mps::mlp_quantized(Tensor x, Tensor gate_up_packed, Tensor gate_up_scales, Tensor? gate_up_biases,
    Tensor down_packed, Tensor down_scales, Tensor? down_biases, str format, *, Tensor? gate_up_bias=None,
    Tensor? down_bias=None, str activation="silu", float? alpha=None, float? limit=None, bool gated=True,
    bool interleaved=False, Tensor? residual=None, str? down_format=None, Tensor? norm_weight=None, float
    norm_eps=9.9999999999999995e-07, float norm_offset=0.) -> Tensor
moe_mps::embedding_quantized(Tensor ids, Tensor packed, Tensor scales, Tensor? biases, str format,
    ScalarType dtype) -> Tensor
moe_mps::causal_conv1d_update_(Tensor x, Tensor(a1!) conv_state_, Tensor weight, Tensor? bias=None, str
    activation="silu", bool add_input=False) -> Tensor
moe_mps::linear_attention_(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor(a4!) state_, float scale, *,
    Tensor? beta=None, bool delta=True, float? l2norm_eps=None, str decay="log", Tensor? A_log=None, Tensor?
    dt_bias=None, float? lower_bound=None, str beta_activation="none", float? beta_min=None, Tensor?
    skip=None, Tensor? gate=None, str gate_activation="silu", Tensor? norm_weight=None, float
    norm_eps=9.9999999999999995e-07, float norm_offset=0.) -> Tensor
moe_mps::selective_scan_(Tensor x, Tensor step, Tensor B, Tensor C, Tensor(a4!) state_, Tensor A_log, *,
    Tensor? dt_bias=None, Tensor? skip=None, Tensor? gate=None) -> Tensor
moe_mps::pointwise(Tensor a, str formula, ScalarType dtype, Tensor? b=None, Tensor? c=None, Tensor? d=None,
    Tensor? e=None, Tensor? f=None, bool mean=False) -> Tensor
moe_mps::pool_window_(Tensor kv, Tensor gate, Tensor position_bias, Tensor(a3!) state_, Tensor(a4!)
    entries_, SymInt position, Tensor norm_weight, Tensor inv_freq, float scaling=1., float
    eps=9.9999999999999995e-07) -> ()
moe_mps::moe_router(Tensor logits, int top_k, *, str scoring, Tensor? bias=None, int num_groups=1, int
    top_groups=1, str group_score="top2_sum", float? masked_score=None, bool bias_on_logits=False, bool
    norm_topk_prob, float norm_eps=9.9999999999999995e-21, float norm_min=0., float scaling_factor=1.,
    Tensor? per_expert_scale=None) -> (Tensor, Tensor)
moe_mps::moe_router_topk_softmax(Tensor logits, int top_k, bool norm_topk_prob) -> (Tensor, Tensor)
moe_mps::fused_moe_routing(Tensor logits, Tensor per_expert_scale, int top_k) -> (Tensor, Tensor)
moe_mps::router_logits(Tensor x, Tensor weight, Tensor? bias=None, Tensor? norm_weight=None, float
    norm_eps=9.9999999999999995e-07, float norm_offset=0., ScalarType? dtype=None) -> Tensor
moe_mps::moe_gate(Tensor hidden, Tensor router_weight, Tensor norm_weight, Tensor per_expert_scale, int
    top_k, float eps, bool renormalize_after_scale=True) -> (Tensor, Tensor)
moe_mps::moe_hash_router(Tensor x, Tensor weight, Tensor table, Tensor tokens, *, str scoring, bool
    norm_topk_prob, float sum_eps=9.9999999999999995e-21, float scaling_factor=1., Tensor? norm_weight=None,
    float norm_eps=9.9999999999999995e-07, float norm_offset=0.) -> (Tensor, Tensor)
moe_mps::moe_bucket(Tensor ids, int num_experts) -> (Tensor, Tensor)
moe_mps::moe_compute_ids_tpe(Tensor ids, int num_experts, int gate_up_rows, int down_rows) -> (Tensor,
    Tensor, Tensor, Tensor)
moe_mps::expert_qmm(Tensor x, Tensor packed, Tensor scales, Tensor? biases, Tensor ids, str format, Tensor?
    bias=None) -> Tensor
moe_mps::moe_experts_quantized(Tensor x, Tensor gate_up_packed, Tensor gate_up_scales, Tensor?
    gate_up_biases, Tensor down_packed, Tensor down_scales, Tensor? down_biases, Tensor? ids, Tensor?
    weights, str format, *, Tensor? gate_up_bias=None, Tensor? down_bias=None, str activation="silu", float?
    alpha=None, float? limit=None, bool gated=True, bool interleaved=False, Tensor? shared_gate=None,
    Tensor? shared_out=None, Tensor? residual=None, bool gate_is_logit=False, str? down_format=None, Tensor?
    norm_weight=None, float norm_eps=9.9999999999999995e-07, float norm_offset=0., Tensor? logits=None, int
    top_k=1, str scoring="softmax", Tensor? router_bias=None, int num_groups=1, int top_groups=1, str
    group_score="top2_sum", float? masked_score=None, bool bias_on_logits=False, bool norm_topk_prob=False,
    float router_norm_eps=9.9999999999999995e-21, float router_norm_min=0., float scaling_factor=1., Tensor?
    per_expert_scale=None) -> Tensor
moe_mps::sample_(Tensor logits, Tensor draws, Tensor(a2!) invalid_, float temperature=1., int top_k=0, float
    top_p=1., float min_p=0., int otherwise=0) -> Tensor""",
        )


def test_samples_cover_every_operator():
    assert set(CALLS) == set(OPERATORS)


ALL_UTILS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.of_kernels
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("compiles_all", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_opcheck(device, name, compiles_all):
    """In one dtype after the other. Only the sweep compiles the calls of other paths, too; what is registered
    does not depend on the call."""
    dtype = DTYPES[list(OPERATORS).index(name) % len(DTYPES)]
    base = sample_arguments(name, device, dtype)
    for number, changes in enumerate(({}, *more_samples(name, device, dtype))):
        args, kwargs = positional(name, copies({**base, **changes}))
        utils = ALL_UTILS if compiles_all or number == 0 else ("test_schema", "test_faketensor")
        torch.library.opcheck(packet(name).default, args, kwargs, test_utils=utils)


@pytest.mark.parametrize("name", OPERATORS)
def test_keyword_and_positional_calls_agree(device, name):
    """By keyword, by position, and through the public function."""
    base = sample_arguments(name, device, torch.float32)
    module = next(module for module in MODULES if hasattr(module, name))
    args, kwargs = positional(name, copies(base))
    results = [
        packet(name)(**copies(base)),
        packet(name)(*args, **kwargs),
        getattr(module, name)(**copies(base)),
    ]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def test_every_operator_has_its_kernels(device):
    """On MPS no operator silently runs its reference.

    Operators that write in place keep the kernel for autograd that is registered in Python: PyTorch's own for
    extensions does not see that residual_ changes.
    """
    for name in OPERATORS:
        keys = ["CPU", "Meta", "CompositeExplicitAutograd", "Autograd"]
        if device == "mps":
            keys += ["MPS"] if name.endswith("_") else ["MPS", "AutogradMPS"]
        for key in keys:
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"moe_mps::{name}", key), (name, key)


@pytest.mark.parametrize("name", OPERATORS)
def test_autocast_changes_nothing(device, name):
    """Autocast does not change the dtypes that the operators compute in."""
    arguments = sample_arguments(name, device, torch.float32)
    expected = packet(name)(**copies(arguments))
    with torch.autocast(device, dtype=torch.bfloat16):
        torch.testing.assert_close(packet(name)(**copies(arguments)), expected, rtol=0, atol=0)


def test_two_threads(device):
    """Two threads calling operators at once get the same results as one."""
    arguments = {name: sample_arguments(name, device, torch.float32) for name in OPERATORS}
    alone = {name: packet(name)(**copies(arguments[name])) for name in OPERATORS}
    failures = []

    def work(names):
        try:
            for _ in range(3):
                for name in names:
                    torch.testing.assert_close(
                        packet(name)(**copies(arguments[name])), alone[name], rtol=0, atol=0
                    )
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(names,)) for names in (OPERATORS, OPERATORS[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive()
    assert not failures, failures


@pytest.mark.parametrize("name", OPERATORS)
def test_every_tensor_is_declared(name):
    """But scales and biases, whose shapes and dtypes are those of a format."""
    arguments = packet(name).default._schema.arguments
    formats = ("scales", "biases") if any(argument.name == "format" for argument in arguments) else ()
    tensors = {
        a.name for a in arguments if "Tensor" in str(a.type) and not a.name.endswith(formats or ("-",))
    }
    declared = [argument for argument, *_ in DECLARED[name].tensors]
    assert len(declared) == len(tensors) and {*declared} == tensors
    assert {*DECLARED[name].allowed} <= {argument.name for argument in arguments} - tensors


def test_a_call_past_the_dispatcher_is_one_of_it():
    """Where only the CPU's kernel would run; modes, profilers, gradients and other tensors still see it."""
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x, weight = torch.randn(3, 8), torch.randn(8)
    expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected)
        with Mode():
            torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected)
        assert seen[0] == "moe_mps.rms_norm.default"
        with torch.profiler.profile() as profile:
            rms_norm(x, weight, 1e-6)
        assert "moe_mps::rms_norm" in [event.name for event in profile.events()]
        mapped = torch.func.vmap(lambda row: rms_norm(row[None], weight, 1e-6)[0])(x)
        torch.testing.assert_close(mapped, expected)
        assert rms_norm(x.to("meta"), weight.to("meta"), 1e-6).is_meta
        for wrong, message in (
            (weight[:5], "weight must be of shape"),
            (weight.to("meta"), "on the device of"),
        ):
            with pytest.raises(ValueError, match=message):
                rms_norm(x, wrong, 1e-6)
    with pytest.raises(RuntimeError, match="moe_mps::rms_norm: backward is not implemented"):
        rms_norm(x.requires_grad_(), weight, 1e-6).sum().backward()
