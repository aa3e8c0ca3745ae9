"""Calls and results of earlier turns, as each family's chat template takes them.

The templates do with calls what their publishers' do, and nothing else: they join or dump arguments, walk
through their items, check ids, count calls and raise.
"""

# ruff: noqa: E501  (templates and answers in one piece)

import re
from importlib import resources

import pytest
from support import scripted
from support.serving import said

from torch_moe_mps.serving.http.calls import CallForm
from torch_moe_mps.serving.http.request import Chat

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "rest")]
TOOLS[0]["function"]["parameters"] = {
    "type": "object",
    "properties": {"of": {"type": "string"}, "days": {"type": "integer"}},
}
SKY = '{"of": "sky", "days": 2}'
ID9 = "{% if id is not defined or id | length != 9 %}{{ raise_exception('ids of 9 characters') }}{% endif %}"
NO_TEXT = "{% if arguments is string %}{{ raise_exception('arguments must be an object') }}{% endif %}"


def turns(
    call: str,
    before: str = "",
    behind: str = "",
    result: str = "",
    first: str = "",
    calls: str = "m.tool_calls",
) -> str:
    """A chat template.

    Args:
        call: one of the `calls`, of `name`, `arguments`, `id` and `loop`.
        result: additions in front of a tool's result with `id`.
        first: in front of all.
    """
    setters = "{% set name = c.function.name %}{% set arguments = c.function.arguments %}{% set id = c.id %}"
    return (
        f"{first}{{% for m in messages %}}{{% if m.role == 'tool' %}}{{% set id = m.tool_call_id %}}{result}"
        "[result of {{ id }}]{{ m.content }}{% elif m.tool_calls %}<|im_start|>assistant\n{{ m.content }}"
        f"{before}{{% for c in {calls} %}}{setters}{call}{{% endfor %}}{behind}<|im_end|>"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def marks(text: str) -> str:
    """A comment by which the form of calls is known."""
    return f"{{% if false %}}{{% raw %}}{text}{{% endraw %}}{{% endif %}}"


def dsml(calls: str, space: str = "") -> tuple[str, str]:
    tag = f"｜DSML｜{space}"
    one = (
        f'{NO_TEXT}<{tag}invoke name="{{{{ name }}}}">\n{{% for k, v in arguments.items() %}}'
        f"<{tag}parameter name=\"{{{{ k }}}}\" string=\"{{{{ 'true' if v is string else 'false' }}}}\">"
        f"{{{{ v if v is string else v | tojson }}}}</{tag}parameter>\n{{% endfor %}}</{tag}invoke>\n"
    )
    written = (
        f'<{tag}{calls}>\n<{tag}invoke name="look">\n<{tag}parameter name="of" string="true">sky</{tag}parameter>\n'
        f'<{tag}parameter name="days" string="false">2</{tag}parameter>\n</{tag}invoke>\n'
        f'<{tag}invoke name="rest">\n</{tag}invoke>\n</{tag}{calls}>'
    )
    return turns(one, f"<{tag}{calls}>\n", f"</{tag}{calls}>"), written


CALL_MARK, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
CALLS_MARK, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
HARMONY = "<|channel|>commentary to=functions.{} json<|message|>{}<|call|>"
TAGGED = "{% for k, v in arguments | items %}"
# {family: (its template, what its model writes for two calls)}
FAMILIES = {
    "harmony": (
        turns(HARMONY.format("{{ name }}", "{{ arguments | tojson }}"), first=marks("<|channel|>analysis"), calls="m.tool_calls[:1]"),
        HARMONY.format("look", SKY) + HARMONY.format("rest", "{}"),
    ),
    "gemma": (
        turns(
            f"{NO_TEXT}<|tool_call>call:{{{{ name }}}}{{{{ '{{' }}}}{{% for k, v in arguments | dictsort %}}"
            "{{ k }}:{{ '<|\"|>' ~ v ~ '<|\"|>' if v is string else v }}{{ ',' if not loop.last }}{% endfor %}"
            "{{ '}' }}<tool_call|>",
            first=marks("<|turn>"),
        ),
        '<|tool_call>call:look{days:2,of:<|"|>sky<|"|>}<tool_call|><|tool_call>call:rest{}<tool_call|>',
    ),
    "v3.2": dsml("function_calls"),
    "v4": dsml("tool_calls"),
    "v4.1": dsml("calls", " "),
    "r1": (
        turns(
            CALL_MARK + "{{ c.type + '" + SEPARATOR + "' + name + '\n```json\n' + arguments + '\n```' }}" + CALL_END,
            CALLS_MARK,
            CALLS_END,
        ),
        f"{CALLS_MARK}{CALL_MARK}function{SEPARATOR}look\n```json\n{{\"of\":\"sky\",\"days\":2}}\n```{CALL_END}"
        f"{CALL_MARK}function{SEPARATOR}rest\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
    ),
    "v3.1": (
        turns(CALL_MARK + "{{ name + '" + SEPARATOR + "' + arguments }}" + CALL_END, CALLS_MARK, CALLS_END),
        f"{CALLS_MARK}{CALL_MARK}look{SEPARATOR}{{\"of\":\"sky\",\"days\":2}}{CALL_END}"
        f"{CALL_MARK}rest{SEPARATOR}{{}}{CALL_END}{CALLS_END}",
    ),
    "kimi": (
        turns(
            "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>"
            "{{ arguments if arguments is string else arguments | tojson }}<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
        ),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        f"{SKY}<|tool_call_end|><|tool_call_begin|>functions.rest:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "minimax": (
        turns(
            '<invoke name="{{ name }}">\n{% if arguments is mapping %}' + TAGGED + '<parameter name="{{ k }}">'
            "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}{% endif %}</invoke>\n",
            "<minimax:tool_call>\n",
            "</minimax:tool_call>",
        ),
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="of">sky</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="rest">\n</invoke>\n</minimax:tool_call>',
    ),
    "glm": (
        turns(
            "<tool_call>{{ name }}\n{% for k, v in (arguments or {}).items() %}<arg_key>{{ k }}</arg_key>\n"
            "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
        ),
        "<tool_call>look\n<arg_key>of</arg_key>\n<arg_value>sky</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call><tool_call>rest\n</tool_call>",
    ),
    "qwen coder": (
        turns(
            "<tool_call>\n<function={{ name }}>\n" + TAGGED + "<parameter={{ k }}>\n"
            "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
        ),
        "<tool_call>\n<function=look>\n<parameter=of>\nsky\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call><tool_call>\n<function=rest>\n</function>\n</tool_call>",
    ),
    "mistral of 2024": (
        turns(
            f"{ID9}{{% set out = c.function | tojson %}}{{{{ out[:-1] }}}}, \"id\": \"{{{{ id }}}}\"}}"
            "{{ ', ' if not loop.last }}",
            "[TOOL_CALLS] [",
            "]",
            ID9,
        ),
        f'[TOOL_CALLS] [{{"name": "look", "arguments": {SKY}}}, {{"name": "rest", "arguments": {{}}}}]',
    ),
    "mistral small 3.2": (
        turns(
            f"{ID9}[TOOL_CALLS]{{{{ name }}}}[CALL_ID]{{{{ id }}}}[ARGS]{{{{ arguments | tojson }}}}", result=ID9
        ),
        f"[TOOL_CALLS]look[CALL_ID]a1B2c3D4e[ARGS]{SKY}[TOOL_CALLS]rest[CALL_ID]000000001[ARGS]{{}}",
    ),
    "devstral": (
        turns("{{ '[TOOL_CALLS]' + name + '[ARGS]' + (arguments if arguments is string else arguments | tojson) }}"),
        f"[TOOL_CALLS]look[ARGS]{SKY}[TOOL_CALLS]rest[ARGS]{{}}",
    ),
    "lfm2": (
        turns(
            f"{NO_TEXT}{{{{ name }}}}({{% for k, v in arguments.items() %}}{{{{ k }}}}={{{{ \"'\" ~ v ~ \"'\" if v is string else v }}}}"
            "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}",
            "<|tool_call_start|>[",
            "]<|tool_call_end|>",
        ),
        '<|tool_call_start|>[look(of=\'sky\', days=2), rest()]<|tool_call_end|>',
    ),
    "hermes": (
        turns('<tool_call>\n{"name": "{{ name }}", "arguments": {{ arguments | tojson }}}\n</tool_call>'),
        f'<tool_call>\n{{"name": "look", "arguments": {SKY}}}\n</tool_call>'
        '<tool_call>\n{"name": "rest", "arguments": {}}\n</tool_call>',
    ),
    "llama": (
        turns(
            "{% if not loop.length == 1 %}{{ raise_exception('one call at once') }}{% endif %}"
            '{"name": "{{ name }}", "parameters": {{ arguments | tojson }}}',
            first=marks("<|start_header_id|>"),
        ),
        f'{{"name": "look", "parameters": {SKY}}}; {{"name": "rest", "parameters": {{}}}}',
    ),
}  # fmt: skip


# {family whose templates render one call a message: what is between calls}
APART = {"harmony": "(?<=<.call.>)(?=<)", "llama": "; "}


def without_ids(text: str) -> str:
    return re.sub(r', "id": "\w{9}"', "", text)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_turn_behind_two_calls(here, of_openai, family):
    """The model reads what it has written, and results with the ids of their calls."""
    template, written = FAMILIES[family]
    with scripted.templated(here, template):
        here.says(written, "Done.")
        asked = {"model": "m", "tools": TOOLS}
        message = of_openai.chat.completions.create(messages=said("a"), **asked).choices[0].message
        calls = message.tool_calls
        assert [call.function.name for call in calls] == ["look", "rest"] and message.content is None
        ids = [call.id for call in calls]
        results = [{"role": "tool", "tool_call_id": own, "content": f"<{n}>"} for n, own in enumerate(ids)]
        history = [*said("a"), message.model_dump(exclude_none=True), *results]
        answer = of_openai.chat.completions.create(messages=history, **asked)
        assert answer.choices[0].message.content == "Done."
        prompt = without_ids(here.generator.prompts[1])
    shown = [f"[result of {own}]<{n}>" for n, own in enumerate(ids)]
    if family in APART:
        for call, result in zip(re.split(APART[family], written), shown, strict=True):
            assert f"{call}<|im_end|>{result}" in prompt
    else:
        assert f"{written}<|im_end|>{''.join(shown)}" in prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_of_another_model(here, of_anthropic, family):
    """Of another server: its ids become those of the form, and calls keep their results."""
    ids = ["toolu_01A09q90qw90lq917835lq9", "t"]
    inputs = [("look", {"of": "sky", "days": 2}), ("rest", {})]
    calls = [
        {"type": "tool_use", "id": own, "name": name, "input": given}
        for own, (name, given) in zip(ids, inputs, strict=True)
    ]
    results = [{"type": "tool_result", "tool_use_id": own, "content": f"<{n}>"} for n, own in enumerate(ids)]
    history = [*said("a"), {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    with scripted.templated(here, FAMILIES[family][0]) as template:
        here.says("Done.")
        message = of_anthropic.messages.create(model="m", max_tokens=9, messages=history)
        assert message.content[0].text == "Done."
        (prompt,), form = here.generator.prompts, template.call_form
    shown = re.findall(r"\[result of ([^]]+)\]<(\d)>", prompt)
    assert [number for _, number in shown] == ["0", "1"]
    if form.ids == "any":
        assert [own for own, _ in shown] == ids
    elif family == "kimi":
        assert [own for own, _ in shown] == ["functions.look:0", "functions.rest:1"]
    else:
        assert all(re.fullmatch("[a-zA-Z0-9]{9}", own) for own, _ in shown) and shown[0][0] != shown[1][0]
        assert all(prompt.count(own) == 2 for own, _ in shown)
    assert "look" in prompt and "sky" in prompt and "rest" in prompt and "{'of'" not in prompt


FORMS = {
    "r1": CallForm("text"), "v3.1": CallForm("text"), "kimi": CallForm(ids="named"),
    "mistral of 2024": CallForm(ids="short"), "mistral small 3.2": CallForm(ids="short"),
    "llama": CallForm(is_single=True), "harmony": CallForm(is_single=True),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_form_that_a_template_takes(here, family):
    with scripted.templated(here, FAMILIES[family][0]) as template:
        assert template.call_form == FORMS.get(family, CallForm())


# {form of content next to calls: what a template does with it}
CONTENTS = {
    "beside": "{{ m.content }}{{ m.reasoning_content }}",
    "thought": "{% if m.content and m.reasoning_content %}{{ raise_exception('both') }}{% endif %}"
    "{{ m.content }}{{ m.reasoning_content }}",
    "apart": "",
}


@pytest.mark.parametrize("form", CONTENTS)
@pytest.mark.parametrize("thought", ["", "Hm."])
def test_content_next_to_calls_is_not_lost(here, of_openai, form, thought):
    """As gpt-oss' template refuses it with reasoning, and Llama 3's has none."""
    template, _ = FAMILIES["hermes"]
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": SKY}}
    answer = {"role": "assistant", "content": "So.", "reasoning_content": thought, "tool_calls": [call]}
    history = [*said("a"), answer, {"role": "tool", "tool_call_id": "a", "content": "blue"}]
    template = template.replace("assistant\n{{ m.content }}{% for", f"assistant\n{CONTENTS[form]}{{% for")
    with scripted.templated(here, template) as own:
        here.says("Done.")
        message = of_openai.chat.completions.create(model="m", messages=history).choices[0].message
        assert message.content == "Done."
        assert own.call_form.content == form
        (prompt,) = here.generator.prompts
    assert "So." in prompt and '"look"' in prompt and "blue" in prompt
    assert thought in prompt or form == "apart"


def test_a_result_has_the_name_of_its_tool(here, of_openai, of_anthropic):
    """As Hermes' template asks for it; a name that a message has stays."""
    template = "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% if m.role == 'tool' %}{{ ' of ' + m.name }}{% endif %}{% endfor %}"
    calls = [
        {"id": f"call {name}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in ("look", "rest")
    ]
    results = [
        {"role": "tool", "tool_call_id": "call rest", "content": "2"},
        {"role": "tool", "tool_call_id": "call look", "content": "1", "name": "own"},
    ]
    history = [*said("a"), {"role": "assistant", "tool_calls": calls}, *results]
    with scripted.templated(here, template + marks("<tool_call>")):
        here.says("Done.")
        of_openai.chat.completions.create(model="m", messages=history)
        assert here.generator.prompts[0].endswith("[tool]2 of rest[tool]1 of own")
        given = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": "3"}
        history = [
            *said("a"),
            {"role": "assistant", "content": [given]},
            {"role": "user", "content": [result]},
        ]
        of_anthropic.messages.create(model="m", max_tokens=9, messages=history)
        assert here.generator.prompts[1].endswith("[tool]3 of look")


def test_arguments_that_are_joined_without_an_error(here):
    """Python's syntax is none that a model was trained with; a template without calls takes any form."""
    for call, form in (
        ("{{ name ~ arguments }}", CallForm("text")),
        ("{{ name }}{{ arguments }}", CallForm("text")),
        ("", CallForm()),
    ):
        with scripted.templated(here, turns(call)) as template:
            assert template.call_form == form, call


@pytest.mark.sweep
def test_published_templates_take_calls(here):
    """Those that TRL has copies of; the form of calls is known of most."""
    folder = resources.files(pytest.importorskip("trl")) / "chat_templates"
    known = 0
    for path in folder.iterdir():
        text = path.read_text() if path.name.endswith(".jinja") else ""
        if "tool_calls" not in text or "_training" in path.name:
            continue
        given = {"name": "look", "arguments": {"of": ["sky"]}}
        calls = [{"id": own, "type": "function", "function": given} for own in ("a", "toolu_01A09q90qw90l")]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": f"<{n}>"}]}
            for n, call in enumerate(calls)
        ]
        user = {"role": "user", "content": [{"type": "text", "text": "a"}]}
        messages = [user, {"role": "assistant", "content": [], "tool_calls": calls}, *results]
        with scripted.templated(here, text) as template:
            prompt = template.tokenizer.decode(template.apply(Chat(messages), messages)["input_ids"])
            known += template.form is not None
        assert "<0>" in prompt and "<1>" in prompt and "{'of'" not in prompt, path.name
        if path.name != "deepseek_r1_distill.jinja":  # renders calls only beside a content that is null
            assert prompt.count("look") >= 2 and prompt.count("sky") >= 2, path.name
    assert known > 20
