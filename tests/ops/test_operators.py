"""What holds for every operator: schema, registration, ways to call it."""

import inspect
import re
import sys

import pytest
import torch
import torch._dynamo.testing
from support.operators import MODULES, positional
from support.pinned import assert_pinned
from support.threads import in_threads
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_moe_mps.ops import OPERATORS, PUBLIC
from torch_moe_mps.ops._registry import DECLARED
from torch_moe_mps.ops._samples import CALLS, copies, more_samples, packet, sample_arguments
from torch_moe_mps.ops.families.norms import rms_norm

X, W, EPS = torch.ones(2, 8), torch.ones(8), {"norm_eps": 1e-6}
# What a schema does not take: the arguments of a call, and the rest of the error.
WRONG = {
    "array": ("rms_norm", (X.numpy(), W), EPS, "x must be a tensor, got ndarray"),
    "second array": ("rms_norm", (X, X.numpy()), EPS, "norm_weight must be a tensor, got ndarray"),
    "list": ("rms_norm", ([1.0], W), EPS, "x must be a tensor, got list"),
    "number": ("rms_norm", (X, 1.0), EPS, "norm_weight must be a tensor, got 1.0"),
    "text": ("rms_norm", (X, W), {"norm_eps": "1e-6"}, "norm_eps must be a number, got '1e-6'"),
    "None": ("rms_norm", (X, W), {"norm_eps": None}, "norm_eps must be a number, got None"),
    "float": ("moe_router", (X, 2.0), {"scoring": "softmax"}, "top_k must be an integer, got 2.0"),
    "bool": ("moe_router", (X, True), {"scoring": "softmax"}, "top_k must be an integer, got True"),
    "tensor": (
        "moe_router", (X, torch.tensor(2)), {"scoring": "softmax"}, "top_k must be an integer, got Tensor"
    ),
    "no text": ("moe_router", (X, 2), {"scoring": 3}, "scoring must be a text, got 3"),
    "no bool": (
        "moe_router", (X, 2), {"scoring": "softmax", "norm_topk_prob": "yes"},
        "norm_topk_prob must be True or False, got 'yes'",
    ),
    "missing": ("rms_norm", (X, W), {}, "norm_eps must be a number, got nothing"),
    "missing tensor": ("rms_norm", (), EPS, "x must be a tensor, got nothing"),
    "missing option": (
        "moe_gate", (X, X, W, W, 2), EPS, "renormalize_after_scale must be True or False, got nothing"
    ),
    "without its name": (
        "rms_norm", (X, W, 1e-6), {}, "arguments without a name must be at most 2 (x, norm_weight), got 3"
    ),
    "unknown": (
        "rms_norm", (X, W), {"epsilon": 1e-6},
        "arguments must be some of x, norm_weight, norm_eps, norm_weight_offset, factor, got 'epsilon'",
    ),
    "twice": (
        "rms_norm", (X, W), EPS | {"x": X}, "x must be given once, got it by its place and by its name"
    ),
    "written": (
        "weighted_sum_residual_norm_stacked_", ([], X, W, W), EPS, "residual_ must be a tensor, got list"
    ),
}  # fmt: skip


@pytest.mark.parametrize("operator, args, kwargs, text", WRONG.values(), ids=WRONG)
def test_arguments_that_a_schema_does_not_take(operator, args, kwargs, text):
    """One line in place of torch's, in front of a call and behind one that was right."""
    with pytest.raises(TypeError) as error:
        PUBLIC[operator](*args, **kwargs)
    assert str(error.value) == f"moe_mps::{operator}: {text}" and error.value.__suppress_context__


@pytest.mark.parametrize("name", OPERATORS)
def test_eps_is_not_negative(name):
    arguments = sample_arguments(name, "cpu", torch.float32)
    for eps in (argument.name for argument in packet(name).default._schema.arguments):
        if eps.endswith("eps"):
            with pytest.raises(ValueError, match=f"^moe_mps::{name}: {eps} must be at least 0.0, got -1.0$"):
                packet(name)(**copies(arguments) | {eps: -1.0})


def test_samples_cover_every_operator():
    assert set(CALLS) == set(OPERATORS)


@pytest.mark.pinned
def test_schemas():
    """Schemas of public operators stay as they are."""
    lines = [f"{packet(name).default._schema}\n" for name in sorted(PUBLIC)]
    assert_pinned("schemas", "operators", "".join(lines))


ALL_UTILS = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")


@pytest.mark.slow("torch compiles every sample")
@pytest.mark.on("mps")
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.sweep)])
def test_opcheck(device, name, dtype):
    """Every sample: schema, fake tensors, what is registered for autograd, and calls that are compiled."""
    base = sample_arguments(name, device, dtype)
    for changes in ({}, *more_samples(name, device, dtype)):
        args, kwargs = positional(name, copies({**base, **changes}))
        torch.library.opcheck(packet(name).default, args, kwargs, test_utils=ALL_UTILS)


def with_symbols(mode: FakeTensorMode, argument: str, value):
    """A fake tensor whose sizes are symbols, or a symbol for an integer; lists of them too."""
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value)
    if isinstance(value, list):
        return [with_symbols(mode, f"{argument}{number}", each) for number, each in enumerate(value)]
    if type(value) is not int:
        return value
    source = ConstantSource(argument)
    symbol = mode.shape_env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
    return mode.shape_env.create_symintnode(symbol, hint=value, source=source)


def layout_of(tensor: torch.Tensor) -> tuple:
    """Sizes, dtype, and the strides of dimensions that have several elements."""
    sizes = tuple(map(int, tensor.shape))
    strides = [int(stride) for size, stride in zip(sizes, tensor.stride(), strict=True) if size > 1]
    return sizes, tensor.dtype, strides


def results_of(name: str, arguments: dict) -> list[torch.Tensor]:
    """Results, and what is written."""
    results = packet(name)(**arguments)
    results = [results] if isinstance(results, torch.Tensor) else list(results or ())
    return results + [value for n, value in arguments.items() if n.endswith("_") and value is not None]


def samples_of(name: str, dtype: torch.dtype = torch.float32) -> list[dict]:
    base = sample_arguments(name, "cpu", dtype)
    return [base | changes for changes in ({}, *more_samples(name, "cpu", dtype))]


@pytest.mark.parametrize("name", OPERATORS)
def test_the_default_dtype_changes_nothing(name):
    for arguments in samples_of(name):
        expected = results_of(name, copies(arguments))
        for default in (torch.float64, torch.float16):
            torch.set_default_dtype(default)
            try:
                found = results_of(name, copies(arguments))
            finally:
                torch.set_default_dtype(torch.float32)
            for one, other in zip(found, expected, strict=True):
                assert one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("name", OPERATORS)
def test_results_have_memory_of_their_own(name):
    for arguments in samples_of(name):
        given = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        written = [value for argument, value in arguments.items() if argument.endswith("_")]
        results = results_of(name, arguments)[: -len(written) or None]
        memories = {tensor.untyped_storage().data_ptr() for tensor in given}
        assert not any(t.numel() and t.untyped_storage().data_ptr() in memories for t in results)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_call_is_traced(name):
    """With sizes and integers that are symbols, results have the layout of a call's.

    Calls are compiled for each set of tensors that they write: functionalisation depends on nothing else, and
    test_compile.py has it of operators that write none.
    """
    base, compiled = sample_arguments(name, "cpu", torch.float32), {()}
    for changes in ({}, *more_samples(name, "cpu", torch.float32)):
        given = base | changes
        results = packet(name)(**copies(given))
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            fake = packet(name)(**{each: with_symbols(mode, each, value) for each, value in given.items()})
        layouts = [
            [layout_of(each) for each in tree_leaves(of) if each is not None] for of in (fake, results)
        ]
        assert layouts[0] == layouts[1], changes
        written = (*(each for each, value in given.items() if each.endswith("_") and value is not None),)
        if written not in compiled:
            compiled.add(written)
            args, kwargs = positional(name, copies(given))
            torch.library.opcheck(packet(name).default, args, kwargs, test_utils="test_aot_dispatch_dynamic")


def test_integers_may_be_symbols():
    """Sizes, counts and positions of all schemas: one graph for all numbers of experts a token."""
    for name in OPERATORS:
        assert re.search(r"\bint\b", str(packet(name).default._schema)) is None, name
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(
        torch.ops.moe_mps.moe_router_topk_softmax, backend=counter, fullgraph=True, dynamic=True
    )
    logits = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    for top_k in (2, 3, 7):
        weights, ids = compiled(logits, top_k, norm_topk_prob=False)
        expected = logits.softmax(-1).topk(top_k)
        torch.testing.assert_close(weights, expected.values)
        assert torch.equal(ids.long(), expected.indices)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", [name for name in OPERATORS if name.endswith("_")])
def test_operators_that_write(name):
    """The schema returns new tensors alone; the function returns what it wrote if there are none."""
    schema, good = packet(name).default._schema, sample_arguments(name, "cpu", torch.float32)
    written = [argument.name for argument in schema.arguments if argument.alias_info is not None]
    assert written == [argument.name for argument in schema.arguments if argument.name.endswith("_")] != []
    assert all(result.alias_info is None for result in schema.returns)
    function = next(getattr(module, name) for module in MODULES if hasattr(module, name))
    given = copies(good)
    results = function(**given)
    results = results if isinstance(results, tuple) else (results,)
    addresses = {given[each].data_ptr() for each in written if given.get(each) is not None}
    returned = {result.data_ptr() for result in results if isinstance(result, torch.Tensor)}
    assert (returned <= addresses) if not schema.returns else not (returned & addresses)
    tensors = [each for each, value in good.items() if isinstance(value, torch.Tensor)]
    others = {each: value for each, value in good.items() if each not in tensors}
    stacked = [torch.stack((good[each], good[each])) for each in tensors]
    with pytest.raises(
        NotImplementedError, match=f"^moe_mps::{name}: vmap is not implemented .*{written[0]}"
    ):
        torch.func.vmap(lambda *rows: packet(name)(**dict(zip(tensors, rows, strict=True)), **others))(
            *stacked
        )


def test_only_operators_that_write_have_the_name():
    for name in OPERATORS:
        arguments = packet(name).default._schema.arguments
        assert name.endswith("_") == any(argument.alias_info is not None for argument in arguments), name


# One tensor, several, none.
EACH_KIND = ("rms_norm", "rope", "_write_cache_quantized_")


@pytest.mark.on("mps")
@pytest.mark.parametrize("name", EACH_KIND)
def test_keyword_and_positional_calls_agree(device, name):
    """By keyword, by position, and through the public function."""
    base = sample_arguments(name, device, torch.float32)
    module = next(module for module in MODULES if hasattr(module, name))
    args, kwargs = positional(name, copies(base))
    function, given = getattr(module, name), copies(base)
    result, by_keyword = function(**given), packet(name)(**copies(base))
    torch.testing.assert_close(packet(name)(*args, **kwargs), by_keyword, rtol=0, atol=0)
    if by_keyword is None and result is not None:  # as torch's in-place operators, it returns what it wrote
        written = [given[argument] for argument in given if argument.endswith("_")]
        assert all(a is b for a, b in zip(written, result if len(written) > 1 else [result], strict=True))
    else:
        torch.testing.assert_close(result, by_keyword, rtol=0, atol=0)


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


@pytest.mark.on("mps")
@pytest.mark.parametrize("name", EACH_KIND)
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

    def work(names):
        for name in 3 * [*names]:
            torch.testing.assert_close(packet(name)(**copies(arguments[name])), alone[name], rtol=0, atol=0)

    in_threads(lambda: work(OPERATORS), lambda: work(OPERATORS[::-1]))


@pytest.mark.parametrize("name", OPERATORS)
def test_every_tensor_is_declared(name):
    """But scales and zeros, whose shapes and dtypes are those of a format."""
    arguments = packet(name).default._schema.arguments
    formats = ("scales", "zeros") if any(argument.name == "format" for argument in arguments) else ()
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
        torch.testing.assert_close(rms_norm(x, weight, norm_eps=1e-6), expected)
        with Mode():
            torch.testing.assert_close(rms_norm(x, weight, norm_eps=1e-6), expected)
        assert seen[0] == "moe_mps.rms_norm.default"
        with torch.profiler.profile() as profile:
            rms_norm(x, weight, norm_eps=1e-6)
        assert "moe_mps::rms_norm" in [event.name for event in profile.events()]
        mapped = torch.func.vmap(lambda row: rms_norm(row[None], weight, norm_eps=1e-6)[0])(x)
        torch.testing.assert_close(mapped, expected)
        assert rms_norm(x.to("meta"), weight.to("meta"), norm_eps=1e-6).is_meta
        for wrong, message in (
            (weight[:5], "weight must be of shape"),
            (weight.to("meta"), "on the device of"),
        ):
            with pytest.raises(ValueError, match=message):
                rms_norm(x, wrong, norm_eps=1e-6)
        called = set[str]()
        for _ in range(2):  # the second time it is known, also by the name of a default
            called.clear()
            sys.setprofile(lambda frame, *_: called.add(frame.f_code.co_name))
            try:
                rms_norm(x, weight, norm_eps=1e-6, factor=1.0)
            finally:
                sys.setprofile(None)
        assert "rms_norm" in called and "autograd" not in called
    with pytest.raises(RuntimeError, match="moe_mps::rms_norm: backward is not implemented"):
        rms_norm(x.requires_grad_(), weight, norm_eps=1e-6).sum().backward()


OF_WEIGHTS = [name for name in PUBLIC if {"x", "format"} <= {*inspect.signature(PUBLIC[name]).parameters}]


@pytest.mark.on("mps")
@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_what_infinity_makes_is_documented(device, name):
    """Where Metal gives NaN and the formula does not, the operator's text says so."""
    is_documented = "infinite element" in PUBLIC[name].__doc__
    for arguments in samples_of(name):
        if arguments["x"].numel() == 0:
            continue
        arguments["x"][..., 0] = torch.inf
        on_cpu = results_of(name, copies(arguments))
        placed = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
        for mine, other in zip(results_of(name, placed), on_cpu, strict=True):
            assert is_documented or not (mine.cpu().isnan() & ~other.isnan()).any()
