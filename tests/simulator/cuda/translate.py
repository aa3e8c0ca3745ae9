"""Metal Shading Language to CUDA C++, with the parser of the simulator.

Input is preprocessed source. Attributes are read and dropped, address spaces are erased, threadgroup
variables become __shared__ ones, and an entry is appended for each kernel that is asked for. The program lies
inside namespace metal (include/metal_*.h), where Metal's names hide those of CUDA.
"""

import re
from dataclasses import dataclass, field

from ..build import TENSORS
from ..errors import ShaderError
from ..language.tokens import is_space
from ..language.translate import Kernel, Translator

FLOAT = re.compile(r"(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?|0[xX][\da-fA-F.]+[pP][+-]?\d+")
NARROW = {"h": "half", "H": "half", "bf": "bfloat", "BF": "bfloat"}
VALUES = {
    "thread_position_in_threadgroup": "Position{thread_position()}",
    "thread_position_in_grid": "Position{group_position() * group_size() + thread_position()}",
    "threadgroup_position_in_grid": "Position{group_position()}",
    "threads_per_threadgroup": "Position{group_size()}",
    "dispatch_threads_per_threadgroup": "Position{group_size()}",
    "threadgroups_per_grid": "Position{grid_size()}",
    "threads_per_grid": "Position{grid_size() * group_size()}",
    "thread_index_in_threadgroup": "thread_index()",
    "thread_index_in_simdgroup": "lane()",
    "thread_index_in_quadgroup": "lane() % 4",
    "quadgroup_index_in_threadgroup": "thread_index() / 4",
    "simdgroup_index_in_threadgroup": "thread_index() / 32",
    "simdgroups_per_threadgroup": "simdgroup_count()",
    "dispatch_simdgroups_per_threadgroup": "simdgroup_count()",
    "threads_per_simdgroup": "32u",
}


@dataclass
class Entry:
    """A kernel to be launched, and how: entries of one kernel differ in what is bound with setBytes.

    `instance` is a kernel's host name, or a template-id. `by_value` gives the lengths of the buffer arguments
    that are passed by value. The entry's parameters are `buffers` in ascending order (a pointer, or that many
    bytes), then the byte offsets of `threadgroups`, the [[threadgroup(n)]] arguments.
    """

    instance: str
    by_value: dict[int, int] = field(default_factory=dict)
    buffers: list[int] = field(default_factory=list)
    threadgroups: list[int] = field(default_factory=list)


class CudaTranslator(Translator):
    def run(self, entries: dict[str, Entry]) -> str:
        """The CUDA program with an `extern "C"` function for each entry, whose lists are filled in."""
        header = "metal_tensor.h" if TENSORS in self.tokens else "metal_matrix.h"
        self.take_declarations()
        self.erase_address_spaces()
        self.drop_repeated_overloads()
        self.replace_swizzles()
        self.rewrite_tokens()
        bounds = [
            f"{k.head} constexpr int threads_of_{k.name} = {k.max_threads};"
            for k in self.kernels.values()
            if k.max_threads != "0"
        ]
        functions = [self.entry(name, entry) for name, entry in entries.items()]
        program = "".join(self.tokens)
        return "\n".join([f'#include "{header}"', "namespace metal {", program, *bounds, *functions, "}", ""])

    @property
    def host_names(self) -> list[str]:
        kernels = [k.host_name or k.name for k in self.kernels.values() if not k.template]
        return kernels + [host_name or instance for _, instance, host_name in self.instances]

    # Entries --------------------------------------------------------------------------------------

    def find(self, instance: str) -> tuple[Kernel, str]:
        """The kernel and the expression that names its function."""
        for name, function, host_name in self.instances:
            if instance == host_name:
                return self.kernels[name], function
        for kernel in self.kernels.values():
            if instance == (kernel.host_name or kernel.name) and not kernel.template:
                return kernel, kernel.name
        name = instance.partition("<")[0]
        if "<" in instance and name in self.kernels:
            return self.kernels[name], instance
        raise ShaderError(f"there is no kernel {instance}; there are {', '.join(self.host_names)}")

    def entry(self, name: str, entry: Entry) -> str:
        kernel, function = self.find(entry.instance)
        arguments = [getter.split(":") for getter in kernel.getters]
        entry.buffers = sorted(int(a[1]) for a in arguments if a[0] in {"Pointer", "Reference"})
        entry.threadgroups = sorted(int(a[1]) for a in arguments if a[0] == "threadgroup")
        parameters = [
            f"const __grid_constant__ Bytes<{entry.by_value[i]}> b{i}"
            if i in entry.by_value
            else f"void* b{i}"
            for i in entry.buffers
        ]
        parameters += [f"uint t{i}" for i in entry.threadgroups]
        values = ", ".join(self.value(a, entry) for a in arguments)
        bound = ""
        if kernel.max_threads != "0":
            bound = f"__launch_bounds__(threads_of_{function}) "
        memory = "extern __shared__ __align__(16) uchar dynamic[]; " if entry.threadgroups else ""
        return (
            f'extern "C" __global__ {bound}void {name}({", ".join(parameters)}) '
            f"{{ {memory}{function}({values}); }}"
        )

    def value(self, argument: list[str], entry: Entry) -> str:
        kind, *index = argument
        if kind == "threadgroup":
            return f"Pointer{{dynamic + t{index[0]}}}"
        if kind in {"Pointer", "Reference"}:
            address = f"b{index[0]}.v" if int(index[0]) in entry.by_value else f"b{index[0]}"
            return f"{kind}{{{address}}}"
        return VALUES[kind]

    def getter(self, at: int, name: str, attributes: list) -> str:
        """How an argument is made: a key of VALUES, or "Pointer:3", "Reference:3", "threadgroup:0"."""
        for attribute in attributes:
            if attribute.name == "buffer":
                end = next(i for i in range(at, len(self.tokens)) if self.tokens[i] == name)
                kind = "Reference" if "&" in self.tokens[at:end] else "Pointer"
                return f"{kind}:{int(attribute.argument)}"
            if attribute.name == "threadgroup":
                return f"threadgroup:{int(attribute.argument)}"
            if attribute.name in VALUES:
                return attribute.name
        shown = ", ".join(a.name for a in attributes) or "none"
        raise ShaderError(
            f"{self.line(at)}: error: argument '{name}' has no known attribute (found: {shown})"
        )

    # Text -----------------------------------------------------------------------------------------

    def variable(self, type_: str, name: str, dimensions: str) -> str:
        return f"__shared__ __align__(16) {type_} {name}{dimensions}"

    def rewrite_tokens(self) -> None:
        for i, token in enumerate(self.tokens):
            if is_space(token):
                self.tokens[i] = pragma(token)
            elif token[0].isdigit() or token[0] == ".":
                self.tokens[i] = literal(token)
            elif (
                token == "metal" and self.at(self.previous(i)) == "namespace" and self.at(self.next(i)) == "{"
            ):
                self.tokens[self.previous(i)] = "inline namespace"  # it is inside of metal already
                self.tokens[i] = "additions"


def pragma(line: str) -> str:
    if not line.lstrip().startswith("#pragma"):
        return line
    return "#pragma unroll" if "unroll" in line else ""


def literal(token: str) -> str:
    """A literal without suffix is a float: Metal has no double."""
    for suffix, type_ in NARROW.items():
        if token.endswith(suffix) and FLOAT.fullmatch(token.removesuffix(suffix)):
            return f"{type_}({token.removesuffix(suffix)}f)"
    return token + "f" if FLOAT.fullmatch(token) else token


def translate(preprocessed: str, entries: dict[str, Entry], constants: dict | None = None) -> str:
    """The CUDA program of a preprocessed shader; `entries` names the functions that it is to export."""
    return CudaTranslator(preprocessed, constants or {}).run(entries)


def kernel_names(preprocessed: str) -> list[str]:
    """The host names of a shader's kernels."""
    translator = CudaTranslator(preprocessed, {})
    translator.take_declarations()
    return translator.host_names


def buffer_indices(preprocessed: str, kernel: str) -> dict[str, int]:
    """The indices of a kernel's buffer arguments, by their names."""
    translator = CudaTranslator(preprocessed, {})
    translator.take_declarations()
    taken = translator.kernels[kernel]
    places = zip(taken.arguments, (getter.split(":") for getter in taken.getters), strict=True)
    return {name: int(index[0]) for name, (kind, *index) in places if kind in {"Pointer", "Reference"}}
