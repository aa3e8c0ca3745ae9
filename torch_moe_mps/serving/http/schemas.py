"""Keywords of JSON schemas that a grammar keeps, and the refusal of all others.

xgrammar ignores many keywords, some of them only next to others. The tables here list what it keeps.
"""

from collections.abc import Iterator
from typing import Any

from ..._text import shown
from .protocols.values import resolved
from .request import Refused

_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_BOUNDS = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"})
_LENGTHS = frozenset({"maxLength", "minLength"})
_OF_TYPE = {
    "array": frozenset({"items", "maxItems", "minItems", "prefixItems", "unevaluatedItems"}),
    "integer": _BOUNDS | {"multipleOf"},
    "number": _BOUNDS,
    "object": frozenset({
        "additionalProperties", "maxProperties", "minProperties", "patternProperties", "properties",
        "propertyNames", "required", "unevaluatedProperties",
    }),
    "string": _LENGTHS | {"format", "pattern"},
}  # fmt: skip
# Without a type, these tell it.
_TELLS = {
    "object": frozenset({"additionalProperties", "properties", "unevaluatedProperties"}),
    "array": frozenset({"items", "prefixItems", "unevaluatedItems"}),
}
# In the order in which xgrammar takes the first one of a schema, and ignores all that is next to it.
_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_NEVER = {
    "array": frozenset({"additionalItems", "contains", "maxContains", "minContains", "uniqueItems"}),
    "number": frozenset({"multipleOf"}),
    "object": frozenset({"dependencies", "dependentRequired", "dependentSchemas"}),
}
_NOWHERE = frozenset({"$dynamicRef", "$recursiveRef", "else", "if", "not", "then"})
_VALUES = frozenset().union(*_OF_TYPE.values(), *_NEVER.values())  # each of them constrains one type
_FORMATS = frozenset({
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer",
    "relative-json-pointer", "time", "uri", "uri-reference", "uri-template", "uuid",
})  # fmt: skip
_OTHER_FORMATS = frozenset({"idn-email", "idn-hostname", "iri", "iri-reference", "regex"})
_OF_NAMES = _OF_TYPE["string"] | {"const", "enum", "type"}  # in `propertyNames`
_MOST = 64  # references and choices that are followed to see that choices exclude each other

Found = tuple[str, str]  # a keyword that is not kept, and next to what


def check_keywords(schema: dict[str, Any], field: str) -> None:
    """Raises: Refused for a schema with a keyword that a grammar does not keep."""
    rest: list[tuple[str, Any]] = [("$", schema)]
    seen = set[int]()
    while rest:
        place, node = rest.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        for keyword, where in _ignored(node, schema):
            got = f"'{keyword}'{where} at {shown(place)[1:-1]}"
            message = f"The schema of '{field}' must have only keywords that this server keeps, got {got}."
            raise Refused(message, field)
        if "$ref" in node:
            rest.append((node["$ref"], _referred(node["$ref"], schema)))
        rest += _inner(node, place)


def _inner(node: dict[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """Yields the schemas in a schema, each with its place."""
    for keyword in ("additionalProperties", "items", "unevaluatedItems", "unevaluatedProperties"):
        yield f"{place}.{keyword}", node.get(keyword)
    for keyword in ("patternProperties", "properties"):
        if isinstance(inner := node.get(keyword), dict):
            yield from ((f"{place}.{keyword}.{name}", value) for name, value in inner.items())
    for keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
        if isinstance(inner := node.get(keyword), list):
            yield from ((f"{place}.{keyword}[{number}]", value) for number, value in enumerate(inner))


def _ignored(node: dict[str, Any], root: dict[str, Any]) -> Iterator[Found]:
    """Yields the keywords of a schema that are not kept."""
    yield from ((keyword, "") for keyword in sorted(node.keys() & _NOWHERE))
    whole = [keyword for keyword in _WHOLE if keyword in node]
    if not whole:
        yield from _ignored_of_types(node)
        return
    first, *others = whole
    yield from ((keyword, f" next to '{first}'") for keyword in (*others, *sorted(node.keys() & _VALUES)))
    if "type" in node:
        types = _types({first: node[first]}, root, [0])
        if not types <= _types({"type": node["type"]}, root, [0]):
            yield "type", f" next to '{first}'"
    if first == "$ref" and _referred(node["$ref"], root) is None:
        yield first, " to no part of the schema"
    if first == "allOf" and isinstance(node["allOf"], list) and len(node["allOf"]) != 1:
        yield first, " with several schemas"
    if first == "oneOf" and not _exclude_each_other(node["oneOf"], root):
        yield first, " whose choices no type and no constant tells apart"


def _ignored_of_types(node: dict[str, Any]) -> Iterator[Found]:
    """Keywords of a node that the grammar ignores because of the node's type."""
    types = _listed(node.get("type"))
    if "type" not in node:
        types = next(({kind} for kind, keywords in _TELLS.items() if keywords & node.keys()), set())
        if not types:
            yield from ((keyword, " without a 'type'") for keyword in sorted(node.keys() & _VALUES))
    for kind in sorted(types):
        never = {name for name in node.keys() & _NEVER.get(kind, set()) if node[name] is not False}
        yield from ((keyword, "") for keyword in sorted(never))
    if "integer" in types and (step := node.get("multipleOf")) is not None:
        if not isinstance(step, int):
            yield "multipleOf", f" {shown(step)}"
        elif bounds := sorted(node.keys() & _BOUNDS):
            yield "multipleOf", f" next to '{bounds[0]}'"
    if "string" in types:
        yield from _ignored_of_strings(node)
    if "object" in types:
        yield from _ignored_of_objects(node)


def _ignored_of_strings(node: dict[str, Any]) -> Iterator[Found]:
    """Keywords of a string that the grammar ignores."""
    name = node.get("format")
    if isinstance(name, str) and name in _OTHER_FORMATS:
        yield "format", f" with {name}"
    first = "format" if isinstance(name, str) and name in _FORMATS else "pattern"
    if first in node:
        others = sorted(node.keys() & (_LENGTHS | {"pattern"}) - {first})
        yield from ((keyword, f" next to '{first}'") for keyword in others)


def _ignored_of_objects(node: dict[str, Any]) -> Iterator[Found]:
    """Keywords of an object that the grammar ignores."""
    properties, required = node.get("properties"), node.get("required")
    names = properties if isinstance(properties, dict) else {}
    if isinstance(required, list):
        missing = [name for name in required if isinstance(name, str) and name not in names]
        yield from (("required", f" of {shown(name)}, which 'properties' lacks") for name in missing)
    if names:
        together = sorted(node.keys() & {"patternProperties", "propertyNames"})
        yield from ((keyword, " next to 'properties'") for keyword in together)
    if isinstance(patterns := node.get("patternProperties"), dict) and len(patterns) > 1:
        yield "patternProperties", " with several patterns"
    if isinstance(inner := node.get("propertyNames"), dict):
        others = sorted(inner.keys() & (_VALUES | _NOWHERE | {*_WHOLE}) - _OF_NAMES)
        yield from ((name, " in 'propertyNames'") for name in others)
        yield from _ignored_of_strings(inner)


def _listed(types: Any) -> set[str]:
    """Types that `type` lists."""
    names = types if isinstance(types, list) else [types]
    return {name for name in names if isinstance(name, str)}


def _referred(path: Any, root: dict[str, Any]) -> dict[str, Any] | None:
    """Schema that a `$ref` refers to, or None."""
    node: Any = root if isinstance(path, str) and (path == "#" or path.startswith("#/")) else None
    for key in path[2:].split("/") if node is not None and path != "#" else ():
        key = key.replace("~1", "/").replace("~0", "~")
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else None


# Choices that exclude each other


def _types(node: Any, root: dict[str, Any], count: list[int]) -> frozenset[str]:
    """Types of the values that a schema may allow; "number" is one that is no integer."""
    count[0] += 1
    if count[0] > _MOST or not isinstance(node := resolved(node, root), dict):
        return _TYPES
    if (values := _constants(node)) is not None:
        return frozenset().union(*map(_types_of_value, values))
    types = _TYPES
    if "type" in node:
        types = frozenset(_listed(node["type"]))
        types |= {"integer"} if "number" in types else set()
    for keyword in ("anyOf", "oneOf"):
        if isinstance(node.get(keyword), list):
            types &= frozenset().union(*(_types(choice, root, count) for choice in node[keyword]))
    for part in node.get("allOf") or ():
        types &= _types(part, root, count)
    return types


def _types_of_value(value: Any) -> frozenset[str]:
    kinds = {bool: "boolean", dict: "object", int: "integer", float: "number", list: "array", str: "string"}
    return frozenset({kinds.get(type(value), "null")})


def _constants(node: dict[str, Any]) -> list[Any] | None:
    """Values that `const` or `enum` lists."""
    values = [node["const"]] if "const" in node else node.get("enum")
    return values if isinstance(values, list) else None


def _exclude_each_other(choices: Any, root: dict[str, Any]) -> bool:
    """True if no value can fit two of the choices."""
    if not isinstance(choices, list) or len(choices) > _MOST:
        return False
    return all(_are_apart(a, b, root, 0) for number, a in enumerate(choices) for b in choices[:number])


def _are_apart(a: Any, b: Any, root: dict[str, Any], depth: int) -> bool:
    if not _types(a, root, [0]) & _types(b, root, [0]):
        return True
    first, second = resolved(a, root), resolved(b, root)
    values = _constants(first), _constants(second)
    if values[0] is not None and values[1] is not None:
        return not any(one == other for one in values[0] for other in values[1])
    one, other = (_required(each) for each in (first, second))
    return not depth and any(
        _are_apart(one[name], other[name], root, 1) for name in one.keys() & other.keys()
    )


def _required(node: dict[str, Any]) -> dict[str, Any]:
    """{name: schema} of the properties that each value of a schema has."""
    names, properties = node.get("required"), node.get("properties")
    if _listed(node.get("type")) != {"object"} or not isinstance(names, list):
        return {}
    return {name: value for name, value in (properties or {}).items() if name in names}
