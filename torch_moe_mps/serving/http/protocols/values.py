"""JSON of the values in tool calls, whose types a tool's schema gives."""

import ast
import json
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

_SURROGATE = re.compile(r"[\ud800-\udfff]")
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_DEEPEST = 32  # levels of a schema that are read; its references may form a circle


class AllowedValues(NamedTuple):
    """Values that a schema allows for an argument.

    Args:
        types: "string" for any text and "choice" for one of `texts`; "null"; "other". None allows anything.
        texts: enumerated texts.
    """

    types: frozenset[str] | None = None
    texts: frozenset[str] = frozenset()

    @property
    def is_text(self) -> bool:
        """True if a value is a text, whatever it is."""
        return self == TEXT

    @property
    def allows_text(self) -> bool:
        """True if a value may be any text."""
        return "string" in (self.types or ())

    def json_of(self, text: str, padding: str = "") -> str:
        """JSON of a value.

        Args:
            padding: surrounds a text without being part of it.
        """
        types, value = self.types or frozenset(), text.strip()
        if value in self.texts:
            return in_json(value)
        if value == "null" and "null" in types:
            return value
        if self.allows_text:
            return in_json(text.removeprefix(padding).removesuffix(padding))
        return in_json(value) if types and types <= {"choice", "null"} else literal(value)


TEXT = AllowedValues(frozenset({"string", "choice"}))
OTHER = AllowedValues(frozenset({"other"}))


def kind_of(schema: Any, name: str) -> AllowedValues:
    """Kind of an argument, by the schema of all arguments."""
    properties = resolved(schema, schema).get("properties")
    return _kind(properties.get(name) if isinstance(properties, dict) else None, schema, 0)


def _kind(schema: Any, root: Any, depth: int) -> AllowedValues:
    """Kind of a value: what all of a schema's statements allow."""
    kind = AllowedValues()
    for each in () if depth > _DEEPEST else _statements(resolved(schema, root), root, depth + 1):
        types = each.types if kind.types is None else kind.types
        if each.types is not None and types is not None:
            types &= each.types
        kind = AllowedValues(types, kind.texts | each.texts)
    return kind


def _statements(schema: dict[str, Any], root: Any, depth: int) -> Iterator[AllowedValues]:
    """Kinds that the statements of a schema allow; a value is of all of them."""
    yield from _of_types(schema)
    yield from _of_listed_values(schema)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            either = [_kind(each, root, depth) for each in schema[key]]
            types = [each.types for each in either if each.types is not None]
            allowed = frozenset[str]().union(*types) if len(types) == len(either) else None
            yield AllowedValues(allowed, frozenset[str]().union(*(each.texts for each in either)))
    if isinstance(schema.get("allOf"), list):
        yield from (_kind(each, root, depth) for each in schema["allOf"])


def _of_types(schema: dict[str, Any]) -> Iterator[AllowedValues]:
    """The kind that `type` allows."""
    if isinstance(names := schema.get("type"), str):
        names = [names]
    if isinstance(names, list):
        if schema.get("nullable") is True:
            names = [*names, "null"]
        yield AllowedValues(frozenset[str]().union(*map(_types, names)))


def _of_listed_values(schema: dict[str, Any]) -> Iterator[AllowedValues]:
    """The kind that `const` or `enum` allows."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        texts = frozenset(value for value in values if isinstance(value, str))
        others = {"null" if value is None else "other" for value in values if not isinstance(value, str)}
        yield AllowedValues(frozenset({*others, *(["choice"] if texts else [])}), texts)


def _types(name: Any) -> frozenset[str]:
    if name == "string":
        return frozenset({"string", "choice"})
    return frozenset({"null" if name == "null" else "other"})


def resolved(schema: Any, root: Any) -> dict[str, Any]:
    """Schema that a schema refers to, or itself."""
    for _ in range(_DEEPEST):
        path = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(path, str) or not path.startswith("#"):
            break
        schema = root
        for key in path[1:].strip("/").split("/"):
            key = key.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if key and isinstance(schema, dict) else schema
    return schema if isinstance(schema, dict) else {}


def in_json(value: Any) -> str:
    """JSON of a value. Raises: TypeError or ValueError for a value that JSON has not."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Half of a pair has no UTF-8.
    return json.dumps(value) if not text.isascii() and _SURROGATE.search(text) else text


def escaped(text: str) -> str:
    """JSON-escaped text without quotes."""
    return in_json(text)[1:-1]


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return False
    return True


def object_of(text: str) -> dict[str, Any] | None:
    """Object of a JSON text; None for any other text, and for one that nests too deep."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def literal(text: str) -> str:
    """JSON of a value that is JSON, a constant, list or dictionary of Python's, or text."""
    text = text.strip()
    if is_json(text):
        return text
    python = python_literal(text) if text.startswith(("[", "{")) else _LITERALS.get(text)
    return python or in_json(text)


def python_literal(text: str) -> str | None:
    """JSON of a literal in Python's syntax, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes that Python does not know
            return in_json(ast.literal_eval(text.strip()))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _no_number(name: str) -> None:
    raise ValueError(name)
