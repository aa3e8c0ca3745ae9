"""/v1/chat/completions: settings, several answers, calls that end a turn, reasoning."""

import openai
import pytest
from support import scripted
from support.asked import CALL, SKY, prompt_ids
from support.serving import said


def test_several_answers(here, of_openai):
    """`n` of a chat, streamed and not; with a seed each has one of its own."""
    here.says("one", "two", "one", "two", cached=2)
    asked = {"model": "m", "messages": said("a"), "n": 2, "seed": 5}
    answer = of_openai.chat.completions.create(**asked)
    assert [choice.message.content for choice in answer.choices] == ["one", "two"]
    assert [job.seed for job in here.generator.jobs] == [5, 6]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt_ids(here, 0)), 8)
    assert usage.prompt_tokens_details.cached_tokens == 2
    chunks = [
        *of_openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    ]
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["one", "two"] and chunks[-1].usage == usage and not chunks[-1].choices
    assert chunks[0].choices[0].delta.role == "assistant"


def test_settings_that_other_servers_take(here, of_openai):
    here.says("a")
    more = {"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5}
    of_openai.chat.completions.create(model="m", messages=said("a"), top_p=0.5, extra_body=more)
    config = here.generator.jobs[0].config
    got = (config.do_sample, config.top_k, config.top_p, config.min_p, config.repetition_penalty)
    assert got == (True, 7, 0.5, 0.1, 1.5)
    of_openai.chat.completions.create(
        model="m", messages=said("a"), extra_body={"top_k": -1, "temperature": 0}
    )
    assert here.generator.jobs[1].config.do_sample is False


@pytest.mark.parametrize(("choice", "is_forced"), [
    ("required", True), ({"type": "function", "function": {"name": "look"}}, True), ("auto", False)
])  # fmt: skip
def test_a_forced_call_ends_the_turn(here, of_openai, choice, is_forced):
    """What the model says behind it is not generated; calls in a row are, and prose behind a free call."""
    prose = "It is blue, and so on."
    here.says(f"{CALL}\n{CALL}\n{prose}")
    tools = [{"type": "function", "function": {"name": "look", "parameters": SKY}}]
    asked = {"model": "m", "messages": said("a"), "tools": tools, "tool_choice": choice}
    answer = of_openai.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 2
    assert choice.message.content == (None if is_forced else prose)
    whole = len(here.served.template.tokenizer(f"{CALL}\n{CALL}\n{prose}").input_ids)
    assert answer.usage.completion_tokens == (whole - len(prose) + 1 if is_forced else whole + 1)
    here.says(f"{CALL}\n{CALL}\n{prose}")
    stream = of_openai.chat.completions.create(**asked, stream=True)
    texts = [part.choices[0].delta.content or "" for part in stream]
    assert "".join(texts) == ("" if is_forced else prose)


def test_the_beginning_of_an_answer(here, of_openai):
    """A last message of the assistant is gone on with; two of them are refused."""
    here.says(" lo ")
    begun = [*said("a"), {"role": "assistant", "content": "hel"}]
    assert of_openai.chat.completions.create(model="m", messages=begun).choices[0].message.content == " lo"
    assert here.generator.prompts[0].endswith("<|im_start|>assistant\nhel")
    with pytest.raises(openai.BadRequestError, match="at most one message of the assistant at the end"):
        of_openai.chat.completions.create(model="m", messages=[*begun, begun[1]])


def test_effort_switches_thinking_off(here, of_openai):
    here.says("a")
    of_openai.chat.completions.create(model="m", messages=said("a"), reasoning_effort="none")
    assert here.generator.prompts[0].endswith("<think></think>")
    with pytest.raises(openai.BadRequestError, match="'reasoning_effort' must be one of"):
        of_openai.chat.completions.create(model="m", messages=said("a"), reasoning_effort="much")


def test_without_tools_channels_are_read(here, of_openai):
    """In Harmony's form also the text of an answer is in a channel; what would be a call is text."""
    with scripted.templated(here, scripted.TEMPLATE + "{# <|channel|>analysis <|channel|>commentary #}"):
        here.says(
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.look json<|message|>{"of": "sky"}<|call|><|start|>assistant'
            "<|channel|>final<|message|>Hi<|return|>"
        )
        message = of_openai.chat.completions.create(model="m", messages=said("a")).choices[0].message
        assert message.tool_calls is None and message.reasoning_content == "hm"
        assert message.content == '{"of": "sky"}Hi'
