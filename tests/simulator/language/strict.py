"""The strict check: would Apple's compiler accept this shader, as far as we can know without it?

1. Address spaces: clang's OpenCL C++ front end, which has them, checks the source with every kernel
   instantiated: no pointer or reference without an address space, none of one where another is expected.
2. Language: nothing outside of Metal 3.1 (C++14 with `if constexpr`; no lambdas, double, recursion, goto,
   derived classes), no implicit conversion to bfloat, no constant that is aligned or has elements of another.
   A source that includes MetalPerformancePrimitives may use the tensors of Metal 4.0, too. Nor what Apple's
   compiler is known to miscompile: threadgroups of 32 threads as the declared most, a return that depends on
   dynamic threadgroup memory, and device memory that a loop reads and writes again without a barrier.
3. Vocabulary: whatever the source uses of Metal's library also occurs in Metal sources that Apple's compiler
   is known to accept (MLX's kernels, PyTorch's c10/metal), or in the specification (vocabulary.py).

    python -m simulator.language.strict FILE...       (with tests/ on PYTHONPATH)
"""

import functools
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from .. import build
from ..errors import ShaderError
from .tokens import is_identifier, is_space
from .translate import Translator
from .vocabulary import VECTOR, Location, accepted_words, check_vocabulary

STRICT = build.MSL / "strict"
ADDRESS_SPACES = {
    "device": "STRICT_DEVICE",
    "constant": "STRICT_CONSTANT_SPACE",
    "threadgroup": "__local",
    "thread": "__private",
}
PRINTED = {
    "__global_device": "device",
    "__global_host": "constant",
    "__constant": "constant",
    "__local": "threadgroup",
    "__private": "thread",
    "__generic ": "",
}
DISABLED = "-__opencl_c_program_scope_global_variables,-__opencl_c_device_enqueue,-__opencl_c_pipes"
OPENCL_KEYWORDS = {"local", "global", "private", "generic", "pipe", "uniform", "read_only", "write_only"}
LANGUAGE_WORDS = {
    "double": "double does not exist in Metal",
    "goto": "goto is not allowed",
    "try": "exceptions do not exist in Metal",
    "throw": "exceptions do not exist in Metal",
    "catch": "exceptions do not exist in Metal",
    "virtual": "virtual functions do not exist in Metal",
    "std": "the standard library is not available",
    "new": "there is no dynamic memory",
    "delete": "there is no dynamic memory",
    "dynamic_cast": "there is no run-time type information",
    "typeid": "there is no run-time type information",
    "asm": "there is no inline assembly",
    "thread_local": "there is no thread-local storage",
    "vertex": "a keyword of Metal",
    "fragment": "a keyword of Metal",
}


GRID_ATTRIBUTES = {
    "thread_position_in_grid",
    "threads_per_grid",
    "threadgroup_position_in_grid",
    "threadgroups_per_grid",
    "thread_position_in_threadgroup",
    "threads_per_threadgroup",
}


class StrictTranslator(Translator):
    """Keeps the address spaces, by OpenCL's names, and instantiates every kernel."""

    def run(self) -> str:
        self.take_declarations()
        self.rewrite_constructors()
        for i, token in enumerate(self.tokens):
            if token == "constant" and self.declares_variable(i):
                self.tokens[i] = "__constant"
            elif token in OPENCL_KEYWORDS:
                self.tokens[i] = token + "_"
            else:
                self.tokens[i] = ADDRESS_SPACES.get(token, token)
        names = dict.fromkeys(name for _, name, _ in self.instances)
        instances = "".join(f"template decltype({name}) {name};\n" for name in names)
        text = "".join(self.tokens)
        header = "metal_strict_tensor.h" if build.TENSORS in text else "metal_strict.h"
        return f'#include "{header}"\n{text}\n{instances}'

    def declares_variable(self, at: int) -> bool:
        """Whether this `constant` belongs to a variable of program scope, not to a pointer."""
        i = self.next(at)
        while i < len(self.tokens) and self.tokens[i] not in set(";={[()*&,>"):
            i = self.closing_angle(i) if self.tokens[i] == "<" else i
            i = self.next(i)
        return self.at(i) in {";", "=", "{", "["}

    def take_function_constants(self) -> None:
        """Declared without a value: a function constant is no constant expression."""
        for position, attributes in sorted(self.attributes.items()):
            if any(a.name == "function_constant" for a in attributes) and self.at(self.next(position)) == ";":
                name = self.previous(position)
                self.defined[self.tokens[name]] = True
                start = self.declaration_start(name)
                self.tokens[start] = "extern " + self.tokens[start]

    def parameters(self, start: int, end: int) -> tuple[list[str], list[str]]:
        """Positions and sizes of one kernel have as many components as each other."""
        types = {}
        for low, high in self.split(start, end):
            if any(a.name in GRID_ATTRIBUTES for a in self.attributes_in(low, high)):
                words = [token for token in self.tokens[low:high] if is_identifier(token)]
                types[words[-2]] = words[-1]
        if len(types) > 1:
            kinds = " and ".join(types)
            raise ShaderError(f"{self.line(start)}: error: the grid's attributes are {kinds} in one kernel")
        return super().parameters(start, end)

    def replace_variables(self, start: int) -> None:
        before = len(self.tokens[start])
        super().replace_variables(start)
        if len(self.tokens[start]) == before:
            return  # a pointer
        own = [low for low, high in self.bodies if low < start < high]
        if not own or any(
            self.tokens[i] == "{" and self.closing(i) > start for i in range(own[0] + 1, start)
        ):
            raise ShaderError(
                f"{self.line(start)}: error: threadgroup memory is declared outside of a kernel's first scope"
            )

    def variable(self, type_: str, name: str, dimensions: str) -> str:
        self.sites += 1
        alias = f"strict_type_{name}_{self.sites}"
        reference = f"__local {alias}& {name} = *(__local {alias}*)(__local void*)1"
        return f"typedef {type_} {alias}{dimensions}; {reference}"

    def rewrite_constructors(self) -> None:
        """float4(a, b) is no expression of OpenCL C++: it becomes strict_make<float4>(a, b)."""
        aliases = self.vector_aliases()
        i = 0
        while i < len(self.tokens):
            token = self.tokens[i]
            end = None
            if (VECTOR.match(token) and not token.startswith("packed")) or token in aliases:
                end = i
            elif token == "vec" and self.at(self.next(i)) == "<":
                end = self.closing_angle(self.next(i))
            if end is not None and self.at(self.next(end)) == "(" and self.is_expression(i):
                self.tokens[i] = "strict_make<" + self.tokens[i]
                self.tokens[end] += ">"
            i += 1

    def is_expression(self, at: int) -> bool:
        before = self.at(self.previous(at))
        return before not in {"<", "typedef", "using", "operator", "::"} and not (
            is_identifier(before or " ") and before not in {"return", "else", "constexpr"}
        )

    def vector_aliases(self) -> set[str]:
        """Names of `using X = vec<...>` or `using X = float4` and of typedefs of such."""
        text = "".join(self.tokens)
        target = r"(?:metal::)?(?:vec\s*<[^;]*>|(?:bool|u?(?:char|short|int|long)|half|bfloat|float)[234])"
        found = re.findall(rf"\busing\s+(\w+)\s*=\s*{target}\s*;", text)
        return {*found, *re.findall(rf"\btypedef\s+{target}\s+(\w+)\s*;", text)}


@functools.cache
def clangs_headers() -> Path:
    return Path(build.run([build.tool("clang++"), "-print-resource-dir"], "asking clang").strip(), "include")


def clang(arguments: list) -> subprocess.CompletedProcess:
    command = [
        build.tool("clang++"),
        "-cc1",
        "-triple",
        "x86_64-linux-gnu",
        "-x",
        "clcpp",
        "-cl-std=clc++2021",
    ]
    command += [
        "-cl-single-precision-constant",
        "-Wno-everything",
        "-Werror=c++11-narrowing",
        f"-I{STRICT}",
        f"-I{build.INCLUDE}",
        "-internal-isystem",
        clangs_headers(),
    ]
    return build.attempt([*command, *arguments])


def in_metal_terms(message: str) -> str:
    for opencl, metal in PRINTED.items():
        message = message.replace(opencl, metal)
    # A pointer variable itself is in the thread address space, which need not be said.
    message = re.sub(r"([*&])thread\b", r"\1", message)
    return message.replace("strict_make<", "").replace("program scope", "program-scope")


DECLARATION = re.compile(
    r"(?P<id>0x[0-9a-f]+) (?:parent \S+ )?(?:prev \S+ )?"
    r"<.*?> (?:(?:line|col)\S+|\S+:\d+:\d+) "
    r"(?P<words>[^']*)'(?P<type>[^']*)'(?P<after>.*)"
)
CALLED = re.compile(r"(?:Function|CXXMethod) (0x[0-9a-f]+)|->\S+ (0x[0-9a-f]+)")
FUNCTIONS = {"FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXConversionDecl"}
LOOPS = {"ForStmt", "WhileStmt", "DoStmt"}
# x[i] += y, and ++x[i], of device memory.
WRITTEN_AGAIN = re.compile(r"\S+ <.*?> '__global_device [^'*]+' .*(=|\+\+|--)'")


class Statements:
    """Loops and conditions around the current line of an AST dump."""

    def __init__(self, kernels: Collection[str]) -> None:
        self.kernels = kernels
        self.open: list[tuple[int, str, dict]] = []  # depth, kind, and what was seen inside
        self.in_kernel = False

    def advance(self, kind: str, rest: str, depth: int, where: str) -> list[str]:
        """Problems that this line completes."""
        problems = []
        while self.open and self.open[-1][0] >= depth:
            _, closed, seen = self.open.pop()
            if closed in LOOPS and not seen["barrier"]:
                problems += seen["written"]
            elif closed in LOOPS and self.open:
                self.open[-1][2]["barrier"] = True
        if kind == "FunctionDecl" and (name := re.match(r".* (\w+) '", rest)):
            self.in_kernel = name[1] in self.kernels
        if kind == "IfStmt" or kind in LOOPS:
            self.open.append((depth, kind, {"barrier": False, "written": [], "children": 0, "shared": False}))
            return problems
        if not self.open:
            return problems
        if "threadgroup_barrier" in rest and (loops := self.loops()):
            loops[-1]["barrier"] = True
        if kind in {"CompoundAssignOperator", "UnaryOperator"} and WRITTEN_AGAIN.match(rest):
            text = "a loop reads and writes device memory again without a barrier, which is miscompiled"
            for seen in self.loops()[-1:]:
                seen["written"].append(f"{where}: error: {text}")
        return problems + self.condition(kind, rest, depth, where) if self.in_kernel else problems

    def loops(self) -> list[dict]:
        return [seen for _, kind, seen in self.open if kind in LOOPS]

    def condition(self, kind: str, rest: str, depth: int, where: str) -> list[str]:
        at, seen = next(((at, seen) for at, kind, seen in reversed(self.open) if kind == "IfStmt"), (0, None))
        if seen is None:
            return []
        seen["children"] += depth == at + 2
        if seen["children"] == 1 and "ParmVar" in rest and "'__local " in rest:
            seen["shared"] = True
        if seen["children"] > 1 and seen["shared"] and kind == "ReturnStmt":
            return [f"{where}: error: a return that depends on dynamic threadgroup memory is miscompiled"]
        return []


def check_tree(dump: str, kernels: Collection[str] = ()) -> list[str]:
    """Pointers without an address space, lambdas, static locals, recursion, and what is miscompiled, from
    clang's AST dump."""
    problems, location = [], Location()
    statements = Statements(kernels)
    calls: dict[str, set[str]] = {}
    names: dict[str, str] = {}
    function, function_depth, before, pending = None, 0, "", None
    for line in dump.splitlines():
        where = location.advance(line)
        if location.is_ours:
            function = None
            continue
        node = line.lstrip("|` -")
        depth = len(line) - len(node)
        kind, _, rest = node.partition(" ")
        if function and depth <= function_depth:
            function = None
        problems += statements.advance(kind, rest, depth, where)
        if kind.endswith("Decl") and (declared := DECLARATION.match(rest)):
            words = declared["words"].split()
            if kind in FUNCTIONS:
                function, function_depth = declared["id"], depth
                names[function] = f"{where}: error: recursion: {words[-1] if words else '?'} calls itself"
                calls.setdefault(function, set())
            problems += check_declaration(kind, words, declared["type"], declared["after"], where, function)
        elif "LambdaExpr" in line:
            problems.append(f"{where}: error: lambda expressions are not in Metal 3.1")
        elif "<AddressSpaceConversion>" in line and "'<bound member function type>'" in before:
            pending = where
        elif pending:
            if space := re.search(r"'(?:const )?(__global_device|__global_host|__local) ", line):
                problems.append(
                    f"{pending}: error: a member function of 'thread' is called on a {space[1]} object"
                )
            pending = None
        before = line
        if function and kind in {"DeclRefExpr", "MemberExpr"}:
            for called in CALLED.findall(rest):
                calls[function].add(called[0] or called[1])
    problems += statements.advance("", "", 0, "")
    problems += [names[f] for f in recursive(calls) if f in names]
    return problems


def check_declaration(kind, words, type_, after, where, function) -> list[str]:
    if "implicit" in words or "implicit" in after.split():
        return []
    name = words[-1] if words else ""
    if kind in {"VarDecl", "ParmVarDecl", "FieldDecl", "TypedefDecl", "TypeAliasDecl"}:
        # In a template T* has no space at all, not even the generic one: T would take it from the argument.
        nowhere = is_pointer(type_) and not any(space in type_ for space in PRINTED)
        if ("__generic" in type_ or (nowhere and "decltype" not in type_)) and name not in {
            "used",
            "referenced",
            "",
        }:
            return [f"{where}: error: '{name}' points to no address space: {type_.replace('__generic ', '')}"]
        if kind == "VarDecl" and function and "static" in after.split():
            return [f"{where}: error: static local variables are not in Metal: '{name}'"]
    elif (
        kind in {"FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl"}
        and "__generic" in type_.rpartition(")")[0]
    ):
        return [f"{where}: error: '{name}' has a pointer or reference without an address space"]
    return []


def is_pointer(type_: str) -> bool:
    """Whether a printed type is a pointer or reference; template arguments and sizes may hold products."""
    while (shorter := re.sub(r"<[^<>]*>|\[[^\[\]]*\]", "", type_)) != type_:
        type_ = shorter
    return bool(re.search(r"[*&]", type_))


def recursive(calls: dict[str, set[str]]) -> list[str]:
    """Functions that reach themselves."""

    def reaches_itself(start: str) -> bool:
        seen, stack = set(), list(calls[start])
        while stack:
            node = stack.pop()
            if node == start:
                return True
            if node not in seen:
                seen.add(node)
                stack += calls.get(node, ())
        return False

    return [f for f in calls if calls[f] and reaches_itself(f)]


def syntax_tree(translator: StrictTranslator) -> subprocess.CompletedProcess:
    """clang's dump of a translated source, in which every kernel is instantiated, with its messages."""
    code = translator.run()
    with tempfile.TemporaryDirectory() as scratch:
        unit = Path(scratch) / "shader.clcpp"
        unit.write_text(code)
        return clang([f"-cl-ext={DISABLED}", "-ast-dump", unit])


def check_address_spaces(preprocessed: str) -> list[str]:
    translator = StrictTranslator(preprocessed, {})
    found = syntax_tree(translator)
    problems = [in_metal_terms(build.readable(found.stderr))] if found.returncode else []
    # A pointer that names no address space has clang's __generic one.
    found_in_tree = check_tree(found.stdout, translator.kernels)
    return problems + [in_metal_terms(p) for p in dict.fromkeys(found_in_tree)]


def names_something(translator: Translator, at: int) -> bool:
    """Whether a word that may stand in front of a function or in [[ ]] is a name here."""
    before, after = translator.at(translator.previous(at)), translator.at(translator.next(at))
    return before != "[" and after in set("=;()[.,")


def is_assignment_of_braces(translator: Translator, at: int) -> bool:
    """x = {...} without a type: Metal's structs have an assignment for each address space; all fit."""
    if translator.at(translator.next(at)) != "{":
        return False
    start = at
    while translator.at(translator.previous(start)) not in {";", "{", "}", ")", "else", ""}:
        start = translator.previous(start)
    first = start if not is_space(translator.tokens[start]) else translator.next(start)
    return translator.at(translator.next(first)) in {"=", "[", ".", "->"}


def derives(translator: Translator, at: int) -> bool:
    """Whether the struct or class at this keyword names another one that it derives from."""
    if translator.at(translator.previous(at)) in {"enum", "<", ","}:
        return False
    i = translator.next(at)
    while translator.at(i) not in {"", "{", ";", ":", "(", ")"}:
        i = translator.next(translator.closing_angle(i) if translator.at(i) == "<" else i)
    return translator.at(i) == ":"


def takes_elements(translator: Translator, at: int) -> bool:
    """Whether the initialiser of the variable at this `constant` has elements of an array."""
    i = translator.next(at)
    while translator.at(i) not in {"", "=", ";", "(", ")", "&", "*"}:
        i = translator.next(translator.closing_angle(i) if translator.at(i) == "<" else i)
    if translator.at(i) != "=":
        return False
    while translator.at(i) not in {"", ";"}:
        i = translator.next(i)
        if translator.at(i) == "[":
            return True
    return False


def check_constructs(translator: Translator, at: int) -> str | None:
    """What the specification excludes, and what Apple's compiler is not known to take."""
    token = translator.tokens[at]
    if token in {"struct", "class"} and derives(translator, at):
        return "derived classes are not in Metal"
    if token == "alignas" and translator.at(translator.previous(at)) not in {"struct", "class"}:
        return "'alignas' of a variable is not known to compile"
    if token == "constant" and takes_elements(translator, at):
        return "a constant made of another's elements is not known to compile"
    return None


def bounds(translator: Translator) -> str:
    """Assertions about the threads that kernels declare, for a translator that has run."""
    declared = [(k.name, k.max_threads) for k in translator.kernels.values() if not k.template]
    instances = [(name, translator.kernels[of]) for of, name, _ in translator.instances]
    declared += [(name, f"msl_max_threads_{name}") for name, k in instances if k.max_threads != "0"]
    text = "max_total_threads_per_threadgroup(32) is miscompiled"
    return "".join(f'static_assert(({number}) != 32, "{name}: {text}");\n' for name, number in declared)


def check_language(preprocessed: str) -> list[str]:
    translator = Translator(preprocessed, {})
    problems = []
    for i, token in enumerate(translator.tokens):
        if construct := check_constructs(translator, i):
            problems.append(f"{translator.line(i)}: error: {construct}")
        if message := LANGUAGE_WORDS.get(token):
            problems.append(f"{translator.line(i)}: error: '{token}': {message}")
        elif token == "kernel" and names_something(translator, i):
            problems.append(f"{translator.line(i)}: error: '{token}': a keyword of Metal")
        elif token == "=" and is_assignment_of_braces(translator, i):
            problems.append(
                f"{translator.line(i)}: error: braces are assigned to an object of several spaces"
            )
    folder, pch = build.prepared_headers()
    flags = [*build.LANGUAGE, *build.ARITHMETIC, *build.INSTRUMENTATION, *build.GENERATION]
    flags += ["-include-pch", pch, "-I", build.INCLUDE, "-I", folder, "-DMSL_KERNEL=-1", "-fsyntax-only"]
    flags += ["-Wno-everything", "-Wpre-c++17-compat", "-Wimplicit-float-conversion", "-x", "c++", "-"]
    flags = [f for f in flags if f != "-w"]
    code = build.in_language_of(preprocessed, translator.run()) + bounds(translator)
    found = build.attempt([build.tool("clang++"), *flags], input=code)
    for line in found.stderr.splitlines():
        if " error: " in line:
            problems.append(line)
        elif " warning: " in line and "/msl/include/" not in line and "kernel_table" not in line:
            to_bfloat = "conversion" in line and re.search(r"to '(bfloat|__bf16)|\(aka '__bf16'\)\s*\[", line)
            newer = "pre-c++17" in line and "constexpr if" not in line
            if to_bfloat or newer:
                problems.append(line.replace(" warning: ", " error: "))
    return problems


def check(source: str, include: tuple = (), name: str = "program_source") -> list[str]:
    """What is wrong with a shader's source, one text per problem; empty when nothing is."""
    try:
        text = build.preprocess(source, include, name)
        return build.kept(f"strict-{build.digest(text, identity())}", lambda: problems_of(text))
    except ShaderError as error:
        return [str(error)]


def check_together(sources: Sequence[str]) -> list[str]:
    """As `check`, of sources that include nothing. It takes a fraction of the time: see `joined`.

    The result is kept by the sources.
    """

    def problems() -> list[str]:
        texts = joined(map(build.preprocess, sources))
        return [problem for text in texts for problem in problems_of(text)]

    try:
        return build.kept(f"strict-{build.digest(*sources, identity())}", problems)
    except ShaderError as error:
        return [str(error)]


# A line at the end of a source that names a type or a number, or makes a kernel of a template.
ENDING = re.compile(r"\s*(#.*|typedef [^;]*;|constant constexpr [^;\[]*;|template\b.*;)?\s*")
NAMED = re.compile(r"^(?:typedef [^;]*?|constant constexpr [^;=]*?)\b(\w+)\s*(?:=[^;]*)?;", re.MULTILINE)
HOST_NAME = re.compile(r"\[\[host_name\([^)]*\)\]\]|^#.*\n", re.MULTILINE)


def joined(texts: Iterable[str]) -> list[str]:
    """Preprocessed sources that are the same but for their ends as one: what they share is looked at once.

    An end names types and numbers, which get another name in each, and makes kernels of templates. Of ends
    that differ only in the kernels' names one is looked at: a template is instantiated once for each type.
    """
    ends: dict[str, dict[str, str]] = {}
    for text in texts:
        lines = text.splitlines(keepends=True)
        count = len(lines)
        while count and ENDING.fullmatch(lines[count - 1]):
            count -= 1
        end = "".join(lines[count:])
        ends.setdefault("".join(lines[:count]), {})[HOST_NAME.sub("", end)] = end
    return [
        head + "".join(_with_own_names(end, number) for number, end in enumerate(all_ends.values()))
        for head, all_ends in ends.items()
    ]


def _with_own_names(end: str, number: int) -> str:
    for name in NAMED.findall(end):
        end = re.sub(rf"\b{name}\b", f"{name}_{number}", end)
    return end


@functools.cache
def identity() -> str:
    """Of all that the problems depend on beside the source."""
    programs = (*Path(__file__).parent.glob("*.py"), Path(build.__file__))
    files = build.files_digest(*STRICT.iterdir(), *programs)
    return build.digest(files, sorted(accepted_words()), *build.prepared_headers(), clangs_headers())


def problems_of(text: str) -> list[str]:
    problems = check_vocabulary(text) + check_language(text) + check_address_spaces(text)
    return list(dict.fromkeys(problems))


def check_file(path: Path) -> list[str]:
    return check(path.read_text(), (path.parent,), str(path))


def main(paths: list[str]) -> int:
    failed = 0
    for path in map(Path, paths):
        problems = check_file(path)
        failed += bool(problems)
        print(f"{path}: {'ok' if not problems else ''}")
        for problem in problems:
            print(f"  {problem}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
