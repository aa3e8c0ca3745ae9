"""The vocabulary of Metal: the names that Apple's compiler accepts, and those our metal_stdlib declares."""

import functools
import importlib.util
import re
from pathlib import Path

from .. import build
from .translate import Translator

# What the simulator's metal_stdlib offers and the known sources happen not to use, by the section of the
# Metal Shading Language Specification (3.1) that describes it.
SPECIFIED = {
    "6.2 Common functions": "mix saturate",
    "6.3 Integer functions": "popcount",
    "6.4 Relational functions": "all any",
    "6.5 Math constants": (
        "FLT_DIG FLT_EPSILON FLT_MANT_DIG FLT_MAX FLT_MIN HALF_EPSILON HALF_MAX HALF_MIN HUGE_VALF "
        "MAXFLOAT MAXHALF M_1_PI_F M_2_PI_F M_2_SQRTPI_F M_E_F M_LOG10E_F M_PI_2_F M_PI_4_F M_SQRT1_2_F"
    ),
    "6.3 Integer constants": (
        "CHAR_BIT CHAR_MAX CHAR_MIN INT_MAX INT_MIN LONG_MAX LONG_MIN SHRT_MAX SHRT_MIN UCHAR_MAX "
        "UINT_MAX ULONG_MAX USHRT_MAX"
    ),
    "6.7 SIMD-group matrix functions": "simdgroup_bfloat8x8 simdgroup_half8x8",
    "6.8 Geometric functions": "cross distance normalize",
    "6.9.2 SIMD-group functions": (
        "simd_active_threads_mask simd_and simd_broadcast_first simd_is_first simd_or simd_vote vote_t"
    ),
    "6.9.3 Quad-group functions": (
        "quad_active_threads_mask quad_all quad_and quad_any quad_ballot quad_broadcast "
        "quad_broadcast_first quad_is_first quad_max quad_min quad_or quad_product quad_shuffle "
        "quad_shuffle_and_fill_down quad_shuffle_and_fill_up quad_shuffle_down quad_shuffle_rotate_down "
        "quad_shuffle_rotate_up quad_shuffle_up quad_shuffle_xor quad_vote quad_xor"
    ),
    "6.15 Atomic functions": "mem_texture memory_order",
    "2.6 Atomic data types": "atomic_bool atomic_float atomic_int atomic_uint atomic_ulong",
    "5.2.3.6 Kernel function input attributes": (
        "dispatch_simdgroups_per_threadgroup dispatch_threads_per_threadgroup quadgroups_per_threadgroup "
        "threads_per_simdgroup"
    ),
}
# Vector types are named by rule (2.2 Vector data types, 2.2.3 Packed vector types).
VECTOR = re.compile(r"(packed_)?(bool|u?(char|short|int|long)|half|bfloat|float)[234]$")


class Location:
    """Follows the positions in an AST dump, each relative to the one before.

    Attributes:
        is_ours: the position is in a header of the strict check.
    """

    WHERE = re.compile(r"(?:(?P<file>[^\s<>,:]+):|line:)(?P<line>\d+):\d+")
    NEW_LINE = re.compile(r":\d+:\d")  # most nodes only name columns of the line before

    def __init__(self):
        self.file, self.line, self.where, self.is_ours = "?", 0, "?:0", False

    def advance(self, text: str) -> str:
        end = text.find("'") if "'" in text else len(text)
        if not self.NEW_LINE.search(text, 0, end):
            return self.where
        for match in self.WHERE.finditer(text, 0, end):
            if match["file"] and match["file"] != "line":
                self.file = match["file"]
                self.is_ours = "metal_strict" in self.file or "tensor_types.h" in self.file
            self.line = int(match["line"])
        self.where = f"{self.file}:{self.line}"
        return self.where


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
    """What the simulator's metal_stdlib declares for shaders: macros, and names outside of its namespace."""
    folder, _ = build.prepared_headers()
    flags = [*build.LANGUAGE, *build.ARITHMETIC, "-w", "-I", build.INCLUDE, "-I", folder]
    source = "#include <metal_stdlib>\n"
    clang_ = build.tool("clang++")
    macros = build.run([clang_, *flags, "-E", "-dD", "-"], "listing macros", input=source)
    words, inside = set(), False
    for line in macros.splitlines():
        if line.startswith("# "):
            inside = str(build.INCLUDE) in line
        elif inside and (macro := re.match(r"#define (\w+)", line)):
            words.add(macro[1])
    dump = build.run([clang_, *flags, "-fsyntax-only", "-Xclang", "-ast-dump", "-"], "parsing", input=source)
    words |= declared_names(dump)
    return frozenset(w for w in words if not w.lower().startswith("msl"))


DECLARING = [
    *("Function", "FunctionTemplate", "CXXMethod", "ClassTemplate", "CXXRecord", "Enum", "EnumConstant"),
    *("Typedef", "TypeAlias", "TypeAliasTemplate", "Var", "VarTemplate", "NamespaceAlias", "UsingShadow"),
]


def declared_names(dump: str) -> set[str]:
    """Names that an AST dump declares at global scope or in namespace metal, in files of the simulator."""
    names, scopes, location = set(), [], Location()
    pattern = re.compile(
        r"(?P<indent>[|` -]*)(?P<kind>\w+Decl) 0x\S+ (?:parent \S+ )?(?:prev \S+ )?(?P<rest>.*)"
    )
    wanted = {f"{kind}Decl" for kind in DECLARING}
    for line in dump.splitlines():
        where = location.advance(line)
        match = pattern.match(line)
        if not match:
            continue
        depth = len(match["indent"])
        while scopes and scopes[-1][0] >= depth:
            scopes.pop()
        words = re.sub(r"<.*?> (?:\S+:\S+ )?", "", match["rest"], count=1).split("'")[0].split()
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
        for name in (a.name for a in attributes if a.name not in seen and not is_known(a.name)):
            seen.add(name)
            where = translator.line(position)
            problems.append(
                f"{where}: error: the attribute '{name}' occurs in no Metal source known to compile"
            )
    return problems
