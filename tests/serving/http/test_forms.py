"""Tool calls of each family of models: read as the family's publisher writes them, however they are cut.

The expected values are those of vLLM's and SGLang's published parsers for the same texts.
"""

# ruff: noqa: E501  (answers in one piece)

import json
import time
from types import SimpleNamespace

import jinja2
import pytest
from support.checkpoints import tokenizer_of

from torch_moe_mps.serving.http.answer import Arguments, CallEnd, Items, Piece, ToolCall
from torch_moe_mps.serving.http.protocols.forms import form_of
from torch_moe_mps.serving.http.protocols.reader import Reader
from torch_moe_mps.serving.http.request import Chat
from torch_moe_mps.serving.http.template import ChatTemplate

MARKS = {
    "harmony": "<|channel|>commentary<|channel|>analysis", "gemma": "<|turn><|tool_call>",
    "v3.2": "<｜DSML｜function_calls>", "v4": "<｜DSML｜tool_calls>", "v3": "<｜tool▁call▁begin｜>```json",
    "v3.1": "<｜tool▁call▁begin｜>", "kimi": "<|tool_call_begin|>", "minimax": "<minimax:tool_call>",
    "glm": "<tool_call><arg_key>", "qwen coder": "<tool_call><function=", "mistral": "[TOOL_CALLS]",
    "lfm2": "<|tool_call_start|>", "hermes": "<tool_call>", "llama": '<|start_header_id|>"parameters":',
}  # fmt: skip
FORM = {name: form_of(SimpleNamespace(chat_template=marks)) for name, marks in MARKS.items()}
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
SCHEMAS = {
    "look": {"properties": {"of": TEXT, "days": NUMBER}},
    "write": {"properties": {"text": TEXT}},
    "rest": {},
    "choose": {"properties": {"one": {"enum": ["1", "b"]}}},
}
SKY, SEA = ("look", {"of": "sky", "days": 2}), ("look", {"of": "sea"})


def dsml(calls: str, *inner: str) -> str:
    return f"<｜DSML｜{calls}>\n{''.join(inner)}</｜DSML｜{calls}>"


def invoke(name: str, *parameters: str) -> str:
    return f'<｜DSML｜invoke name="{name}">\n{"".join(parameters)}</｜DSML｜invoke>\n'


DSML_SKY = invoke(
    "look",
    '<｜DSML｜parameter name="of" string="true">sky</｜DSML｜parameter>\n',
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n',
)
GLM_SKY = (
    "<tool_call>look\n<arg_key>of</arg_key>\n<arg_value>sky</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
QWEN_SKY = (
    "<function=look>\n<parameter=of>\nsky\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"
)
MINIMAX_SKY = '<invoke name="look">\n<parameter name="of">sky</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n'
HARMONY = "<|channel|>commentary to=functions.{}<|constrain|>json<|message|>{}<|call|>"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>functions.{} <|tool_call_argument_begin|>{}<|tool_call_end|>"
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
OF_SKY, OF_SEA = '{"of": "sky", "days": 2}', '{"of": "sea"}'
JSON_SKY = '{"name": "look", "arguments": {"of": "sky", "days": 2}}'
# (form, answer, text, calls)
CASES = [
    ("hermes", f"<tool_call>\n{JSON_SKY}\n</tool_call>", "", [SKY]),
    ("hermes", f"Hi<tool_call>{JSON_SKY}</tool_call>\n<tool_call>\n{JSON_SKY}\n</tool_call>", "Hi", [SKY, SKY]),
    ("hermes", '<tool_call>{"name": "rest"}</tool_call>', "", [("rest", {})]),
    ("hermes", '<tool_call>{"arguments": {"of": "sea"}, "name": "look"}</tool_call> Ho', "Ho", [SEA]),
    ("hermes", '<tool_call>{"name": "look", "arguments": "{\\"of\\": \\"sea\\"}"}</tool_call>', "", [SEA]),
    ("hermes", "Hi <tool_call>{bad}", "Hi <tool_call>{bad}", []),
    ("qwen coder", f"Hi\n<tool_call>\n{QWEN_SKY}\n</tool_call>\n<tool_call>\n{QWEN_SKY}</tool_call>", "Hi", [SKY] * 2),
    ("qwen coder", f"{QWEN_SKY}\n</tool_call>", "", [SKY]),  # no opening mark
    ("qwen coder", "<tool_call>\n<function=rest>\n</function>\n</tool_call>", "", [("rest", {})]),
    ("qwen coder", "<function=look><parameter=of>\nsea\n<parameter=days>2</function>", "", [("look", {"of": "sea", "days": 2})]),
    ("qwen coder", "<function=write><parameter=text>\n<p>\n \"a\"\n\n</parameter></function>", "",
     [("write", {"text": '<p>\n "a"\n'})]),
    ("glm", GLM_SKY, "", [SKY]),
    ("glm", "<tool_call>choose<arg_key>one</arg_key><arg_value>1\n</arg_value></tool_call>", "", [("choose", {"one": "1"})]),
    ("glm", f"Hi <tool_call>rest\n</tool_call>\n and{GLM_SKY}", "Hiand", [("rest", {}), SKY]),
    ("glm", "<tool_call>look<arg_key>of</arg_key><arg_value>sea</arg_value></tool_call>", "", [SEA]),
    ("glm", "<tool_call>look\n    <arg_key>of</arg_key>\n    <arg_value>sea</arg_value>\n    </tool_call>", "", [SEA]),
    ("minimax", f"Hi<minimax:tool_call>\n{MINIMAX_SKY}{MINIMAX_SKY}</minimax:tool_call>", "Hi", [SKY] * 2),
    ("minimax", f"{MINIMAX_SKY}</minimax:tool_call>", "", [SKY]),  # no opening mark
    ("minimax", '<minimax:tool_call><invoke name="rest"></invoke></minimax:tool_call>', "", [("rest", {})]),
    ("v3.2", f"Hi\n\n{dsml('function_calls', DSML_SKY, invoke('rest'))}", "Hi", [SKY, ("rest", {})]),
    ("v4", f"Hi\n\n{dsml('tool_calls', DSML_SKY)}", "Hi", [SKY]),
    ("v3", "Hi" + DEEPSEEK.format(V3.format("look", OF_SKY) + "\n" + V3.format("rest", "{}")), "Hi", [SKY, ("rest", {})]),
    ("v3.1", DEEPSEEK.format(V31.format("look", OF_SKY) + V31.format("look", OF_SEA)), "", [SKY, SEA]),
    ("v3.1", "Hi" + V31.format("rest", "{}"), "Hi", [("rest", {})]),  # no opening mark
    ("kimi", f"Hi <|tool_calls_section_begin|>{KIMI.format('look:0', OF_SKY)}{KIMI.format('rest:1', '{}')}"
             "<|tool_calls_section_end|>", "Hi", [SKY, ("rest", {})]),
    ("kimi", KIMI.format("look:0", OF_SEA), "", [SEA]),  # no opening mark
    ("kimi", "<|tool_call_begin|>look:3<|tool_call_argument_begin|><|tool_call_end|>", "", [("look", {})]),
    ("mistral", f"[TOOL_CALLS] [{JSON_SKY}, {JSON_SKY}]", "", [SKY, SKY]),
    ("mistral", '[TOOL_CALLS] [{"arguments": {"of": "sea"}, "name": "look"}]', "", [SEA]),
    ("mistral", f"Hi[TOOL_CALLS]look{OF_SKY}[TOOL_CALLS]rest[ARGS]{{}}", "Hi", [SKY, ("rest", {})]),
    ("mistral", f"[TOOL_CALLS]look[CALL_ID]a1b2c3d4e[ARGS]{OF_SEA}", "", [SEA]),
    ("llama", JSON_SKY.replace("arguments", "parameters"), "", [SKY]),
    ("llama", f'Hi: {JSON_SKY}; {{"name": "rest", "parameters": {{}}}} So {{look}}.', "Hi:So {look}.",
     [SKY, ("rest", {})]),
    ("llama", f"<|python_tag|>{JSON_SKY}", "", [SKY]),
    ("llama", '{"name": "Bob", "parameters": {}} {"a": 1}', '{"name": "Bob", "parameters": {}} {"a": 1}', []),
    ("lfm2", "<|tool_call_start|>[look(of='sky', days=2), rest()]<|tool_call_end|>", "", [SKY, ("rest", {})]),
    ("lfm2", "<|tool_call_start|> [write(text='it\\'s \"a\" [b], \\x41\\n')]<|tool_call_end|>\nHi", "Hi",
     [("write", {"text": 'it\'s "a" [b], A\n'})]),
    ("lfm2", "<|tool_call_start|>[a.b(c=True, d=None, e=[1, (2,)], f={'g': -1.5})]<|tool_call_end|>", "",
     [("a.b", {"c": True, "d": None, "e": [1, [2]], "f": {"g": -1.5}})]),
    ("lfm2", "<|tool_call_start|>[write(text='sed '1,2p' x')]<|tool_call_end|>", "", [("write", {"text": "sed '1,2p' x"})]),
    ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>Hi", "Hi", []),
    ("gemma", 'Hi<|tool_call>call:look{of:<|"|>sky<|"|>,days:2}<tool_call|>', "Hi", [SKY]),
    ("gemma", '<|tool_call>call:write{text:<|"|>"a": {b}<|"|>}<tool_call|><|tool_call>call:rest{}<tool_call|>', "",
     [("write", {"text": '"a": {b}'}), ("rest", {})]),
    ("gemma", "<|tool_call>call:f{a:[1,{b:true}],c:null}<tool_call|>", "", [("f", {"a": [1, {"b": True}], "c": None})]),
    ("harmony", HARMONY.format("look", OF_SKY) + "<|start|>assistant" + HARMONY.format("rest", "{}"), "",
     [SKY, ("rest", {})]),
    ("harmony", f"<|channel|>commentary<|message|>Hi<|end|><|start|>assistant to=functions.look<|channel|>commentary "
                f"json<|message|>{OF_SEA}<|call|>", "Hi", [SEA]),
    ("harmony", "<|channel|>final<|message|>Hi to=functions.look<|return|>", "Hi to=functions.look", []),
]  # fmt: skip
THOUGHTS = {"gemma": "<|channel>thought\nhm<channel|>", "mistral": "[THINK]hm[/THINK]"}
THOUGHTS["harmony"] = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


def read(name: str, *pieces: str, prompt: str = "", is_cut: bool = False) -> tuple[str, str, list, list]:
    """The text, the reasoning, the calls, and the items of an answer that comes in pieces."""
    made = Items(lambda sink: Reader(FORM[name], sink, SCHEMAS), prompt)
    items = [item for piece in pieces for item in made.add(piece)] + made.end(False, is_cut)
    text, thought = (
        "".join(i.text for i in items if isinstance(i, Piece) and i.kind == kind)
        for kind in ("text", "reasoning")
    )
    whole = [item.call for item in items if isinstance(item, CallEnd)]
    assert whole == [item for item in made.made if isinstance(item, ToolCall) and item.is_whole]
    return text, thought, [(call.name, json.loads(call.arguments)) for call in whole], items


@pytest.mark.parametrize(("name", "answer", "text", "calls"), CASES)
def test_calls_are_read_however_they_are_cut(name, answer, text, calls):
    thought = THOUGHTS.get(name, "<think>hm</think>\n\n")
    for prefix, said in (("", ""), (thought, "hm")):
        whole = prefix + answer
        for size in (1, 2, 3, 7, len(whole)):
            pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
            assert read(name, *pieces)[:3] == (text, said, calls), size


@pytest.mark.parametrize(("name", "answer", "text", "calls"), CASES)
def test_arguments_are_shown_as_they_grow(name, answer, text, calls):
    """Each call begins with its name, and what is shown of its arguments never changes."""
    _, _, _, items = read(name, *answer)
    grown = dict[int, str]()
    for item in items:
        if isinstance(item, ToolCall):
            grown[id(item)] = ""
        if isinstance(item, Arguments):
            grown[id(item.call)] += item.text
        if isinstance(item, CallEnd):
            assert grown[id(item.call)] == item.call.arguments


@pytest.mark.parametrize("name", FORM)
def test_a_call_that_is_cut_off_is_none(name):
    """Behind its first mark and before its end nothing of it is text, and a long text is shown in parts."""
    value = "sea " * 20
    answer, text = next(
        (answer, text) for form, answer, text, calls in CASES if form == name and SKY in calls
    )
    answer = answer.replace("sky", value)
    begin = FORM[name].begins[0] if FORM[name].begins else "<|message|>"
    begun = answer.index(begin) + len(begin)
    if FORM[name].needs_tool:  # any object before it has a name and arguments
        begun = answer.index(": {") + 3
    ends = range(begun, answer.index(value) + len(value))
    for end in ends:
        assert read(name, answer[:end], is_cut=True)[:3] == (text, "", [])
    shown = [
        item.text for item in read(name, *answer[: ends[-1]], is_cut=True)[3] if isinstance(item, Arguments)
    ]
    assert len(shown) > 20 and "sea sea" in "".join(shown)


@pytest.mark.parametrize("name", FORM)
def test_reading_takes_linear_time(name):
    """8,000 blanks in an answer, in the beginning that a prompt has, and behind each mark."""
    form, blanks = FORM[name], " \n" * 4_000
    begun = time.process_time()
    assert read(name, *blanks)[0] == ""
    assert read(name, *"Hi", prompt=blanks)[0] == "Hi"
    for mark in (*form.begins, *form.opens, *form.closes, *form.thought, "<", "[", "{"):
        read(name, mark, *blanks, "a", *blanks, mark)
        read(name, "a" + blanks + mark + blanks)
    assert time.process_time() - begun < 4


# Calls of `look` by form; what stands in front of one, and behind it.
LOOK = {
    "hermes": '<tool_call>{"name": "look", "arguments": %s}</tool_call>',
    "mistral": "[TOOL_CALLS]look[ARGS]%s",
    "llama": '{"name": "look", "parameters": %s}',
    "v3": "<｜tool▁calls▁begin｜>" + V3.format("look", "%s") + "<｜tool▁calls▁end｜>",
    "v3.1": "<｜tool▁calls▁begin｜>" + V31.format("look", "%s") + "<｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|>" + KIMI.format("look:0", "%s") + "<|tool_calls_section_end|>",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.look<|constrain|>json<|message|>%s<|call|>",
    "gemma": "<|tool_call>call:look%s<tool_call|>",
    "lfm2": "<|tool_call_start|>[look(%s)]<|tool_call_end|>",
    "glm": "<tool_call>look\n%s</tool_call>",
    "qwen coder": "<tool_call>\n<function=look>\n%s</function>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="look">\n%s</invoke>\n</minimax:tool_call>',
    "v3.2": dsml("function_calls", invoke("look", "%s")),
    "v4": dsml("tool_calls", invoke("look", "%s")),
}
JSON = ("hermes", "mistral", "v3", "v3.1", "kimi", "harmony", "llama")
# An argument of a call with tags.
TAG = {
    "glm": "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
    "qwen coder": "<parameter={}>\n{}\n</parameter>\n",
    "minimax": '<parameter name="{}">{}</parameter>\n',
    "v3.2": '<｜DSML｜parameter name="{}" string="true">{}</｜DSML｜parameter>\n',
    "v4": '<｜DSML｜parameter name="{}" string="true">{}</｜DSML｜parameter>\n',
}
OF = {name: tag.format("of", "sea") for name, tag in TAG.items()} | dict.fromkeys(JSON, '{"of": "sea"}')
OF |= {"gemma": '{of:<|"|>sea<|"|>}', "lfm2": "of='sea'"}
CALLED = ("look", '{"of": "sea"}', True)
# {form: marks that stand in front of calls, around them, and behind them}
ALL_MARKS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "mistral": ["[TOOL_CALLS]"],
    "llama": ["<|python_tag|>", "{", '{"name": "Bob"'],
    "v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
           "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"],
    "v3.1": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look"],
    "kimi": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>",
             "<|tool_call_begin|>functions.look:0"],
    "harmony": ["<|start|>", "<|channel|>", "<|channel|>analysis", "<|start|>assistant to=functions.look"],
    "gemma": ["<|tool_call>", "<|tool_call>call:look", "<tool_call|>"],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call_start|>[look"],
    "glm": ["<tool_call>", "<tool_call>look", "</tool_call>"],
    "qwen coder": ["<tool_call>", "<function=", "</tool_call>", "<tool_call>\n<function=look>"],
    "minimax": ["<minimax:tool_call>", '<invoke name="', "</minimax:tool_call>", '<invoke name="look">'],
    "v3.2": ["<｜DSML｜function_calls>", '<｜DSML｜invoke name="', '<｜DSML｜invoke name="look">'],
    "v4": ["<｜DSML｜tool_calls>", '<｜DSML｜invoke name="', '<｜DSML｜invoke name="look">'],
}  # fmt: skip
# {form: (arguments that break off, what is shown of them)}
BREAKS_OFF = {name: ('{"of": {"a": "sky"', '{"of": {"a": "sky"') for name in JSON if name != "llama"} | {
    "hermes": ('{"of": {"a": "sky"', '{"of": {"a": "sky"}'),  # with the brace of the call
    "v3": ('{"of": {"a": "sky"', '{"of": {"a": "sky"\n'),
    "gemma": ('{of:{a:<|"|>sky<|"|>', '{"of": {"a": "sky"'),
    "lfm2": ("of={'a': 1", '{"of": {\'a\': 1)'),
    "glm": ("<arg_key>of", "{"),
    "qwen coder": ("<parameter=of", "{"),
    "minimax": ('<parameter name="of', "{"),
    "v3.2": ('<｜DSML｜parameter name="of', "{"),
    "v4": ('<｜DSML｜parameter name="of', "{"),
}  # fmt: skip
IN_STRING = {"hermes": "</tool_call> <tool_call>", "mistral": "[TOOL_CALLS]", "llama": '; {\\"name',
             "v3": "```<｜tool▁call▁end｜>", "v3.1": "<｜tool▁call▁end｜>", "kimi": "<|tool_call_end|>",
             "harmony": "<|call|><|start|>", "gemma": "<tool_call|>", "lfm2": ")]<|tool_call_end|>",
             "qwen coder": "</tool_call>", "glm": "</tool_call>", "minimax": "</minimax:tool_call>",
             "v3.2": "</｜DSML｜function_calls>", "v4": "</｜DSML｜tool_calls>"}  # fmt: skip
MAYBE = [TEXT, {"type": "null"}]
SCHEMAS["typed"] = {
    "$defs": {"T": TEXT, "U": {"anyOf": [{"$ref": "#/$defs/T"}, {"type": "null"}]}},
    "properties": {
        "any": {"anyOf": MAYBE}, "one": {"oneOf": [TEXT, NUMBER]}, "all": {"allOf": [TEXT, {"minLength": 1}]},
        "list": {"type": ["string", "null"]}, "open": {"type": "string", "nullable": True},
        "ref": {"$ref": "#/$defs/T"}, "deep": {"anyOf": [{"$ref": "#/$defs/U"}, NUMBER]},
        "number": {"anyOf": [NUMBER, {"type": "null"}]}, "array": {"type": "array"}, "free": {},
        "choice": {"enum": ["1", None]},
    },
}  # fmt: skip
TYPED = [
    ("any", "123", '"123"'), ("one", "true", '"true"'), ("all", '{"a": 1}', r'"{\"a\": 1}"'), ("list", "1.5", '"1.5"'),
    ("open", "null", "null"), ("ref", "null", '"null"'), ("deep", "[1]", '"[1]"'), ("number", "3", "3"),
    ("array", "['a', True]", '["a", true]'), ("free", "2", "2"), ("choice", "1", '"1"'), ("other", "x, y", '"x, y"'),
]  # fmt: skip
NULLS = [("any", "null"), ("list", "null"), ("deep", "null"), ("number", "null"), ("choice", "null")]


def in_tags(name: str, look: str) -> list[tuple]:
    """(case, answer, its call) of values in tags with marks in them."""
    tags, text = FORM[name].arguments, TAG[name]
    plain, typed = text.replace('string="true"', 'string="false"'), look.replace("look", "typed")
    own = f"a {tags.end} b {tags.begin}c d"
    values = [f"a {tags.value_end} {tags.end}", 1, {tags.value_end: '\\"'}]
    in_json, odd = json.dumps(values, ensure_ascii=False), json.dumps('{"a": "b')
    cases = [
        (
            "marks in a text",
            look % text.format("of", own),
            "look",
            f'{{"of": "{own.replace(chr(34), chr(92) + chr(34))}"}}',
        ),
        (
            "marks in JSON",
            typed % (plain.format("array", in_json) + plain.format("free", in_json)),
            "typed",
            f'{{"array": {in_json}, "free": {in_json}}}',
        ),
        (
            "a quote in Python",
            typed % (plain.format("array", """['5" a', 'b']""") + plain.format("free", '"b"')),
            "typed",
            r'{"array": ["5\" a", "b"], "free": "b"}',
        ),
    ]
    if "string" not in plain:
        given = plain.format("array", "[1]") + plain.format("free", '{"a": "b')
        cases += [("a string without an end", typed % given, "typed", f'{{"array": [1], "free": {odd}}}')]
    return [(case, answer, (tool, arguments, True)) for case, answer, tool, arguments in cases]


def table() -> list[tuple[str, str, str, str, str, list[tuple[str, str, bool]]]]:
    """(form, case, answer, text, reasoning, [(name, arguments, whether they are whole)])."""
    made = []

    def add(name: str, case: str, answer: str, text: str, *calls: tuple, thought: str = "") -> None:
        made.append((name, case, answer, text, thought, [*calls]))

    for name, look in LOOK.items():
        whole = look % OF[name]
        for number, mark in enumerate(ALL_MARKS[name]):
            quoted = f"In it, {mark} is the mark, they say: {mark}"
            add(name, f"mark {number} in text", quoted, quoted)
        add(name, "text around", f"Hi {whole} Bye", "HiBye", CALLED)
        if name in BREAKS_OFF:
            broken, shown = BREAKS_OFF[name]
            answer = f"{look % broken} So {whole} Bye"
            if name == "mistral":  # no mark ends its calls
                answer = f"{look % broken}{whole} Bye"
            add(
                name,
                "breaks off",
                answer,
                "Bye" if name == "mistral" else "SoBye",
                ("look", shown, False),
                CALLED,
            )
        if name in JSON:
            add(
                name,
                "no JSON",
                look % '{"of": sky}' + whole + " Bye",
                "Bye",
                ("look", '{"of": sky}', False),
                CALLED,
            )
            add(name, "NaN", look % '{"of": NaN}', "", ("look", '{"of": NaN}', False))
            if name in ("hermes", "harmony", "llama"):  # the name is known before
                add(name, "no brace", look % "of=sky", "", ("look", "of=sky", False))
            else:
                add(name, "no brace", look % "of=sky", look % "of=sky")
        if name in IN_STRING:
            own = f"a {IN_STRING[name]} b"
            given = TAG[name].format("of", own) if name in TAG else OF[name].replace("sea", own)
            add(name, "marks in a string", f"{look % given} Bye", "Bye", ("look", f'{{"of": "{own}"}}', True))
        if name in TAG:
            for case, answer, *calls in in_tags(name, look):
                add(name, case, f"{answer} So {whole} Bye", "SoBye", *calls, CALLED)
            add(name, "no argument", look % "is a tool\n", (look % "is a tool\n").strip())
        if name in TAG and "DSML" not in look:
            typed = look.replace("look", "typed")
            for number in range(0, len(TYPED), 3):
                some = TYPED[number : number + 3]
                given = "".join(TAG[name].format(key, value) for key, value, _ in some)
                expected = ", ".join(f'"{key}": {value}' for key, _, value in some)
                add(name, f"types {number}", typed % given, "", ("typed", f"{{{expected}}}", True))
            given = "".join(TAG[name].format(*each) for each in NULLS)
            nulls = '{"any": null, "list": null, "deep": null, "number": null, "choice": null}'
            add(name, "nulls", typed % given, "", ("typed", nulls, True))
    return made + OTHERS


OTHERS = [
    ("hermes", "escapes that JSON lacks", r'''<tool_call>{"name": "look", "arguments": "{\"of\": \"\d\"}"}</tool_call> Bye''',
     "Bye", "", [("look", r'''"{\"of\": \"\d\"}"''', False)]),
    ("hermes", "half a pair", r'''<tool_call>{"name": "look", "arguments": "{\"of\": \"a\ud83d\"}"}</tool_call> Bye''',
     "Bye", "", [("look", r'''{"of": "a\ud83d"}''', True)]),
    ("lfm2", "hyphens", "<|tool_call_start|>[look-up(file-path='a', x.y=1)]<|tool_call_end|>", "", "",
     [("look-up", '{"file-path": "a", "x.y": 1}', True)]),
    ("lfm2", "strings in a row", "<|tool_call_start|>[look(of='a' \n\"b\" \'\'\'c\'\'\', n=[1])]<|tool_call_end|> Bye", "Bye", "",
     [("look", '{"of": "abc", "n": [1]}', True)]),
    ("hermes", "unknown keys", '<tool_call>{"why": {"a": [1]}, "name": "look", "n": 7, "arguments": {"of": "sea"}, "x": null}'
     "</tool_call> Bye", "Bye", "", [CALLED]),
    ("hermes", "function", '<tool_call>{"type": "function", "function": {"name": "look", "arguments": {"of": "sea"}}, "n": 1}'
     "</tool_call> Bye", "Bye", "", [CALLED]),
    ("hermes", "no outer brace", '<tool_call>{"name": "look", "arguments": {"of": "sea"}</tool_call> Bye', "Bye", "", [CALLED]),
    ("hermes", "arguments as no JSON", '<tool_call>{"name": "look", "arguments": "of sea"}</tool_call>', "", "",
     [("look", "of sea", False)]),
    ("hermes", "no name", '<tool_call>{"arguments": {"of": "sea"}}</tool_call>',
     '<tool_call>{"arguments": {"of": "sea"}}</tool_call>', "", []),
    ("mistral", "unknown keys", '[TOOL_CALLS] [{"why": "x", "name": "look", "arguments": {"of": "sea"}, "n": 1}] Bye', "Bye", "",
     [CALLED]),
    ("mistral", "list without a brace", '[TOOL_CALLS] [{"name": "look", "arguments": {"of": "sky"}, '
     '{"name": "look", "arguments": {"of": "sea"}}] Bye', "Bye", "", [("look", '{"of": "sky"}', True), CALLED]),
    ("mistral", "list in text", "[TOOL_CALLS] [1] is one", "[TOOL_CALLS] [1] is one", "", []),
    ("llama", "unknown key", '{"name": "look", "why": "x", "parameters": {"of": "sea"}}', "", "", [CALLED]),
    ("llama", "lines", '{"name": "look", "parameters": {"of": "sea"}}\n{"name": "rest", "parameters": {}}', "", "",
     [CALLED, ("rest", "{}", True)]),
    *(("llama", case, text, text, "", []) for case, text in {
        "inner object": 'Use {"tool": {"name": "look", "parameters": {"of": "sea"}}} so.',
        "inner call": '{"name": "Bob", "parameters": {"a": {"name": "look", "parameters": {}}}} so.',
        "inner text": r'{"a": "{\"name\": \"look\", \"parameters\": {}}"} so.',
        "no parameters": '{"name": "look"} so.', "no name": '{"parameters": {}} so.',
    }.items()),
    ("llama", "call behind JSON", '{"a": 1} {"name": "look", "parameters": {"of": "sea"}}', '{"a": 1}', "", [CALLED]),
    ("kimi", "open reasoning", "<think>hm" + LOOK["kimi"] % OF["kimi"] + " Bye", "Bye", "hm", [CALLED]),
    ("kimi", "open reasoning, no section", "<think>hm" + KIMI.format("look:0", '{"of": "sea"}'), "", "hm", [CALLED]),
    ("kimi", "mark in reasoning", "<think>Is <|tool_calls_section_begin|> one?</think>Hi", "Hi",
     "Is <|tool_calls_section_begin|> one?", []),
    ("lfm2", "values", "<|tool_call_start|>[look(a=.5, b=1_000, c=0x1F, d=(1), e={1: 2}, f=[True, None, 'x'], g=(1,), h=-2, i=true)]"
     "<|tool_call_end|>", "", "", [("look", '{"a": 0.5, "b": 1000, "c": 31, "d": 1, "e": {"1": 2}, "f": [true, null, "x"], '
                                    '"g": [1], "h": -2, "i": true}', True)]),
    ("lfm2", "strings", r"""<|tool_call_start|>[look(a="\u00e9\101\x41\t\d'", b='''it's''', c='', d="\ud83d\ude00")]<|tool_call_end|>""",
     "", "", [("look", r'''{"a": "éAA\t\\d'", "b": "it's", "c": "", "d": "\ud83d\ude00"}''', True)]),
    ("lfm2", "no literals", "<|tool_call_start|>[look(of=sky), look(of={1, 2}), look(of='sea')]<|tool_call_end|> Bye", "Bye", "",
     [("look", '{"of": sky}', False), ("look", '{"of": {1, 2}}', False), CALLED]),
    ("lfm2", "no bracket", "<|tool_call_start|>[look(of='sea'<|tool_call_end|> Bye", "Bye", "", [("look", '{"of": "sea"', False)]),
    ("lfm2", "positional", "<|tool_call_start|>[look('sky')]<|tool_call_end|> Bye", "Bye", "", [("look", "{", False)]),
    *((name, "no end of the function", LOOK[name].replace(end, "") % OF[name] + " Bye", "Bye", "", [CALLED])
      for name, end in (("qwen coder", "</function>\n"), ("minimax", "</invoke>\n"), ("v3.2", "</｜DSML｜invoke>\n"))),
    ("harmony", "marks in a message", "<|channel|>final<|message|>The <|channel|> and <|end|> marks.<|return|>",
     "The <|channel|> and <|end|> marks.", "", []),
    ("harmony", "marks in reasoning", "<|channel|>analysis<|message|>A <|channel|> b<|end|><|start|>assistant<|channel|>final"
     "<|message|>Hi<|return|>", "Hi", "A <|channel|> b", []),
    ("harmony", "text behind a broken call", LOOK["harmony"] % '{"of": {' + "<|start|>assistant<|channel|>final<|message|>Hi<|return|>",
     "Hi", "", [("look", '{"of": {', False)]),
]  # fmt: skip


def parts_of(items: list) -> tuple[str, str, list[tuple[str, str, bool]]]:
    """The text, the reasoning, and the calls that have ended."""
    text, thought = (
        "".join(i.text for i in items if isinstance(i, Piece) and i.kind == kind)
        for kind in ("text", "reasoning")
    )
    calls = [i for i in items if isinstance(i, ToolCall) and i.has_ended]
    return text, thought, [(call.name, call.arguments, call.is_whole) for call in calls]


@pytest.mark.parametrize(
    ("name", "case", "answer", "text", "thought", "calls"), table(), ids=lambda value: None
)
def test_what_is_no_call_is_text_and_a_broken_call_ends(name, case, answer, text, thought, calls):
    """Cut at every place, in single characters, and whole: the stream and the whole answer are the same."""
    cuts = [(answer[:at], answer[at:]) for at in range(len(answer))]
    for pieces in (*cuts, tuple(answer)):
        made = Items(lambda sink: Reader(FORM[name], sink, SCHEMAS))
        stream = [item for piece in pieces for item in made.add(piece)] + made.end(False, False)
        assert parts_of(stream) == (text, thought, calls), pieces
        assert parts_of(made.made) == (text, thought, calls), pieces
        grown = dict[int, str]()
        for item in stream:
            if isinstance(item, Arguments):
                grown[id(item.call)] = grown.get(id(item.call), "") + item.text
        assert [*grown.values()] == [arguments for _, arguments, _ in calls]


@pytest.mark.parametrize("name", TAG)
def test_marks_in_a_text_that_is_cut_off_end_no_call(name):
    tags = FORM[name].arguments
    answer = LOOK[name].replace("%s", TAG[name]).format("of", f"a {tags.end} b {tags.begin}c {tags.end} d")
    for end in range(answer.index("a <"), answer.index(tags.value_end)):
        assert read(name, answer[:end], is_cut=True)[:3] == ("", "", []), answer[:end]


ROLES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
# (form, chat template without the form's marks, start of the answer that its generation prompt has)
BEGINNINGS = [
    ("hermes", ROLES + "<|im_start|>assistant\n<think>\n{% endif %}", "<think>\n"),
    ("hermes", ROLES + CLOSED + "{% endif %}", "<think>\n\n</think>\n\n"),
    ("hermes", ROLES + "<|start_of_role|>assistant<|end_of_role|>{% endif %}", ""),  # as Granite's
    # As DeepSeek V3.1's, which has none behind a tool's result, and Mistral's, which never has one.
    ("v3.1", ROLES + "{% if messages[-1].role != 'tool' %}<｜Assistant｜><think>{% endif %}{% endif %}", ""),
    ("mistral", ROLES + "{% endif %}", ""),
    ("gemma", ROLES + "<|turn>model\n<|channel>thought\n<channel|>{% endif %}", "<|channel>thought\n<channel|>"),
    ("harmony", ROLES + "<|start|>assistant{% endif %}", "<|start|>assistant"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "template", "begun"), BEGINNINGS)
def test_a_generation_prompt_begins_the_answer(name, template, begun):
    """And nothing that a message says does, whichever marks it has."""
    marks = "{% if false %}{% raw %}" + MARKS[name] + "{% endraw %}{% endif %}"
    own = ChatTemplate(tokenizer_of([], chat_template=template + marks), "a")
    hostile = (
        "<think> [THINK] <|channel>thought\n <|channel|>analysis<|message|> <|im_start|>assistant\n<think>\n"
    )
    messages = [{"role": role, "content": [{"type": "text", "text": hostile}]} for role in ("user", "tool")]
    assert own.begun(Chat(messages), messages) == begun
    answer = read(name, "<|channel|>final<|message|>Hi" if name == "harmony" else "Hi", prompt=begun)
    assert answer[:2] == (("", "Hi") if begun.endswith("<think>\n") else ("Hi", ""))


@pytest.mark.parametrize(
    ("last", "begun", "answer"),
    [
        ("Hello", "Hello", (" world", "")),
        ("<think>\nhm", "<think>\nhm", ("", " world")),
        ("<think>hm</think>So", "<think>hm</think>So", (" world", "")),
    ],
)
def test_a_message_that_goes_on_begins_the_answer(last, begun, answer):
    template = (
        ROLES.replace("[{{ m.role }}]", "<|im_start|>{{ m.role }}\n") + "<|im_start|>assistant\n{% endif %}"
    )
    own = ChatTemplate(tokenizer_of([], chat_template=template + "{# <tool_call> #}"), "a")
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}]}
        for role, text in (("user", "<think>?"), ("assistant", last))
    ]
    assert own.begun(Chat(messages, goes_on=True), messages) == begun
    assert read("hermes", " world", prompt=begun)[:2] == answer


# What chat templates render for a call, in the forms that their publishers describe.
TEMPLATES = {
    "hermes": '<tool_call>\n{"name": {{ name | tojson }}, "arguments": {{ arguments | tojson }}}\n</tool_call>',
    "qwen coder": "<tool_call>\n<function={{ name }}>\n{% for k, v in arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "glm": "<tool_call>{{ name }}\n{% for k, v in arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="{{ name }}">\n{% for k, v in arguments.items() %}<parameter '
    'name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ name }}:0<|tool_call_argument_begin|>"
    "{{ arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
    "v3.1": DEEPSEEK.format(V31).format("{{ name }}", "{{ arguments | tojson }}"),
    "mistral": '[TOOL_CALLS] [{"name": {{ name | tojson }}, "arguments": {{ arguments | tojson }}}]',
    "llama": '{"name": {{ name | tojson }}, "parameters": {{ arguments | tojson }}}',
}
WRITTEN = 'é "x"\\ <b>\n\n{a: [1]}  </p> \t'


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_renders_is_read_back(name):
    environment = jinja2.Environment()
    environment.policies["json.dumps_function"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(TEMPLATES[name])
    for function, arguments in (("write", {"text": WRITTEN}), SKY, ("rest", {})):
        answer = template.render(name=function, arguments=arguments)
        assert read(name, *answer)[:3] == ("", "", [(function, arguments)])
