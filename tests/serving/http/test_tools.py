"""Tools that must be called: what a model with random weights writes is a call whose arguments fit."""

import json
import types

import openai
import pytest
import xgrammar
from support import serving
from support.serving import said
from support.sweep import in_sweep

from torch_moe_mps.serving.http.protocols import grammar
from torch_moe_mps.serving.http.protocols.forms import form_of
from torch_moe_mps.serving.http.request import Forced, Refused, Tool

SKY = {"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}}, "required": ["sky"]}
SEA = {"type": "object", "properties": {"calm": {"type": "boolean"}}, "required": ["calm"]}
FUNCTIONS = [{"name": "look", "parameters": SKY}, {"name": "swim", "parameters": SEA}, {"name": "rest"}]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
FITS = {"look": [{"sky": "blue"}, {"sky": "grey"}], "swim": [{"calm": False}, {"calm": True}], "rest": [{}]}
ASKED = {"model": "m", "messages": said("the sky"), "tools": TOOLS, "max_tokens": 150}


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


# Marks in the chat template by which the form of calls is known.
MARKS = {
    "hermes": "<|im_start|><tool_call></tool_call>",
    "tags": "<|im_start|><tool_call><function=a>",
    "gpt-oss": "<|channel|>analysis<|message|><|channel|>commentary",
    "glm": "<tool_call><arg_key>",
    "minimax": "<minimax:tool_call>",
    "llama": '<|start_header_id|>"parameters":',
    "mistral": "[TOOL_CALLS]",
}


def marked(name: str) -> str:
    """A chat template whose generation prompt ends reasoning."""
    marks = f"{{% if false %}}{{% raw %}}{MARKS[name]}{{% endraw %}}{{% endif %}}"
    return f"{serving.TEMPLATE}{{% if add_generation_prompt %}}</think>{{% endif %}}{marks}"


FORMS = ["hermes", "tags", "gpt-oss", "glm", "minimax", "llama"]
# What does not depend on the form of a call.
ONE_FORM = pytest.mark.parametrize("client", in_sweep(FORMS, FORMS[:1]), indirect=True, scope="module")


@pytest.fixture(scope="module", params=in_sweep(FORMS, FORMS[:3]))
def client(request, tmp_path_factory):
    """A server of a model with random weights, by the form of its calls."""
    folder = tmp_path_factory.mktemp("tools") / "model"
    serving.printable_checkpoint(folder, chat_template=marked(request.param))
    with serving.client_of(folder, *serving.QUANTISED) as client:
        yield client


def matcher_of(tag) -> xgrammar.GrammarMatcher:
    letters = [chr(i) for i in range(128)]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([*letters, ""], stop_token_ids=[128]))
    return xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag))


def calls_of(client, stream: bool = False, **asked) -> list[tuple[str, dict]]:
    answer = client.chat.completions.create(**ASKED | asked, stream=stream)
    parts = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
    calls = list[list[str]]()
    for call in (call.function for part in parts for call in part.tool_calls or ()):
        if call.name is not None:
            calls.append([call.name, ""])
        calls[-1][1] += call.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", in_sweep(FITS, ["look"]))
def test_a_tool_by_its_name(client, name):
    """Greedy and sampled, streamed and not: one call, and arguments that fit."""
    asked = {"temperature": 2, "seed": 1} if name == "look" else {"temperature": 0}
    ((called, arguments),) = calls_of(client, tool_choice=named(name), **asked)
    assert called == name and arguments in FITS[name]
    assert calls_of(client, True, tool_choice=named(name), **asked) == [(called, arguments)]


@ONE_FORM
def test_any_tool(client):
    """At least one, and just one where a request says so; None and auto force none."""
    asked = {"temperature": 2, "seed": 1, "tool_choice": "required"}
    calls = calls_of(client, parallel_tool_calls=False, **asked)
    assert len(calls) == 1 and all(arguments in FITS[name] for name, arguments in calls)
    name, arguments = calls_of(client, True, max_tokens=110, **asked)[0]
    assert arguments in FITS[name]
    for choice in ("none", "auto", None):
        assert not calls_of(client, temperature=0, tool_choice=choice, max_tokens=9)


@ONE_FORM
def test_a_call_that_is_cut_off_is_none(client):
    asked = ASKED | {"temperature": 0, "tool_choice": named("look"), "max_tokens": 20}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.message.tool_calls is None and choice.finish_reason == "length"


@ONE_FORM
def test_a_response_calls_a_tool(client):
    flat = [{"type": "function", **function} for function in FUNCTIONS]
    answer = client.responses.create(
        model="m", input="the sky", tools=flat, tool_choice={"type": "function", "name": "swim"},
        temperature=0, max_output_tokens=150,
    )  # fmt: skip
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "swim" and json.loads(call.arguments) in FITS["swim"]


@ONE_FORM
def test_a_call_has_no_format_of_texts(client):
    """A request may have both, as instructor's."""
    schema = {"type": "object", "properties": {"of": {"type": "integer"}}, "required": ["of"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    ((name, arguments),) = calls_of(client, tool_choice=named("swim"), response_format=form, temperature=0)
    assert name == "swim" and arguments in FITS["swim"]
    answer = client.responses.create(
        model="m", input="the sky", tools=[{"type": "function", **each} for each in FUNCTIONS],
        tool_choice={"type": "function", "name": "swim"}, temperature=0, max_output_tokens=150,
        text={"format": {"type": "json_schema", "name": "a", "schema": schema}},
    )  # fmt: skip
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "swim" and json.loads(call.arguments) in FITS["swim"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tool_choice": "always"}, "'tool_choice' must be none, auto, required or a function by its name"),
        ({"tool_choice": named("fly")}, "'tool_choice' must be one of the tools look, swim, rest, got 'fly'"),
        ({"tool_choice": "required", "tools": []}, "'tools' must be a list of at least one tool with"),
        (
            {
                "tool_choice": "required",
                "tools": [named("a") | {"function": {"name": "a", "parameters": {"type": 5}}}],
            },
            "The schema of 'tool_choice' must be one that xgrammar compiles, got: Type should be a string",
        ),
    ],
)
def test_what_is_no_choice_is_400(client, asked, message):
    with pytest.raises(openai.BadRequestError) as error:
        calls_of(client, **asked)
    assert message in error.value.body["message"] and "\n" not in error.value.body["message"]


HARMONY_CALL = 'to=functions.look<|channel|>commentary json<|message|>{"sky": "blue"}<|call|>'
THOUGHT = "<|channel|>analysis<|message|>hm<|end|>"


OWN = [Tool(function["name"], "", function.get("parameters", {})) for function in FUNCTIONS]


def forced(parallel: bool, mark: str):
    """The grammar of a call."""
    form = form_of(types.SimpleNamespace(chat_template=mark))
    return grammar.of_calls(Forced(OWN, "look"), form, parallel)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (f" {HARMONY_CALL}", True),
        (f"{THOUGHT}<|start|>assistant {HARMONY_CALL}", True),
        (THOUGHT, False),
        ("<|channel|>final<|message|>blue<|return|>", False),
        (f" {HARMONY_CALL}<|start|>assistant {HARMONY_CALL}", None),
    ],
)
def test_gpt_oss_must_call(text, fits, parallel):
    matcher = matcher_of(forced(parallel, MARKS["gpt-oss"]))
    expected = parallel if fits is None else fits
    assert (matcher.accept_string(text) and matcher.accept_token(128)) == expected


@pytest.mark.parametrize("mark", ["", MARKS["mistral"]])
def test_calls_of_another_form_are_refused(mark):
    """No form, and one whose calls xgrammar does not have."""
    with pytest.raises(Refused, match="'tool_choice' needs a model whose form of calls this server knows"):
        forced(True, mark)


CALL = '<tool_call>\n{"name": "look", "arguments": {"sky": "blue"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("begun", "text", "fits"),
    [
        ("", CALL, True),
        ("", f"<think>hm</think>\n\n{CALL}", True),
        ("<think>\n", f"hm</think>\n\n{CALL}", True),
        ("<think>\n", CALL, False),
        ("<think>\n\n</think>\n\n", CALL, True),
        ("<think>\n\n</think>\n\n", f"<think>hm</think>\n\n{CALL}", False),
        ("", "the sky is blue", False),
        ("", CALL.replace("blue", "red"), False),
        ("", CALL.replace("look", "fly"), False),
    ],
)
def test_a_call_comes_behind_what_the_model_thinks(begun, text, fits):
    matcher = matcher_of(forced(True, MARKS["hermes"]))
    assert matcher.accept_string(begun)
    assert (matcher.accept_string(text) and matcher.accept_token(128)) == fits
