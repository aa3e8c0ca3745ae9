"""Metal Shading Language to C++: rewrites in the text what a header cannot tell a C++ compiler.

Input is preprocessed source (macros expanded, line markers kept). Attributes are read and dropped, address
spaces are erased, threadgroup variables become references into the threadgroup's memory, function constants
get their values, and a table of kernels is appended. Line breaks stay where they are, so that messages name
the source's own lines.
"""

import re
from dataclasses import dataclass

from ..errors import ShaderError
from .tokens import OPENING, Attribute, Tokens, is_identifier, is_space, string_value

ERASED = {"device", "threadgroup", "thread"}
POSITION_ATTRIBUTES = {
    "thread_position_in_threadgroup",
    "thread_position_in_grid",
    "threadgroup_position_in_grid",
    "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "threadgroups_per_grid",
    "threads_per_grid",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "thread_index_in_quadgroup",
    "simdgroup_index_in_threadgroup",
    "quadgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "threads_per_simdgroup",
    "quadgroups_per_threadgroup",
}
SWIZZLE = re.compile("[xyzw]{2,4}|[rgba]{2,4}")
EXPORT = '__attribute__((visibility("default")))'


@dataclass
class Kernel:
    name: str
    getters: list[str]
    arguments: list[str]
    max_threads: str = "0"  # none declared
    host_name: str | None = None
    template: bool = False
    head: str = ""  # "template <...>"


class Translator(Tokens):
    def __init__(self, source: str, constants: dict):
        super().__init__(source)
        self.constants = constants
        self.kernels: dict[str, Kernel] = {}
        self.bodies: list[tuple[int, int]] = []  # of kernels
        self.instances: list[tuple[str, str, str | None]] = []  # kernel, template-id, host name
        self.defined: dict[str, bool] = {}  # function constants
        self.sites = 0

    def take_declarations(self) -> None:
        self.take_attributes()
        self.take_function_constants()
        self.take_kernels()
        self.take_instantiations()
        self.replace_threadgroup_variables()
        self.replace_constant_queries()

    def run(self) -> str:
        self.take_declarations()
        self.erase_address_spaces()
        self.drop_repeated_overloads()
        self.replace_swizzles()
        return self.with_table()

    # Function constants ---------------------------------------------------------------------------

    def take_function_constants(self) -> None:
        for position, attributes in sorted(self.attributes.items()):
            index = next((a.argument for a in attributes if a.name == "function_constant"), None)
            end = self.next(position)
            if index is None or self.at(end) != ";":
                continue
            name_at = self.previous(position)
            name, start = self.tokens[name_at], self.declaration_start(name_at)
            words = [
                t
                for t in self.tokens[start:name_at]
                if not is_space(t) and t not in {"constant", "static", "const"}
            ]
            type_ = " ".join(words)
            value = self.constants.get(self.index_value(index), self.constants.get(name))
            self.defined[name] = value is not None
            self.erase(start, end)
            if value is None:
                self.tokens[start] = f'static const msl::unset_constant<{type_}> {name}{{"{name}"}}'
            else:
                literal = int(value) if isinstance(value, (bool, int)) else float(value).hex()
                self.tokens[start] = f"static constexpr {type_} {name} = {type_}({literal})"

    @staticmethod
    def index_value(text: str):
        try:
            return int(text.strip("() "), 0)
        except ValueError:
            return text

    def replace_constant_queries(self) -> None:
        for i, token in enumerate(self.tokens):
            if token == "is_function_constant_defined" and self.at(self.next(i)) == "(":
                end = self.closing(self.next(i))
                name = self.text(self.next(i) + 1, end).strip()
                self.erase(i, end + 1)
                self.tokens[i] = "true" if self.defined.get(name) else "false"

    # Kernels --------------------------------------------------------------------------------------

    def take_kernels(self) -> None:
        for position, attributes in sorted(self.attributes.items()):
            if any(a.name == "kernel" for a in attributes):
                self.take_function(position)
        for i, token in enumerate(self.tokens):
            if token == "kernel" and self.at(self.next(i)) not in {"", "(", ")", ",", "=", ".", "[", ";"}:
                self.tokens[i] = " "
                self.take_function(i)

    def declaration_start(self, at: int) -> int:
        """The first token of the declaration around `at`, template heads included."""
        while True:
            before = self.previous(at)
            token = self.at(before)
            if token in {";", "}", "{", ""}:
                return at
            at = before

    def take_function(self, marker: int) -> None:
        start = self.declaration_start(marker)
        is_template = self.tokens[start] == "template"
        if is_template and self.at(self.next(start)) != "<":
            return  # an explicit instantiation, read later
        i = self.next(self.closing_angle(self.next(start))) if is_template else self.next(marker)
        while self.at(i) != "(" or not is_identifier(self.at(self.previous(i)) or " "):
            if self.at(i) == "<":
                i = self.closing_angle(i)
            i = self.next(i)
            if i >= len(self.tokens) or self.at(i) in {"{", ";"}:
                raise ShaderError(f"{self.line(marker)}: error: a kernel's declaration is not understood")
        name = self.tokens[self.previous(i)]
        end = self.closing(i)
        getters, arguments = self.parameters(i + 1, end)
        after = self.next(end)
        if self.at(after) == "{":
            self.bodies.append((after, self.closing(after)))
        around = self.attributes_in(self.previous(start) + 1, i) + self.attributes_in(end, after)
        kernel = Kernel(name, getters, arguments, template=is_template)
        if is_template:
            kernel.head = self.text(start, self.closing_angle(self.next(start)) + 1).replace("\n", " ")
        else:
            self.tokens[start] = (
                "static " + self.tokens[start]
            )  # so that a build of another kernel leaves it out
        for attribute in around:
            if attribute.name == "max_total_threads_per_threadgroup":
                kernel.max_threads = attribute.argument
            if attribute.name == "host_name":
                kernel.host_name = string_value(attribute.argument)
        self.kernels[name] = kernel

    def parameters(self, start: int, end: int) -> tuple[list[str], list[str]]:
        """How each kernel argument is fetched, and its name. Pointers may go without a number."""
        parts = [(low, high, self.attributes_in(low, high)) for low, high in self.split(start, end)]
        taken = {(a.name, a.argument) for _, _, attributes in parts for a in attributes}
        getters, names = [], []
        for low, high, attributes in parts:
            first = min((p for p in self.attributes if low <= p < high), default=high)
            words = [t for t in self.tokens[low:first] if not is_space(t)]
            names.append(next((t for t in reversed(words) if is_identifier(t)), ""))
            if not any(a.name in {"buffer", "threadgroup"} | POSITION_ATTRIBUTES for a in attributes) and {
                "*",
                "&",
            } & set(words):
                kind = "threadgroup" if "threadgroup" in words else "buffer"
                index = next(str(n) for n in range(31) if (kind, str(n)) not in taken)
                taken.add((kind, index))
                attributes = [*attributes, Attribute(kind, index)]
            getters.append(self.getter(low, names[-1], attributes))
        return getters, names

    def getter(self, at: int, name: str, attributes: list[Attribute]) -> str:
        getter = None
        for attribute in attributes:
            if attribute.name == "buffer":
                getter = f"msl::buffer<({attribute.argument})>"
            elif attribute.name == "threadgroup":
                getter = f"msl::threadgroup_memory<({attribute.argument})>"
            elif attribute.name in POSITION_ATTRIBUTES:
                getter = f"msl::{attribute.name}"
        if getter is None:
            shown = ", ".join(a.name for a in attributes) or "none"
            raise ShaderError(
                f"{self.line(at)}: error: kernel argument '{name}' has no known attribute (found: {shown})"
            )
        for attribute in attributes:
            if attribute.name == "function_constant":
                condition = attribute.argument if self.defined.get(attribute.argument, True) else "false"
                getter = f"msl::present_if<bool({condition}), {getter}>"
        return getter

    # Instantiations -------------------------------------------------------------------------------

    def take_instantiations(self) -> None:
        i = 0
        while i < len(self.tokens):
            if self.tokens[i] == "template" and self.at(self.next(i)) != "<":
                i = self.take_instantiation(i)
            i += 1

    def take_instantiation(self, start: int) -> int:
        end = start
        while self.at(end) != ";":
            end = self.closing(end) if self.at(end) in OPENING else end + 1
            if end >= len(self.tokens):
                raise ShaderError(f"{self.line(start)}: error: an explicit instantiation does not end")
        attributes = self.attributes_in(start, end)
        for i in range(start, end):
            name = self.tokens[i]
            if name in self.kernels and self.at(self.next(i)) == "<" and not self.inside_decltype(start, i):
                break
        else:
            return end  # of something else than a kernel
        close = self.closing_angle(self.next(i))
        host_name = next((string_value(a.argument) for a in attributes if a.name == "host_name"), None)
        self.instances.append((name, self.text(i, close + 1).replace("\n", " "), host_name))
        self.erase(start, end + 1)
        return end

    def inside_decltype(self, start: int, at: int) -> bool:
        for i in range(start, at):
            if self.tokens[i] == "decltype":
                open_ = self.next(i)
                return open_ < at < self.closing(open_)
        return False

    # Threadgroup variables ------------------------------------------------------------------------

    def replace_threadgroup_variables(self) -> None:
        i = 0
        while i < len(self.tokens):
            if self.tokens[i] == "threadgroup" and self.at(self.next(i)) != "(" and self.starts_statement(i):
                self.replace_variables(i)
            i += 1

    def starts_statement(self, at: int) -> bool:
        before = self.previous(at)
        while self.at(before) in {"const", "volatile", "static"}:
            before = self.previous(before)
        return self.at(before) in {"{", "}", ";"}

    def replace_variables(self, start: int) -> None:
        end = start
        while self.at(end) != ";":
            if self.at(end) in {"*", "&", "=", ")", ""}:
                return  # a pointer or reference to threadgroup memory
            end = self.closing(end) if self.at(end) in OPENING else end
            end = self.closing_angle(end) if self.at(end) == "<" else end
            end += 1
        declarators = self.split(start + 1, end)
        first_low, first_high = declarators[0]
        name_at = self.declared_name(first_low, first_high)
        type_ = self.text(first_low, name_at).strip()
        parts = []
        for k, (low, high) in enumerate(declarators):
            at = name_at if k == 0 else self.next(low - 1)
            dimensions = self.text(at + 1, high).strip()
            parts.append(self.variable(type_, self.tokens[at], dimensions))
        breaks = "\n" * self.text(start, end).count("\n")
        self.erase(start, end + 1)
        for i in range(start, end + 1):
            if self.tokens[i] == "\n":
                self.tokens[i] = " "
        self.tokens[start] = "; ".join(parts).replace("\n", " ") + breaks
        self.tokens[end] = ";"

    def declared_name(self, low: int, high: int) -> int:
        at = low
        while at < high and self.tokens[at] != "[":
            at = self.closing_angle(at) + 1 if self.tokens[at] == "<" else at + 1
        return self.previous(at)

    def variable(self, type_: str, name: str, dimensions: str) -> str:
        self.sites += 1
        alias = f"msl_type_{name}_{self.sites}"
        return (
            f"typedef {type_} {alias}{dimensions}; {alias}& {name} = "
            f'*static_cast<{alias}*>(msl_threadgroup_variable({self.sites}, sizeof({alias}), "{name}"))'
        )

    # Address spaces -------------------------------------------------------------------------------

    def erase_address_spaces(self) -> None:
        for i, token in enumerate(self.tokens):
            if token in ERASED:
                self.tokens[i] = " "
            elif token == "constant":
                before = self.at(self.previous(i))
                self.tokens[i] = (
                    " " if before in {")", "const"} or self.at(self.next(i)) == "const" else "const"
                )

    # Swizzles -------------------------------------------------------------------------------------

    def replace_swizzles(self) -> None:
        """`.xy` becomes a call, unless a struct of the source has a member of that name."""
        members = self.members_like_swizzles()
        for i, token in enumerate(self.tokens):
            if (
                not SWIZZLE.fullmatch(token)
                or token in members
                or self.at(self.previous(i)) not in {".", "->"}
            ):
                continue
            after = self.next(i)
            one, two = self.at(after), self.at(self.next(after))
            assigned = (one == "=" and two != "=") or (one in set("+-*/%&|^") and two == "=")
            places = ", ".join(str("xyzwrgba".index(letter) % 4) for letter in token)
            self.tokens[i] = f"template {'msl_assigned' if assigned else 'msl_swizzle'}<{places}>()"

    def members_like_swizzles(self) -> set[str]:
        members, scopes, head = set(), [False], []  # whether each open brace is of a type
        for i, token in enumerate(self.tokens):
            if not token or is_space(token):
                continue
            if token == "{":
                scopes.append(bool({"struct", "class", "union"} & set(head)) and "(" not in head)
            elif token == "}":
                scopes.pop()
            elif scopes[-1] and SWIZZLE.fullmatch(token) and self.at(self.next(i)) in set(";,=["):
                members.add(token)
            head = [] if token in set("{};") else [*head, token]
        return members

    def drop_repeated_overloads(self) -> None:
        """Functions that differ in address spaces only have become the same function: the first is kept."""
        self.scan_scope(0, len(self.tokens), 0, {})

    def keep_first(self, scope: int, words: list[str], start: int, body: int, end: int, seen: dict) -> None:
        key = (scope, " ".join(words))
        code = [t for t in self.tokens[body:end] if not is_space(t)]
        if key not in seen:
            seen[key] = code
        elif seen[key] == code:
            self.erase(start, end + 1)
        else:
            raise ShaderError(
                f"{self.line(start)}: error: two overloads that differ in address spaces only have different "
                "bodies, which the simulator cannot tell apart"
            )

    def scan_scope(self, start: int, end: int, scope: int, seen: dict) -> None:
        i = start
        while i < end:
            token = self.tokens[i]
            if not token or is_space(token) or token in {";", "}"}:
                i += 1
                continue
            low = i
            while i < end and self.tokens[i] not in {"{", ";"}:
                token = self.tokens[i]
                if token in {"(", "["}:
                    i = self.closing(i)
                elif token == ":" and self.at(self.previous(i)) in {"public", "private", "protected"}:
                    low = i + 1
                i += 1
            if i >= end:
                return
            words = [t for t in self.tokens[low:i] if t and not is_space(t)]
            if self.tokens[i] == ";":
                i += 1
                continue
            close = self.closing(i)
            if is_scope_head(words):
                if "namespace" not in words and "extern" not in words:
                    self.keep_first(scope, words, low, i, close, seen)
                self.scan_scope(i + 1, close, i, seen)
            elif is_function_head(words):
                self.keep_first(scope, words, low, i, close, seen)
            i = close + 1

    # Result ---------------------------------------------------------------------------------------

    def with_table(self) -> str:
        """Appends the table of kernels (if MSL_TABLE is defined) and their entries (MSL_KERNEL: which).

        MSL_CODE is defined by a precompiled header that holds the shader's own code.
        """
        kernels = self.kernels.values()
        entries = [(k.host_name or k.name, k.name, k) for k in kernels if not k.template]
        entries += [
            (host_name or instance, instance, self.kernels[name])
            for name, instance, host_name in self.instances
        ]
        rows, cases = [], []
        for i, (name, function, kernel) in enumerate(entries):
            signature = f"msl::signature<{', '.join([f'decltype({function})', *kernel.getters])}>"
            names = ", ".join([*(f'"{a}"' for a in kernel.arguments), "nullptr"])
            limit = kernel.max_threads
            if kernel.template and limit != "0":
                limit = f"msl_max_threads_{function}"
            strings = f'names_{i}, unsigned({limit}), MSL_IMAGE "{i}.so", MSL_BUILD("{i}")'
            rows.append(f"static const char* const names_{i}[] = {{{names}}};")
            rows.append(f'table[{i}] = {signature}::describe("{name}", {strings});')
            cases.append(f"#if MSL_KERNEL == {i} || MSL_KERNEL < 0")
            cases.append(f"MSL_ENTRY({i})(void* b) {{ {signature}::call(&{function}, b); }}")
            cases.append("#endif")
        limits = [
            f"{k.head} constexpr unsigned msl_max_threads_{k.name} = {k.max_threads};"
            for k in kernels
            if k.template and k.max_threads != "0"
        ]
        lines = [
            '\n#line 1 "kernel_table"',
            *limits,
            "#endif",
            "#ifndef MSL_ENTRY",
            f'#define MSL_ENTRY(i) extern "C" {EXPORT} void msl_entry##i',
            "#endif",
            "#ifdef MSL_TABLE",
            f'extern "C" {EXPORT} const msl_kernel* msl_kernels(int* count) {{',
            f"static msl_kernel table[{len(entries) + 1}];",
            *rows,
            f"*count = {len(entries)};",
            "return table; }",
            "#else",
            *cases,
            "#endif\n",
        ]
        return "#ifndef MSL_CODE\n" + "".join(self.tokens) + "\n".join(lines)


def is_scope_head(words: list[str]) -> bool:
    if not words:
        return False
    if (
        words[0] in {"namespace", "inline", "extern"}
        and ("namespace" in words or words[0] == "extern")
        and "(" not in words
    ):
        return True
    return any(w in {"struct", "class", "union"} for w in words) and "(" not in strip_template_head(words)


def is_function_head(words: list[str]) -> bool:
    words = strip_template_head(words)
    return "(" in words and ("operator" in words or "=" not in words[: words.index("(")])


def strip_template_head(words: list[str]) -> list[str]:
    if words[0] != "template":
        return words
    depth = 0
    for i, word in enumerate(words):
        depth += (word == "<") - (word == ">")
        if i > 0 and depth == 0:
            return words[i + 1 :]
    return words


def translate(preprocessed: str, constants: dict) -> str:
    """The C++ for a preprocessed shader; `constants` maps function constants' numbers or names to values."""
    return Translator(preprocessed, constants).run()
