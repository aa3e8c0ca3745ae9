"""The tokens of a shader's source, and how to move over them: brackets, template lists, attributes, lines."""

import re
from dataclasses import dataclass

from ..errors import ShaderError

TOKEN = re.compile(
    r'^[ \t]*#[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    r"|[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|[\w.'])*|\n|[ \t]+|::|->|[^\w\s]",
    re.MULTILINE,
)
OPENING = {"(": ")", "[": "]", "{": "}"}


@dataclass
class Attribute:
    name: str
    argument: str  # text within the parentheses, "" without


def is_space(token: str) -> bool:
    return token.isspace() or token.lstrip().startswith("#")


def is_identifier(token: str) -> bool:
    return token[0].isalpha() or token[0] == "_"


def string_value(text: str) -> str:
    return "".join(re.findall(r'"((?:\\.|[^"\\])*)"', text))


class Tokens:
    """A token list and the attributes found in it. Rewriting replaces tokens: positions stay valid."""

    def __init__(self, source: str):
        self.tokens = TOKEN.findall(source)
        self.attributes: dict[int, list[Attribute]] = {}  # position of the "[" that opened them

    # Moving over tokens ---------------------------------------------------------------------------

    def next(self, at: int) -> int:
        """The position of the first token after `at` that is no space; len(tokens) at the end."""
        at += 1
        while at < len(self.tokens) and (not self.tokens[at] or is_space(self.tokens[at])):
            at += 1
        return at

    def previous(self, at: int) -> int:
        at -= 1
        while at >= 0 and (not self.tokens[at] or is_space(self.tokens[at])):
            at -= 1
        return at

    def at(self, position: int) -> str:
        return self.tokens[position] if 0 <= position < len(self.tokens) else ""

    def closing(self, at: int) -> int:
        """The bracket that closes the one at `at`."""
        depth = 0
        for i in range(at, len(self.tokens)):
            if self.tokens[i] in OPENING:
                depth += 1
            elif self.tokens[i] in OPENING.values():
                depth -= 1
                if depth == 0:
                    return i
        raise ShaderError(f"{self.line(at)}: error: '{self.tokens[at]}' is not closed")

    def closing_angle(self, at: int) -> int:
        """The `>` that closes the template list at `at`; brackets within it are skipped."""
        depth = 0
        i = at
        while i < len(self.tokens):
            token = self.tokens[i]
            if token == "<":
                depth += 1
            elif token == ">":
                depth -= 1
                if depth == 0:
                    return i
            elif token in OPENING:
                i = self.closing(i)
            i += 1
        raise ShaderError(f"{self.line(at)}: error: '<' is not closed")

    def line(self, at: int) -> str:
        """ "file:line" of a position, from the line markers before it."""
        name, number = "program_source", 1
        for token in self.tokens[:at]:
            if token.lstrip().startswith("#"):
                if marker := re.match(r'\s*#\s*(?:line\s+)?(\d+)(?:\s+"([^"]*)")?', token):
                    name, number = marker[2] or name, int(marker[1]) - 1
            elif token == "\n":
                number += 1
        return f"{name}:{number}"

    def text(self, start: int, end: int) -> str:
        return "".join(self.tokens[start:end])

    def erase(self, start: int, end: int) -> None:
        """Blanks [start, end) but for line breaks and line markers."""
        for i in range(start, end):
            if not is_space(self.tokens[i]) or not self.tokens[i].strip():
                self.tokens[i] = self.tokens[i] if "\n" in self.tokens[i] else " "

    # Attributes -----------------------------------------------------------------------------------

    def take_attributes(self) -> None:
        i = 0
        while i < len(self.tokens):
            if (
                self.tokens[i] == "["
                and self.at(i + 1) == "["
                and is_identifier(self.at(self.next(i + 1)) or " ")
            ):
                end = self.closing(i)
                self.attributes[i] = self.parse_attributes(self.next(i + 1), self.previous(end))
                self.erase(i, end + 1)
                i = end
            i += 1

    def parse_attributes(self, start: int, end: int) -> list[Attribute]:
        found = []
        i = start
        while i < end:
            name = self.tokens[i]
            i = self.next(i)
            argument = ""
            if self.at(i) == "(" and i < end:
                close = self.closing(i)
                argument = self.text(i + 1, close).strip()
                i = self.next(close)
            found.append(Attribute(name, argument))
            while i < end and self.at(i) in {",", ":"}:
                i = self.next(i)
        return found

    def attributes_in(self, start: int, end: int) -> list[Attribute]:
        return [
            a for position, list_ in sorted(self.attributes.items()) if start <= position < end for a in list_
        ]

    def split(self, start: int, end: int, separator: str = ",") -> list[tuple[int, int]]:
        """[start, end) cut at separators that lie in no bracket and no template list."""
        parts, low, i = [], start, start
        while i < end:
            token = self.tokens[i]
            if token in OPENING:
                i = self.closing(i)
            elif token == "<":
                i = self.closing_angle(i)
            elif token == separator:
                parts.append((low, i))
                low = i + 1
            i += 1
        if low < end and self.text(low, end).strip():
            parts.append((low, end))
        return parts
