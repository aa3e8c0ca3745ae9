"""Keywords of schemas: an answer keeps each of them, or the request is refused and told which one."""

# ruff: noqa: E501  (tables)

import functools
import json

import pytest
import xgrammar
from support.scripted import ask
from support.serving import said

from torch_moe_mps.serving.http.protocols import grammar
from torch_moe_mps.serving.http.request import Refused
from torch_moe_mps.serving.http.schemas import check_keywords

INTEGER, TEXT, OBJECT, LIST = ({"type": kind} for kind in ("integer", "string", "object", "array"))
AB = {"properties": {"a": INTEGER, "b": INTEGER}}
KIND = {
    kind: {"type": "object", "properties": {"k": {"const": kind}, "v": value}, "required": ["k"]}
    for kind, value in {"a": INTEGER, "b": TEXT}.items()
}
# (schema, value that fits, values that do not)
KEPT = [
    ({"type": ["integer", "null"], "minimum": 3}, None, [1, "a"]),
    ({"enum": [1, "a"]}, "a", [2]),
    ({"const": "a", "type": "string", "title": "A"}, "a", ["b"]),
    ({"enum": [1, 2], "type": "number"}, 1, [3]),
    (OBJECT | AB | {"required": ["b"]}, {"b": 1}, [{"a": 1}, {"b": "x"}]),
    (OBJECT | AB | {"additionalProperties": TEXT, "minProperties": 2}, {"a": 1, "c": "x"}, [{"a": 1}, {"a": 1, "c": 1}]),
    (OBJECT | {"patternProperties": {"^a$": INTEGER}, "additionalProperties": False}, {"a": 1}, [{"a": "x"}, {"b": 1}]),
    (OBJECT | {"propertyNames": {"pattern": "^a+$"}, "maxProperties": 1, "additionalProperties": INTEGER}, {"aa": 1},
     [{"b": 1}, {"a": 1, "aa": 1}]),
    (LIST | {"items": INTEGER, "minItems": 1, "maxItems": 2, "uniqueItems": False}, [1], [[], [1, 1, 1], ["a"]]),
    (LIST | {"prefixItems": [INTEGER], "items": TEXT}, [1, "a"], [["a"], [1, 1]]),
    (TEXT | {"minLength": 2, "maxLength": 3}, "ab", ["a", "abcd"]),
    (TEXT | {"pattern": "^a+$"}, "aa", ["b"]),
    *((TEXT | {"format": name}, text, ["_ x"]) for name, text in {
        "date": "2020-01-01", "date-time": "2020-01-01T00:00:00Z", "time": "00:00:00Z", "duration": "P1D", "email": "a@b.de",
        "hostname": "a.de", "ipv4": "1.1.1.1", "ipv6": "::1", "uri": "http://a.de", "uri-reference": "/a", "uri-template": "/{a}",
        "uuid": "123e4567-e89b-12d3-a456-426614174000", "json-pointer": "/a", "relative-json-pointer": "0/a",
    }.items()),
    (TEXT | {"format": "password", "maxLength": 1}, "a", ["ab"]),
    (INTEGER | {"exclusiveMinimum": 2, "maximum": 4}, 3, [2, 5]),
    (INTEGER | {"multipleOf": 5}, 10, [7]),
    ({"type": "number", "minimum": 2.5, "exclusiveMaximum": 3}, 2.5, [2, 3]),
    ({"anyOf": [INTEGER, TEXT], "description": "a"}, "a", [None]),
    ({"anyOf": [INTEGER | {"minimum": 1}, {"const": 0}], "type": "integer"}, 0, [-1, "a"]),
    ({"oneOf": [INTEGER, TEXT]}, 1, [None]),
    ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": KIND}, {"k": "b", "v": "x"}, [{"k": "b", "v": 1}]),
    ({"allOf": [INTEGER], "default": 1}, 1, ["a"]),
    (OBJECT | {"$defs": {"x/y": INTEGER}, "properties": {"a": {"$ref": "#/$defs/x~1y", "description": "a"}}}, {"a": 1}, [{"a": "x"}]),
    (OBJECT | {"properties": {"a": {"$ref": "#"}, "b": INTEGER}}, {"a": {"b": 1}}, [{"a": {"b": "x"}}, {"a": 1}]),
]  # fmt: skip


@functools.cache
def compiler() -> xgrammar.GrammarCompiler:
    words = [*map(chr, range(128)), ""]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(words, stop_token_ids=[128]))


@pytest.mark.parametrize(("schema", "fits", "others"), KEPT)
def test_keywords_that_are_kept(schema, fits, others):
    check_keywords(schema, "a")
    compiled = compiler().compile_structural_tag(grammar.of_content(schema, None, []))
    for value in (fits, *others):
        matcher = xgrammar.GrammarMatcher(compiled)
        is_accepted = matcher.accept_string(json.dumps(value)) and matcher.accept_token(128)
        assert is_accepted is (value is fits), value


NESTED = OBJECT | {"properties": {"a": LIST | {"items": {"$ref": "#/$defs/x"}}}}
TOLD = "whose choices no type and no constant tells apart"
# (schema, what the error names)
REFUSED = [
    (LIST | {"uniqueItems": True}, "'uniqueItems' at $."),
    (LIST | {"contains": INTEGER, "minContains": 2, "maxContains": 3}, "'contains' at $."),
    ({"not": INTEGER}, "'not' at $."),
    (TEXT | {"not": {"const": "a"}}, "'not' at $."),
    (OBJECT | AB | {"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "'if' at $."),
    (OBJECT | AB | {"dependentRequired": {"a": ["b"]}}, "'dependentRequired' at $."),
    (OBJECT | AB | {"dependentSchemas": {"a": {"required": ["b"]}}}, "'dependentSchemas' at $."),
    (OBJECT | AB | {"dependencies": {"a": ["b"]}}, "'dependencies' at $."),
    (OBJECT | {"required": ["a"]}, "'required' of 'a', which 'properties' lacks at $."),
    (OBJECT | AB | {"required": ["c"], "additionalProperties": INTEGER}, "'required' of 'c', which 'properties' lacks at $."),
    (OBJECT | AB | {"patternProperties": {"^a$": TEXT}}, "'patternProperties' next to 'properties' at $."),
    (OBJECT | AB | {"propertyNames": {"maxLength": 1}}, "'propertyNames' next to 'properties' at $."),
    (OBJECT | {"patternProperties": {"a": TEXT, "b": INTEGER}}, "'patternProperties' with several patterns at $."),
    (OBJECT | {"propertyNames": {"$ref": "#/$defs/x"}, "$defs": {"x": TEXT}}, "'$ref' in 'propertyNames' at $."),
    (OBJECT | {"propertyNames": {"pattern": "a", "minLength": 2}}, "'minLength' next to 'pattern' at $."),
    (TEXT | {"pattern": "a*", "minLength": 2}, "'minLength' next to 'pattern' at $."),
    (TEXT | {"format": "email", "pattern": "^a"}, "'pattern' next to 'format' at $."),
    (TEXT | {"format": "email", "maxLength": 9}, "'maxLength' next to 'format' at $."),
    (TEXT | {"format": "regex"}, "'format' with regex at $."),
    ({"type": "number", "multipleOf": 0.5}, "'multipleOf' at $."),
    (INTEGER | {"multipleOf": 2.5}, "'multipleOf' 2.5 at $."),
    (INTEGER | {"multipleOf": 5, "minimum": 0}, "'multipleOf' next to 'minimum' at $."),
    ({"minimum": 3}, "'minimum' without a 'type' at $."),
    ({"required": ["a"]}, "'required' without a 'type' at $."),
    ({"allOf": [OBJECT | {"required": []}, OBJECT]}, "'allOf' with several schemas at $."),
    (OBJECT | AB | {"allOf": [{"required": ["a"]}]}, "'properties' next to 'allOf' at $."),
    (OBJECT | AB | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "'properties' next to 'anyOf' at $."),
    ({"type": "integer", "anyOf": [INTEGER, TEXT]}, "'type' next to 'anyOf' at $."),
    ({"anyOf": [INTEGER], "oneOf": [INTEGER]}, "'oneOf' next to 'anyOf' at $."),
    ({"oneOf": [INTEGER, {"type": "number"}]}, f"'oneOf' {TOLD} at $."),
    ({"oneOf": [OBJECT | AB, OBJECT]}, f"'oneOf' {TOLD} at $."),
    ({"const": "a", "type": "integer"}, "'type' next to 'const' at $."),
    ({"enum": ["a", 1], "type": "integer"}, "'type' next to 'enum' at $."),
    ({"enum": [1, 2], "minimum": 2}, "'minimum' next to 'enum' at $."),
    ({"enum": [1, 2], "const": 3}, "'enum' next to 'const' at $."),
    (NESTED | {"$defs": {"x": {"$ref": "#/$defs/y", "minimum": 3}, "y": INTEGER}}, "'minimum' next to '$ref' at #/$defs/x."),
    (NESTED | {"$defs": {"x": {"anyOf": [TEXT, {"not": {}}]}}}, "'not' at #/$defs/x.anyOf[1]."),
    (NESTED | {"$defs": {}}, "'$ref' to no part of the schema at $.properties.a.items."),
    ({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}, "'$ref' to no part of the schema at $."),
    ({"$ref": "http://a.de/a"}, "'$ref' to no part of the schema at $."),
    ({"$dynamicRef": "#a"}, "'$dynamicRef' at $."),
    (OBJECT | {"properties": {"a": {"$recursiveRef": "#"}}}, "'$recursiveRef' at $.properties.a."),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "named"), REFUSED)
def test_keywords_that_are_not_kept_are_named(schema, named):
    with pytest.raises(Refused) as refused:
        check_keywords(schema, "a")
    assert (
        refused.value.message
        == f"The schema of 'a' must have only keywords that this server keeps, got {named}"
    )


def test_a_request_is_refused_by_each_protocol(here):
    schema = LIST | {"uniqueItems": True}
    message = "The schema of '{}' must have only keywords that this server keeps, got 'uniqueItems' at $."
    form, inner = {"type": "json_schema", "name": "a", "schema": schema}, {"name": "a", "schema": schema}
    chats = {"type": "json_schema", "json_schema": inner}
    bodies = [
        ("/v1/chat/completions", {"messages": said("a"), "response_format": chats}, "response_format"),
        ("/v1/responses", {"input": "a", "text": {"format": form}}, "text.format"),
        ("/v1/messages", {"messages": said("a"), "max_tokens": 9, "output_config": {"format": form}}, "output_config.format"),
    ]  # fmt: skip
    for path, body, field in bodies:
        status, answer = ask(here, path, body)
        assert status == 400 and message.format(field) in answer["error"]["message"], path
    for is_strict, expected in ((True, 400), (False, 200)):
        function = {"name": "look", "strict": is_strict, "parameters": OBJECT | {"properties": {"a": schema}}}
        tools = [{"type": "function", "function": function}]
        here.says("")
        body = {"messages": said("a"), "tools": tools, "tool_choice": "required"}
        status, answer = ask(here, "/v1/chat/completions", body)
        assert status == expected, answer
    named = function | {"input_schema": function.pop("parameters"), "strict": True}
    body = {"messages": said("a"), "max_tokens": 9, "tools": [named], "tool_choice": {"type": "any"}}
    assert ask(here, "/v1/messages", body)[0] == 400
