"""The strict check: would Apple's compiler take this shader? What can be known of that without Apple's compiler.

1. Address spaces: clang's OpenCL C++ front end, which has them, checks the source with every kernel instantiated: no
   pointer or reference without an address space, none of one space where another is expected.
2. Language: nothing outside of Metal 3.1 (C++14 with `if constexpr`; no lambdas, double, recursion, goto, ...), and
   no implicit conversion to bfloat.
3. Vocabulary: whatever the source uses of Metal's library also occurs in Metal sources that Apple's compiler is known
   to accept (MLX's kernels, PyTorch's c10/metal), or in SPECIFIED with its section of the specification.

    python -m simulator.strict FILE...       (with tests/ on PYTHONPATH)
"""

import functools
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from . import build
from .errors import ShaderError
from .translate import TOKEN, Translator, is_identifier

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
OPENCL_KEYWORDS = set("local global private generic pipe uniform read_only write_only read_write".split())
# What the simulator's metal_stdlib offers and the known sources happen not to use, by the section of the Metal Shading
# Language Specification (3.1) that describes it.
SPECIFIED = {
    "6.2 Common functions": "mix saturate smoothstep",
    "6.3 Integer functions": "absdiff addsat clz extract_bits hadd insert_bits mad24 madhi mul24 mulhi popcount "
    "reverse_bits rhadd rotate subsat",
    "6.4 Relational functions": "all any isnormal",
    "6.5 Math functions": "ilogb modf",
    "6.5 Math constants": "FLT_DIG FLT_EPSILON FLT_MANT_DIG FLT_MAX FLT_MIN HALF_EPSILON HALF_MAX HALF_MIN "
    "HUGE_VALF MAXFLOAT MAXHALF M_1_PI_F M_2_PI_F M_2_SQRTPI_F M_E_F M_LOG10E_F M_PI_2_F "
    "M_PI_4_F M_SQRT1_2_F",
    "6.3 Integer constants": "CHAR_BIT CHAR_MAX CHAR_MIN INT_MAX INT_MIN LONG_MAX LONG_MIN SHRT_MAX SHRT_MIN UCHAR_MAX "
    "UINT_MAX ULONG_MAX USHRT_MAX",
    "6.7 SIMD-group matrix functions": "simdgroup_bfloat8x8 simdgroup_half8x8",
    "6.8 Geometric functions": "cross distance distance_squared length_squared normalize",
    "6.9.2 SIMD-group functions": "simd_active_threads_mask simd_and simd_broadcast_first simd_is_first simd_or simd_vote "
    "vote_t",
    "6.9.3 Quad-group functions": "quad_active_threads_mask quad_all quad_and quad_any quad_ballot quad_broadcast "
    "quad_broadcast_first quad_is_first quad_max quad_min quad_or quad_product quad_shuffle "
    "quad_shuffle_and_fill_down quad_shuffle_and_fill_up quad_shuffle_down "
    "quad_shuffle_rotate_down quad_shuffle_rotate_up quad_shuffle_up quad_shuffle_xor "
    "quad_vote quad_xor",
    "6.15 Atomic functions": "atomic_exchange_explicit atomic_fetch_sub_explicit atomic_fetch_xor_explicit "
    "atomic_thread_fence mem_texture memory_order thread_scope thread_scope_device "
    "thread_scope_simdgroup thread_scope_thread thread_scope_threadgroup",
    "2.6 Atomic data types": "atomic_bool atomic_float atomic_int atomic_uint atomic_ulong",
    "5.2.3.6 Kernel function input attributes": "dispatch_simdgroups_per_threadgroup dispatch_threads_per_threadgroup "
    "quadgroups_per_threadgroup threads_per_simdgroup",
}
# Vector types are named by rule (2.2 Vector data types, 2.2.3 Packed vector types).
VECTOR = re.compile(r"(packed_)?(bool|u?(char|short|int|long)|half|bfloat|float)[234]$")
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
}


class StrictTranslator(Translator):
    """Keeps the address spaces, by OpenCL's names, and instantiates every kernel."""

    def run(self) -> str:
        self.take_attributes()
        self.take_function_constants()
        self.take_kernels()
        self.take_instantiations()
        self.replace_threadgroup_variables()
        self.replace_constant_queries()
        self.rewrite_constructors()
        for i, token in enumerate(self.tokens):
            if token == "constant" and self.declares_variable(i):
                self.tokens[i] = "__constant"
            elif token in OPENCL_KEYWORDS:
                self.tokens[i] = token + "_"
            else:
                self.tokens[i] = ADDRESS_SPACES.get(token, token)
        instances = "".join(f"template decltype({name}) {name};\n" for _, name, _ in self.instances)
        return f'#include "metal_strict.h"\n{"".join(self.tokens)}\n{instances}'

    def declares_variable(self, at: int) -> bool:
        """Whether the `constant` at this position belongs to a variable of program scope, not to a pointer."""
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

    def variable(self, type_: str, name: str, dimensions: str) -> str:
        self.sites += 1
        alias = f"strict_type_{name}_{self.sites}"
        return f"typedef {type_} {alias}{dimensions}; __local {alias}& {name} = *(__local {alias}*)(__local void*)1"

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


def clang(arguments: list, **options) -> subprocess.CompletedProcess:
    resource = build.run([build.tool("clang++"), "-print-resource-dir"]).stdout.strip()
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
        f"-I{STRICT}",
        "-internal-isystem",
        f"{resource}/include",
    ]
    return build.run([*command, *arguments], **options)


def in_metal_terms(message: str) -> str:
    for opencl, metal in PRINTED.items():
        message = message.replace(opencl, metal)
    # A pointer variable itself lies in thread, which goes without saying.
    message = re.sub(r"([*&])thread\b", r"\1", message)
    return message.replace("strict_make<", "").replace("program scope", "program-scope")


class Location:
    """Follows the positions in an AST dump, each relative to the one before."""

    WHERE = re.compile(r"(?:(?P<file>[^\s<>,:]+):|line:)(?P<line>\d+):\d+")

    def __init__(self):
        self.file, self.line = "?", 0

    def advance(self, text: str) -> str:
        for match in self.WHERE.finditer(text.split("'")[0]):
            self.file = match["file"] if match["file"] and match["file"] != "line" else self.file
            self.line = int(match["line"])
        return f"{self.file}:{self.line}"


DECLARATION = re.compile(
    r"[|` -]*(?P<kind>\w+Decl) (?P<id>0x[0-9a-f]+) (?:parent \S+ )?(?:prev \S+ )?(?P<where><.*?> (?:(?:line|col)\S+|\S+:\d+:\d+)) "
    r"(?P<words>[^']*)'(?P<type>[^']*)'(?P<after>.*)"
)


def check_tree(dump: str) -> list[str]:
    """Pointers without an address space, lambdas, static locals and recursion, from clang's AST dump."""
    problems, location = [], Location()
    calls: dict[str, set[str]] = {}
    names: dict[str, str] = {}
    function, function_depth, before, pending = None, 0, "", None
    for line in dump.splitlines():
        where = location.advance(line)
        if "metal_strict.h" in where:
            function = None
            continue
        depth = len(line) - len(line.lstrip("|` -"))
        if function and depth <= function_depth:
            function = None
        if declared := DECLARATION.match(line):
            kind, words = declared["kind"], declared["words"].split()
            if kind in {"FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXConversionDecl"}:
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
        if function and "DeclRefExpr" in line or "MemberExpr" in line:
            for called in re.findall(r"(?:Function|CXXMethod) (0x[0-9a-f]+)|->\S+ (0x[0-9a-f]+)", line):
                calls.setdefault(function, set()).add(called[0] or called[1])
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
    """Whether a printed type is a pointer or reference; template arguments and array sizes may hold products."""
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


def check_address_spaces(preprocessed: str) -> list[str]:
    code = StrictTranslator(preprocessed, {}).run()
    with tempfile.TemporaryDirectory() as scratch:
        unit = Path(scratch) / "shader.clcpp"
        unit.write_text(code)
        found = clang([f"-cl-ext={DISABLED}", "-ast-dump", unit])
    problems = [in_metal_terms(build.readable(found.stderr))] if found.returncode else []
    # A pointer that names no address space has clang's __generic one.
    return problems + [in_metal_terms(p) for p in dict.fromkeys(check_tree(found.stdout))]


LAMBDA_BEFORE = {"=", "(", ",", "{", ";", "return", "}", "&", "|"}


def check_language(preprocessed: str) -> list[str]:
    translator = Translator(preprocessed, {})
    problems = []
    for i, token in enumerate(translator.tokens):
        if message := LANGUAGE_WORDS.get(token):
            problems.append(f"{translator.line(i)}: error: '{token}': {message}")
    folder, pch = build.prepared_headers()
    flags = [*build.LANGUAGE, *build.ARITHMETIC, *build.INSTRUMENTATION, *build.GENERATION]
    flags += ["-include-pch", pch, "-I", build.INCLUDE, "-I", folder, "-DMSL_KERNEL=-1", "-fsyntax-only"]
    flags += ["-Wno-everything", "-Wpre-c++17-compat", "-Wimplicit-float-conversion", "-x", "c++", "-"]
    flags = [f for f in flags if f != "-w"]
    code = build.translate(preprocessed, {}).code
    found = build.run([build.tool("clang++"), *flags], input=code)
    for line in found.stderr.splitlines():
        if " error: " in line:
            problems.append(line)
        elif " warning: " in line and "/msl/include/" not in line and "kernel_table" not in line:
            to_bfloat = "conversion" in line and re.search(r"to '(bfloat|__bf16)|\(aka '__bf16'\)\s*\[", line)
            newer = "pre-c++17" in line and "constexpr if" not in line
            if to_bfloat or newer:
                problems.append(line.replace(" warning: ", " error: "))
    return problems


@functools.cache
def accepted_words() -> frozenset[str]:
    """Every identifier in Metal sources that Apple's compiler is known to accept, of the installed wheels."""
    words = set()
    for module, folder in (("mlx", "include/mlx/backend/metal/kernels"), ("torch", "include/c10/metal")):
        found = importlib.util.find_spec(module)
        for root in found.submodule_search_locations if found else ():
            for path in (Path(root) / folder).rglob("*.h"):
                text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", path.read_text(), flags=re.S)
                words.update(re.findall(r"[A-Za-z_]\w*", text))
    return frozenset(words)


@functools.cache
def specified_words() -> frozenset[str]:
    return frozenset(word for names in SPECIFIED.values() for word in names.split())


def is_known(word: str) -> bool:
    return word in specified_words() or bool(VECTOR.match(word)) or word in accepted_words()


@functools.cache
def library_words() -> frozenset[str]:
    """What the simulator's metal_stdlib declares for shaders: macros, and names outside of its own namespace."""
    folder, _ = build.prepared_headers()
    flags = [*build.LANGUAGE, *build.ARITHMETIC, "-w", "-I", build.INCLUDE, "-I", folder]
    source = "#include <metal_stdlib>\n"
    clang_ = build.tool("clang++")
    macros = build.run([clang_, *flags, "-E", "-dD", "-"], input=source).stdout
    words, inside = set(), False
    for line in macros.splitlines():
        if line.startswith("# "):
            inside = str(build.INCLUDE) in line
        elif inside and (macro := re.match(r"#define (\w+)", line)):
            words.add(macro[1])
    dump = build.run([clang_, *flags, "-fsyntax-only", "-Xclang", "-ast-dump", "-"], input=source).stdout
    words |= declared_names(dump)
    return frozenset(w for w in words if not w.lower().startswith("msl"))


def declared_names(dump: str) -> set[str]:
    """Names that an AST dump declares at global scope or in namespace metal, in files of the simulator."""
    names, scopes, location = set(), [], Location()
    pattern = re.compile(
        r"(?P<indent>[|` -]*)(?P<kind>\w+Decl) 0x\S+ (?:parent \S+ )?(?:prev \S+ )?(?P<rest>.*)"
    )
    kinds = "Function FunctionTemplate ClassTemplate CXXRecord Enum EnumConstant Typedef TypeAlias TypeAliasTemplate Var"
    wanted = {
        f"{k}Decl" for k in [*kinds.split(), "VarTemplate", "NamespaceAlias", "UsingShadow", "CXXMethod"]
    }
    for line in dump.splitlines():
        where = location.advance(line)
        match = pattern.match(line)
        if not match:
            continue
        depth = len(match["indent"])
        while scopes and scopes[-1][0] >= depth:
            scopes.pop()
        words = [w for w in re.sub(r"<.*?> (?:\S+:\S+ )?", "", match["rest"], count=1).split("'")[0].split()]
        words = [w for w in words if w != "definition"]
        name = words[-1] if words and re.fullmatch(r"[A-Za-z_]\w*", words[-1]) else ""
        kind = match["kind"]
        ours = "implicit" not in words and not name.startswith("_") and str(build.INCLUDE) in where
        if name and kind in wanted and ours and all(scope[1] for scope in scopes):
            names.add(name)
        open_ = (
            "Record" in kind
            or kind in {"TranslationUnitDecl", "ClassTemplateDecl", "EnumDecl"}
            or name == "metal"
        )
        scopes.append((depth, open_))
    return names


def check_vocabulary(preprocessed: str) -> list[str]:
    """Names of Metal's library and attributes that no accepted source uses."""
    translator = Translator(preprocessed, {})
    library, problems, seen = library_words(), [], set()
    for i, token in enumerate(translator.tokens):
        if token in library and token not in seen and not is_known(token):
            seen.add(token)
            problems.append(
                f"{translator.line(i)}: error: '{token}' occurs in no Metal source known to compile"
            )
    translator.take_attributes()
    for position, attributes in sorted(translator.attributes.items()):
        for attribute in attributes:
            if attribute.name not in seen and not is_known(attribute.name):
                seen.add(attribute.name)
                problems.append(
                    f"{translator.line(position)}: error: the attribute '{attribute.name}' occurs in no Metal source "
                    "known to compile"
                )
    return problems


def check(source: str, include: tuple = (), name: str = "program_source") -> list[str]:
    """What is wrong with a shader's source, one text per problem; empty when nothing is."""
    try:
        text = build.preprocess(source, include, name)
        problems = check_vocabulary(text) + check_language(text)
        return problems + check_address_spaces(text)
    except ShaderError as error:
        return [str(error)]


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
