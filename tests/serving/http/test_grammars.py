"""Answers in a schema of models that think and call tools: the grammar begins where the content begins.

Each chat template here begins an answer as its family's publisher does, and the texts are answers as these
models write them. `allowed` asks the mask of a request for each character in turn.
"""

# ruff: noqa: E501  (answers in one piece)

import openai
import pytest
import torch
from support import scripted
from support.scripted import ask
from support.serving import said

SKY = {"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}}, "required": ["sky"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SKY}}
ANY = {"type": "object", "properties": {"of": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": ANY}} for name in ("look", "rest")]
BLUE = '{"sky": "blue"}'
ROLES = (
    "{%% for m in messages %%}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%% if not loop.last or m.role != 'assistant' %%}<|im_end|>{%% endif %%}{%% endfor %%}"
    "{%% if add_generation_prompt %%}%s{%% endif %%}{%% if false %%}{%% raw %%}%s{%% endraw %%}{%% endif %%}"
)
THINKS, THOUGHT = "<|im_start|>assistant\n<think>\n", "hm</think>\n\n"
CODER, HERMES, HARMONY = (
    "<tool_call>\n<function=",
    "<tool_call>\n{",
    "<|channel|>analysis<|channel|>commentary",
)
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
# {family: (start of its answers in the prompt, marks of its form, what the model writes before its content)}
FAMILIES = {
    "qwen 3.5, nemotron 3": (THINKS, CODER, THOUGHT),
    "minimax m2": ("]~b]ai\n<think>\n", "<minimax:tool_call>", THOUGHT),
    "deepseek r1": ("<｜Assistant｜><think>\n", "<｜tool▁call▁begin｜>```json", THOUGHT),
    "deepseek v3.1, no thinking": ("<｜Assistant｜></think>", "<｜tool▁call▁begin｜>", ""),
    "qwen 3.5, no thinking": ("<|im_start|>assistant\n<think>\n\n</think>\n\n", CODER, ""),
    "qwen 3": ("<|im_start|>assistant\n", HERMES, "<think>\nhm\n</think>\n\n"),
    "qwen 3 that does not think": ("<|im_start|>assistant\n", HERMES, ""),
    "magistral": ("", "[TOOL_CALLS]", "[THINK]hm[/THINK]"),
    "mistral of 2024": ("", "[TOOL_CALLS]", ""),
    "lfm2": ("<|im_start|>assistant\n", "<|tool_call_start|>", ""),
    "gemma 4": ("<|turn>model\n", "<|turn><|tool_call>", "<|channel>thought\nhm<channel|>"),
    "gemma 4, no thinking": ("<|turn>model\n<|channel>thought\n<channel|>", "<|turn><|tool_call>", ""),
    "gpt-oss": ("<|start|>assistant", HARMONY, f"{ANALYSIS}{FINAL}"),
    "gpt-oss that does not think": ("<|start|>assistant", HARMONY, FINAL),
    "llama": ("<|start_header_id|>assistant\n\n", '<|start_header_id|>"parameters":', ""),
    "no form": ("assistant: ", "", ""),
}


def allowed(here, text: str, ends: bool = True) -> bool:
    """True if the last request's masks allow the tokens of a text, one after the other, and then the end."""
    (mask,) = here.generator.jobs[-1].processors
    words = here.served.template.tokenizer
    ids, free = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, len(words))
    for token in [*words(text, add_special_tokens=False).input_ids, *([words.eos_token_id] if ends else [])]:
        if mask(ids, free)[0, token] != 0:
            return False
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
    return True


def asked(here, answer: str, messages: list | None = None, **more: object) -> dict:
    """The message that a model's answer becomes in a chat with `FORMAT`."""
    here.says(answer)
    body = {"messages": messages or said("the sky"), "response_format": FORMAT} | more
    status, answered = ask(here, "/v1/chat/completions", body)
    assert status == 200, answered
    return answered["choices"][0]["message"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_grammar_begins_where_the_content_begins(here, family):
    begun, marks, before = FAMILIES[family]
    with scripted.templated(here, ROLES % (begun, marks)):
        for text, fits in ((f"{before}{BLUE}", True), (f"{before}It is", False), (f"{before}{{}}", False)):
            message = asked(here, text)
            assert allowed(here, text) is fits, text
        assert asked(here, f"{before}{BLUE}")["content"] == BLUE
        assert message.get("reasoning_content") in (None, "hm")
        asked(here, "")
        ending = "<channel|>" if marks.startswith("<|turn>") else "</think>"
        assert allowed(here, f"hm{ending}", ends=False) is before.startswith("hm")
        asked(here, "")
        assert allowed(here, ending, ends=False) is before.startswith("hm")
        if before.startswith("hm"):  # the content does not begin inside of reasoning
            assert allowed(here, f"{BLUE} and then", ends=False)


CALLS = {
    "qwen 3.5, nemotron 3": "<tool_call>\n<function=look>\n<parameter=of>\nsea\n</parameter>\n</function>\n</tool_call>",
    "minimax m2": '<minimax:tool_call>\n<invoke name="look">\n<parameter name="of">sea</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "qwen 3": '<tool_call>\n{"name": "look", "arguments": {"of": "sea"}}\n</tool_call>',
    "magistral": '[TOOL_CALLS]look[ARGS]{"of": "sea"}',
    "mistral of 2024": '[TOOL_CALLS] [{"name": "look", "arguments": {"of": "sea"}}]',
    "lfm2": "<|tool_call_start|>[look(of='sea')]<|tool_call_end|>",
    "gemma 4": '<|tool_call>call:look{of:<|"|>sea<|"|>}<tool_call|>',
    "gpt-oss": '<|channel|>commentary to=functions.look<|constrain|>json<|message|>{"of": "sea"}<|call|>',
    "llama": '{"name": "look", "parameters": {"of": "sea"}}',
}  # fmt: skip


@pytest.mark.parametrize("family", CALLS)
def test_a_model_with_a_schema_may_call_a_tool(here, family):
    """Instead of the content, and the answer ends with its calls; a call of no tool is none."""
    begun, marks, before = FAMILIES[family]
    thought, call = before.removesuffix(FINAL), CALLS[family]
    with scripted.templated(here, ROLES % (begun, marks)):
        message = asked(here, f"{thought}{call} and", tools=TOOLS)
        assert allowed(here, thought + call)
        (called,) = message["tool_calls"]
        assert called["function"] == {"name": "look", "arguments": '{"of": "sea"}'} and not message["content"]
        assert asked(here, f"{before}{BLUE}", tools=TOOLS)["content"] == BLUE and allowed(
            here, f"{before}{BLUE}"
        )
        asked(here, "", tools=TOOLS)
        assert not allowed(here, f"{thought}It is", ends=False)
        asked(here, "", tools=TOOLS)
        assert not allowed(here, thought + call.replace("look", "fly"), ends=False)
        if family in ("qwen 3", "gpt-oss", "llama"):
            asked(here, "", tools=TOOLS)
            assert not allowed(here, thought + call.replace('{"of": "sea"}', "6"), ends=False)
        asked(here, "", tools=TOOLS, tool_choice="none")
        assert not allowed(here, thought + call)


def test_the_start_of_an_answer_in_the_messages_is_part_of_its_content(here, of_openai):
    with scripted.templated(here, ROLES % (THINKS.removesuffix("<think>\n"), HERMES)):
        messages = [*said("the sky"), {"role": "assistant", "content": '{"sky": "b'}]
        for text, fits in (('lue"}', True), (BLUE, False)):
            assert asked(here, text, messages)["content"] == text
            assert allowed(here, text) is fits
        messages[-1]["content"] = "It is "
        with pytest.raises(openai.BadRequestError, match="must fit 'response_format', got 'It is '"):
            of_openai.chat.completions.create(model="m", messages=messages, response_format=FORMAT)
        asked(here, "", messages, tools=TOOLS, tool_choice="required")  # text may be before a call
        assert allowed(here, CALLS["qwen 3"])


def test_gemma_4_must_call(here):
    begun, marks, before = FAMILIES["gemma 4"]
    with scripted.templated(here, ROLES % (begun, marks)):
        asked(here, "", tools=TOOLS, tool_choice="required")
        assert allowed(here, before + CALLS["gemma 4"])
        asked(here, "", tools=TOOLS, tool_choice="required")
        assert not allowed(here, BLUE)


@pytest.mark.parametrize("text", ["    return 1", "\n\n- a\n", " "])
def test_blanks_before_a_text_belong_to_it(here, of_openai, text):
    """But for those before reasoning and calls; those at the end of an answer are cut."""
    for before in ("", "\n <think>hm</think>\n\n"):
        here.says(before + text)
        expected = text.strip() if before else text.rstrip()
        message = of_openai.chat.completions.create(model="m", messages=said("a")).choices[0].message
        assert message.content == expected, before
        here.says(before + text)
        stream = of_openai.chat.completions.create(model="m", messages=said("a"), stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in stream) == expected, before
