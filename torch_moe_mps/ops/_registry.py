"""Registers the operators `torch.ops.moe_mps.*`: one schema, meta function and reference each."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd import forward_ad

from ._checks import FLOAT32_MAX, Check, Like, dtype_name
from ._declared import Declared

NAMESPACE = "moe_mps"
Outputs: TypeAlias = Tensor | tuple[Tensor, ...] | None
# A keyword of a function. Its schema has the name, since torch reads a number for a dtype unchecked.
DtypeName: TypeAlias = str | torch.dtype
_NAMES: dict[Any, Any] = {DtypeName: str, DtypeName | None: str | None}  # {type in a function: in its schema}
Result = TypeVar("Result", bound=Outputs)
Arguments = ParamSpec("Arguments")
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
OPERATORS: list[str] = []
DECLARED: dict[str, Declared] = {}
_OPERATORS: "dict[str, Operator]" = {}
WITH_BACKWARD: dict[str, "Backward"] = {}
PUBLIC: dict[str, Callable[..., Any]] = {}
PUBLIC_FOR: dict[str, str] = {}  # {operator: the use that users have for it}
# Called with an operator and its arguments by name, which are good: the host has not seen such a call yet.
before_first_call: Callable[[str, dict[str, Any]], None] | None = None
PLAIN = (Tensor, torch.nn.Parameter)  # other types may stand for tensors
_STRIDED = torch.strided
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# Bound once: in a model's token, attributes of modules are cold.
_has_gradients = torch.is_grad_enabled
_has_autocast = torch._C._is_any_autocast_enabled
_has_dispatch_mode = torch._C._len_torch_dispatch_stack
_has_function_mode = torch._C._is_torch_function_mode_enabled
_has_transforms = torch._C._are_functorch_transforms_active
_has_profiler = torch._C._autograd._profiler_enabled
MAX_SIGNATURES = 4096  # for each operator, then they are noted anew: contexts grow with every token
_NO_BACKWARD = (
    "moe_mps::{}: backward is not implemented: run it under torch.no_grad(), or train with the operators of "
    "docs/operators.md, Training"
)
_NO_TRANSFORM = (
    "moe_mps::{}: gradients by torch.func (grad, vjp, jacrev) are not implemented: use backward() or "
    "torch.autograd.grad"
)
_NO_VMAP = "moe_mps::{}: vmap is not implemented for an operator that writes in place ({})"
_NO_SECOND_BACKWARD = (
    "moe_mps::{}: a backward of its backward is not implemented: gradients with create_graph=True have none"
)
# {type in a schema: how an error calls it, the types of Python}
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "Tensor": ("a tensor", (Tensor,)),
    "int": ("an integer", (int, torch.SymInt)),
    "float": ("a number", (int, float, torch.SymInt, torch.SymFloat)),
    "bool": ("True or False", (bool,)),
    "str": ("a text", (str,)),
}
_NO_GRADIENT_OF = "moe_mps::{}: backward is not implemented for {}, only for {}"


class Backward(NamedTuple):
    """The backward of an operator with one output.

    Attributes:
        run: called with the contiguous gradient of the output, the names of the arguments whose gradients are
            asked for, and all arguments by name; gives {name: gradient}. Of a tensor that `reads` does not
            name it has a `Like`. It calls operators, so that torch.compile sees them.
        reads: {argument with a gradient: the tensors whose elements that takes}.
        frozen: tensors without gradients, such as codes, which stay on the context: hooks of saved tensors,
            which copy or offload them, do not see them.
        unless: arguments beside which nothing has a gradient, if they are not None.
    """

    run: Callable[[Tensor, list[str], dict[str, Any]], dict[str, Tensor]]
    reads: dict[str, tuple[str, ...]]
    frozen: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()

    def lacks(self, name: str, asked: list[str], given: dict[str, Any]) -> str | None:
        """Error for unsupported gradients, or None."""
        unknown = [argument for argument in asked if argument not in self.reads]
        if unknown:
            return _NO_GRADIENT_OF.format(name, ", ".join(unknown), ", ".join(self.reads))
        beside = [argument for argument in self.unless if given[argument] is not None]
        return f"moe_mps::{name}: backward is not implemented with {', '.join(beside)}" if beside else None


def operator(
    tensors: str,
    meta: Callable | None = None,
    *,
    allowed: dict[str, Any] | None = None,
    dependences: tuple[str, ...] = (),
    backward: Backward | None = None,
    public: str | None = None,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Register the decorated reference implementation as `torch.ops.moe_mps.<its name>`.

    The schema is its signature. Arguments whose names end in `_` are written in place, and must share no
    memory with another argument.

    `tensors` declares shapes and dtypes (`_declared.py`), `allowed` what other arguments may be: one of some
    names, a range of integers, or the least number, which is 0 where a name ends in "eps"; `dependences`
    which of them are there only with others, or never beside them. `meta` receives a Check, which has the
    sizes by name, and all arguments by name; it raises the one-line error for what a declaration cannot say,
    and returns empty outputs unless they are declared. Both run in front of the reference, and are the
    operator on the meta device and in torch.compile. The Metal host calls them for every signature that it
    has not seen yet, so that bad arguments read the same on CPU, meta and MPS. Outputs are contiguous,
    whatever the strides of the inputs.

    `backward`: how gradients reach arguments; without it a backward pass raises an error by name.

    `public`: what users call it for. Its schema stays from then on. An operator without it serves this
    package, may change in any release, and has a name that begins with "_".

    The decorated name becomes a function that calls the operator, on whatever device its arguments are. An
    operator whose declared results are arguments that it writes has no result in its schema, since
    torch.compile takes no aliases from it; the function returns them.
    """

    def register(reference: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        least = {name: 0.0 for name in inspect.signature(reference).parameters if name.endswith("eps")}
        declared = Declared(tensors, least | (allowed or {}), dependences)
        made = Operator(reference, meta, declared, backward).register(public)
        return cast(Callable[Arguments, Result], made)

    return register


def door(
    private: Callable[..., Any], derived: Callable[..., dict[str, Any]] | None = None, *, public: str
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Register the decorated reference as the public operator that has some arguments of a private one.

    The declaration and the checks are those of `private`, whose other arguments have their defaults, or what
    `derived` makes of a Check and the arguments.
    """
    whole = _OPERATORS[private.__name__]

    def register(reference: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        names = inspect.signature(reference).parameters
        others = {name: default for name, default in whole.defaults.items() if name not in names}

        def meta(check: Check, **given: Any) -> Outputs:
            more = {} if derived is None else derived(check, **given)
            return None if whole.own_meta is None else whole.own_meta(check, **others | given | more)

        made = Operator(reference, meta, whole.declared.of(names), None).register(public)
        return cast(Callable[Arguments, Result], made)

    return register


def _fault_of(value: Any, expected: str, types: tuple[type, ...]) -> tuple[str, object] | None:
    """(what was expected, what came) of a value of another type, or out of range; None for a good one."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        is_plain = isinstance(value, (str, int, float, type(None)))
        return expected, repr(value) if is_plain else type(value).__name__
    if isinstance(value, int) and float in types and abs(value) > FLOAT32_MAX:
        return "a number in the range of float32", value
    if isinstance(value, int) and float not in types and not -(2**63) <= value < 2**63:
        return "an integer of 64 bits", value
    return None


class Operator:
    """Kernels of an operator, and the checks in front of them.

    Attributes:
        written: arguments that are written in place.
        returned: arguments among them that the Python function returns.
        types: {argument: its type in the schema}
        by_place: arguments that need no name.
        defaults: {argument: its default}
        checked: signatures whose arguments are good, as the Metal host has them.
    """

    def __init__(
        self,
        reference: Callable,
        meta: Callable | None,
        declared: Declared,
        backward: Backward | None,
    ) -> None:
        self.name, self.reference, self.own_meta = reference.__name__, reference, meta
        self.declared, self.backward, signature = declared, backward, inspect.signature(reference)
        self.written = [name for name in signature.parameters if name.endswith("_")]
        results = [name for name, *_ in declared.results or ()]
        self.returned = results if results and {*results} <= {*self.written} else []
        schema = _schema_of(signature, self.written, bool(self.returned))
        LIBRARY.define(self.name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(torch.ops.moe_mps, self.name).default
        arguments = self.overload._schema.arguments
        self.types = {argument.name: str(argument.type) for argument in arguments}
        self.by_place = [argument.name for argument in arguments if not argument.kwarg_only]
        self.defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
        self.checked: set[tuple] = set()
        self.without_dispatcher = self.checked_reference if self.written else self.on_cpu

    def register(self, public: str | None) -> Callable:
        """Function that calls the operator, after torch got its kernels."""
        assert self.name.startswith("_") == (public is None), self.name
        OPERATORS.append(self.name)
        DECLARED[self.name], _OPERATORS[self.name] = self.declared, self
        if self.backward is not None:
            WITH_BACKWARD[self.name] = self.backward
        LIBRARY.impl(self.name, self.checked_reference, "CPU")
        LIBRARY.impl(self.name, self.checked_reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", self.meta, lib=LIBRARY)
        LIBRARY.impl(self.name, self.autograd, "Autograd", with_keyset=True)
        if self.written:
            LIBRARY.impl(self.name, self.refuse_vmap, "FuncTorchBatched")
            torch.library.register_torch_dispatch(
                f"{NAMESPACE}::{self.name}", FunctionalTensorMode, self.functionalized, lib=LIBRARY
            )
        self.overload.overloadpacket.__doc__ = self.reference.__doc__
        result = self.call_that_returns_written() if self.returned else self.call_on_any_device()
        parameters = inspect.signature(self.reference).parameters
        dtypes = [name for name, each in parameters.items() if each.annotation in _NAMES]
        result = _with_names_of(dtypes, result) if dtypes else result
        if public is not None:
            PUBLIC[self.name], PUBLIC_FOR[self.name] = result, public
        return result

    def call_on_any_device(self) -> Callable:
        """Function that runs the reference for CPU tensors of a known signature, or the dispatcher."""
        packet = self.overload.overloadpacket
        reference, checked, may_change = self.reference, self.checked, bool(self.written)

        @functools.wraps(self.reference)
        def call(*args, **kwargs):
            is_plain = not may_change and args and type(args[0]) in PLAIN and args[0].is_cpu
            try:
                # Dynamo, which traces this call, must not read `checked`: it would guard on what eager calls
                # have added.
                if not is_plain or not nothing_between():
                    return packet(*args, **kwargs)
                # The dispatcher drops defaults: a signature that names one is known by this call alone.
                signature = _signature_on_cpu(args, kwargs)
                if signature in checked:
                    return _contiguous(reference(*args, **kwargs))
                outputs = packet(*args, **kwargs)
                if signature is not None:
                    self.remember(signature)
                return outputs
            except (TypeError, RuntimeError):  # torch's words for arguments that are not the schema's
                self.require_types(args, kwargs)
                raise

        return call

    def call_that_returns_written(self) -> Callable:
        """Function that calls the dispatcher, and returns the arguments that were written in place."""
        packet = self.overload.overloadpacket

        @functools.wraps(self.reference)
        def call_and_return(*args, **kwargs):
            try:
                packet(*args, **kwargs)
            except (TypeError, RuntimeError):
                self.require_types(args, kwargs)
                raise
            passed = self.named(args, kwargs)
            results = tuple(passed[name] for name in self.returned)
            return results if len(results) > 1 else results[0]

        return call_and_return

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name."""
        return {**self.defaults, **dict(zip(self.types, args, strict=False)), **kwargs}

    def require_types(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises: TypeError, one line, for arguments that the schema does not take."""

        def fail(what: str, expected: str, got: object) -> NoReturn:
            raise TypeError(f"moe_mps::{self.name}: {what} must be {expected}, got {got}") from None

        if len(args) > len(self.by_place):
            places = ", ".join(self.by_place)
            fail("arguments without a name", f"at most {len(self.by_place)} ({places})", len(args))
        for name in kwargs:
            if name not in self.types:
                fail("arguments", f"some of {', '.join(self.types)}", repr(name))
            if name in list(self.types)[: len(args)]:
                fail(name, "given once", "it by its place and by its name")
        passed = self.named(args, kwargs)
        for name, kind in self.types.items():
            expected, types = _TYPES[kind.removeprefix("Optional[").removesuffix("]")]
            if name not in passed:
                fail(name, expected, "nothing")
            is_absent = passed[name] is None and (kind.startswith("Optional") or kind == "Tensor")
            # The checks name an absent tensor.
            if not is_absent and (fault := _fault_of(passed[name], expected, types)) is not None:
                fail(name, *fault)

    def meta(self, *args: Any, **kwargs: Any) -> Outputs:
        """Outputs without elements. Raises the one-line errors for arguments."""
        passed = self.named(args, kwargs)
        outputs = self.made(passed)
        if before_first_call is not None:
            before_first_call(self.name, passed)
        return outputs

    def made(self, passed: dict[str, Any]) -> Outputs:
        """Outputs without elements for arguments by name; nobody who waits for first calls is told."""
        check = Check(self.name)
        check.values(self.types, passed)
        self.declared.check(check, passed)
        outputs = None if self.own_meta is None else self.own_meta(check, **passed)
        if self.declared.results is not None and not self.returned:
            outputs = self.declared.outputs(check, passed)
        for argument in self.written:
            if passed[argument] is not None:
                check.written(argument, passed[argument])
        check.same_device(**{name: passed[name] for name, kind in self.types.items() if "Tensor" in kind})
        return outputs

    def run(self, *args: Any, **kwargs: Any) -> Outputs:
        if torch._C._is_any_autocast_enabled():  # the references compute in the dtypes that they document
            with torch.autocast(_device_of(args), enabled=False):
                return _contiguous(self.reference(*args, **kwargs))
        return _contiguous(self.reference(*args, **kwargs))

    def checked_reference(self, *args: Any, **kwargs: Any) -> Outputs:
        self.meta(*args, **kwargs)
        if self.written:
            Check(self.name).all_apart(self.written, self.named(args, kwargs))
        if _device_of(args) == "mps":
            _warn_mps_reference()
        outputs = self.run(*args, **kwargs)
        return None if self.returned else outputs

    def on_cpu(self, *args: Any, **kwargs: Any) -> Outputs:
        """Outputs of the reference, which checks dense tensors on the CPU once for each signature."""
        signature = _signature_on_cpu(args, kwargs)
        if signature is None:
            return self.checked_reference(*args, **kwargs)
        if signature not in self.checked:
            self.meta(*args, **kwargs)
            self.remember(signature)
        return self.run(*args, **kwargs)

    def remember(self, signature: tuple) -> None:
        """Notes that calls of a signature need no checks on the CPU."""
        if len(self.checked) >= MAX_SIGNATURES:
            self.checked.clear()
        self.checked.add(signature)

    def autograd(self, keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Outputs:
        """The kernel for the Autograd keys, which lets inference through.

        Where nothing lies between it and the CPU's kernel it calls that by itself, which takes less time.
        Where gradients are needed it runs the declared backward, or makes the backward pass fail by name.
        """
        below = keyset & torch._C._after_autograd_keyset

        def call():
            with torch._C._AutoDispatchBelowAutograd():
                return self.overload.redispatch(below, *args, **kwargs)

        if forward_ad._current_level < 0 and not torch.is_grad_enabled():
            if below != _CPU:
                return call()
            with torch._C._AutoDispatchBelowAutograd():
                return self.without_dispatcher(*args, **kwargs)
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        _check_no_tangents(self.name, tensors)
        needs_grad = [t for t in tensors if t.requires_grad]
        if not (needs_grad and torch.is_grad_enabled()):
            return call()
        if torch._C._are_functorch_transforms_active():
            error = _NO_BACKWARD if self.backward is None else _NO_TRANSFORM
            raise NotImplementedError(error.format(self.name))
        return self._differentiable(call, needs_grad, args, kwargs)

    def functionalized(
        self,
        mode: Any,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Outputs:
        """The call in a graph without writes, which torch.compile makes.

        Inductor writes a view at the start of its memory if its offset is a symbol (torch 2.13), so that a
        copy of such a view is written, and copied back. Inductor drops a mere clone, hence one more element.
        """
        passed = self.named(args, kwargs or {})
        views = [
            name
            for name in self.written
            if passed[name] is not None and isinstance(passed[name].storage_offset(), torch.SymInt)
        ]
        if not views:
            return mode.__torch_dispatch__(func, types, args, kwargs)
        with mode:
            copies = {
                name: torch.cat((view.flatten(), view.new_zeros(1)))[:-1].view(view.shape)
                for name, view in ((name, passed[name]) for name in views)
            }
            outputs = func(**passed | copies)
            for name in views:
                passed[name].copy_(copies[name])
        return outputs

    def refuse_vmap(self, *args: Any, **kwargs: Any) -> NoReturn:
        """torch's own rule would call an operator row by row, and has none for arguments that are written."""
        raise NotImplementedError(_NO_VMAP.format(self.name, ", ".join(self.written)))

    def _differentiable(
        self, call: Callable, needs_grad: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Outputs:
        """Outputs with the operator's backward, or with a backward that raises the reason for its absence."""
        error, passed = _NO_BACKWARD.format(self.name), self.named(args, kwargs)
        if self.backward is not None:
            asked = [n for n, value in passed.items() if isinstance(value, Tensor) and value.requires_grad]
            lacking = self.backward.lacks(self.name, asked, passed)
            if lacking is None:
                tensors = [passed[name] for name in asked]
                return _WithBackward.apply(self.name, call, self.backward, passed, asked, *tensors)
            error = lacking
        if self.written:
            self.made(passed)
            self._mark_written(error, passed, needs_grad)
        outputs = _NoBackward.apply(error, call, *needs_grad)
        return outputs if len(self.overload._schema.returns) > 1 else (outputs[0] if outputs else None)

    def _mark_written(self, error: str, passed: dict[str, Any], needs_grad: list[Tensor]) -> None:
        """Makes backward passes through what is written in place fail.

        It comes in front of the writing, which torch forbids for some tensors. Each has a Function of its
        own: one that writes a view may have no other result.
        """
        for name in self.written:
            if passed[name] is None:
                continue
            try:
                _Written.apply(error, passed[name], *needs_grad)
            except RuntimeError as refused:
                why = str(refused).splitlines()[0]
                raise RuntimeError(
                    f"moe_mps::{self.name}: {name} cannot be written in place where gradients are recorded, "
                    f"run the operator under torch.no_grad(): {why}"
                ) from None


def _check_no_tangents(name: str, tensors: list[Tensor]) -> None:
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(
            f"moe_mps::{name}: forward-mode differentiation is not implemented, the operators are for "
            "inference"
        )


def nothing_between() -> bool:
    """True if torch would call a tensor's kernel and nothing else: no mode, transform, gradient or profiler.

    Then its dispatcher is left out, which takes longer than many a reference.
    """
    return not (
        torch.compiler.is_compiling()
        or _has_gradients()
        or forward_ad._current_level >= 0
        or _has_dispatch_mode()
        or _has_function_mode()
        or _has_transforms()
        or _has_profiler()
        or _has_autocast()
    )


def _signature_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple | None:
    """Dtypes and shapes of tensors, and other arguments; None unless every tensor is a plain, dense one."""
    signature: list[Any] = [*kwargs]
    for value in (*args, *kwargs.values()):
        if type(value) in PLAIN:
            if not value.is_cpu or value.layout is not _STRIDED:
                return None
            signature.append((value.dtype, value.shape))
        elif isinstance(value, Tensor):
            return None
        else:
            signature.append(value)
    return tuple(signature)


def _schema_of(signature: inspect.Signature, written: list[str], is_without_results: bool) -> str:
    def function() -> None: ...

    if is_without_results:
        signature = signature.replace(return_annotation=None)
    named = [
        each.replace(annotation=_NAMES.get(each.annotation, each.annotation))
        for each in signature.parameters.values()
    ]
    signature = signature.replace(parameters=named)
    vars(function)["__signature__"] = signature
    return torch.library.infer_schema(function, mutates_args=written)


def _with_names_of(dtypes: list[str], call: Callable) -> Callable:
    """The function, which takes dtypes for some keywords, and calls another with their names."""

    @functools.wraps(call)
    def call_with_names(*args: Any, **kwargs: Any) -> Any:
        for name in dtypes:
            if isinstance(kwargs.get(name), torch.dtype):
                kwargs[name] = dtype_name(kwargs[name])
        return call(*args, **kwargs)

    return call_with_names


def _device_of(arguments: tuple[Any, ...]) -> str:
    return next(value.device.type for value in arguments if isinstance(value, Tensor))


def _contiguous(outputs: Outputs) -> Outputs:
    if isinstance(outputs, tuple):
        return tuple(output.contiguous() for output in outputs)
    return outputs if outputs is None else outputs.contiguous()


@functools.cache
def _warn_mps_reference() -> None:
    warnings.warn(
        "torch_moe_mps: the Metal extension is not loaded; operators on MPS tensors run their reference in "
        "plain PyTorch, which is slow. Install torch-moe-mps again",
        stacklevel=2,
    )


class _NoBackward(torch.autograd.Function):
    """Runs an operator in the autograd graph; its backward raises instead of dropping gradients silently."""

    @staticmethod
    def forward(ctx, error, call, *tensors):
        ctx.error = error
        outputs = call()
        outputs = () if outputs is None else outputs if isinstance(outputs, tuple) else (outputs,)
        ctx.mark_non_differentiable(*(t for t in outputs if not t.dtype.is_floating_point))
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(ctx.error)  # PyTorch raises this class on mps


class _Written(_NoBackward):
    """The same for a tensor that an operator is about to write."""

    @staticmethod
    def forward(ctx, error, written, *tensors):
        ctx.error = error
        ctx.mark_dirty(written)
        return written


class _WithBackward(torch.autograd.Function):
    """Runs an operator in the autograd graph, with the backward that it declares."""

    @staticmethod
    def forward(ctx, name, call, backward, given, asked, *tensors):
        read = {name for argument in asked for name in backward.reads[argument]}
        ctx.saved = [name for name in read if given[name] is not None and name not in backward.frozen]
        ctx.save_for_backward(*(given[name] for name in ctx.saved))
        ctx.name, ctx.asked, ctx.run = name, asked, backward.run
        ctx.arguments = {
            name: Like(value.shape, value.dtype) if isinstance(value, Tensor) and name not in read else value
            for name, value in given.items()
            if name not in ctx.saved
        }
        return call()

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors
        passed = ctx.arguments | dict(zip(ctx.saved, saved, strict=True))
        with torch.no_grad():
            gradients = ctx.run(grad.contiguous(), ctx.asked, passed)
        results = tuple(gradients[name] for name in ctx.asked)
        if torch.is_grad_enabled():
            results = _NoBackward.apply(_NO_SECOND_BACKWARD.format(ctx.name), lambda: results, grad, *saved)
        return (None,) * 5 + results
