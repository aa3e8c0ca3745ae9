"""OpenAI's chat completions: `/v1/chat/completions`."""

import time
from typing import Any

from ...engine.ranges import integer
from .. import limits
from ..answer import Answer, Arguments, CallEnd, Item, Piece, ToolCall, new_id
from ..answers import Answers
from ..request import (
    HINTS,
    OBJECT,
    SHARED,
    YES_OR_NO,
    Chat,
    Fields,
    Refused,
    Request,
    Tool,
    common,
    wrong,
)
from ..served import Served
from ..structured import schema_of
from . import conversation
from .protocol import AnswerWriter, Protocol, event, input_of, openai_error

MOST_LOGPROBS = 20


_FIELDS = Fields(
    SHARED
    | {
        "chat_template_kwargs": OBJECT,
        "logprobs": YES_OR_NO,
        "max_completion_tokens": integer(1),
        "max_tokens": integer(1),
        "n": integer(1, limits.ANSWERS),
        "stream_options": OBJECT,
        "top_logprobs": integer(0, MOST_LOGPROBS),
    },
    needed="messages",
    others=HINTS | {"reasoning_effort", "response_format", "tool_choice", "tools", "web_search_options"},
    nothing={
        "audio": [],
        "function_call": ["auto", "none"],
        "functions": [[]],
        "generation_config": [],
        "grammar": [],
        "json_schema": [],
        "modalities": [["text"]],
        "truncation": ["disabled"],
    },
)


class ChatCompletions(Protocol):
    path = "/v1/chat/completions"

    def read(self, body: dict[str, Any], served: Served) -> Request:
        """Request of a body for /v1/chat/completions. Raises: Refused for fields that it has wrong."""
        _FIELDS.check(body, self.path, served.say_once)
        if body.get("web_search_options") is not None:
            served.say_once("web_search_options are left out: this server searches nothing")
        messages = conversation.messages(body["messages"], "messages", served.say_once)
        declared_tools = conversation.tools(body.get("tools"), "tools", served.say_once)
        tools, forced = conversation.chosen(body.get("tool_choice"), declared_tools)
        schema = schema_of(body.get("response_format"), "response_format")
        variables = conversation.effort(body.get("reasoning_effort"))
        variables |= body.get("chat_template_kwargs") or {}
        goes_on = conversation.goes_on(messages, "messages")
        return Request(
            prompts=[Chat(messages, tools, variables, goes_on)],
            prompt_field="messages",
            max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
            form=None if forced else schema,  # OpenAI's clients ask for both
            forced=forced,
            form_field="tool_choice" if forced else "response_format",
            is_parallel=body.get("parallel_tool_calls") is not False,
            logprobs=logprobs_of(body, bool(body.get("logprobs")), "'logprobs' true"),
            count=body.get("n") or 1,
            **common(body),
        )

    def whole(self, request: Request, answers: Answers, served: Served) -> dict[str, Any]:
        choices = [
            {
                "index": number,
                "message": _message(answer, request.tools),
                "logprobs": _logprobs(answer.entries),
                "finish_reason": finish_reason(answer),
            }
            for number, answer in enumerate(answers.answers)
        ]
        whole = {"choices": choices, "usage": usage(answers), **served.warning(request)}
        return envelope("chatcmpl-", "chat.completion", served) | whole

    def writer(self, request: Request, answers: Answers, served: Served) -> AnswerWriter:
        return _ChatChunks(request, answers, served)


class Chunks(AnswerWriter):
    """Writer of streamed chunks, with usage in the last one if requested."""

    prefix: str
    kind: str

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self.envelope = envelope(self.prefix, self.kind, self.served)
        self._options = self.request.later.get("stream_options") or {}

    def choice(self, choice: dict[str, Any]) -> str:
        """One entry of `choices`."""
        return event(self.envelope | {"choices": [choice]})

    def end(self) -> str:
        last = ""
        if self._options.get("include_usage"):
            last = event(self.envelope | {"choices": [], "usage": usage(self.answers)})
        return f"{last}data: [DONE]\n\n"

    def failed(self, refused: Refused) -> str:
        return event(openai_error(refused))


class _ChatChunks(Chunks):
    prefix, kind = "chatcmpl-", "chat.completion.chunk"

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self._calls = [-1] * len(self.answers.answers)  # index of the last call of each answer

    def opening(self) -> str:
        first, plain = {"role": "assistant", "content": ""}, self.envelope
        self.envelope = plain | self.served.warning(self.request)
        begun = "".join(self._chunk(number, first) for number in range(len(self.answers.answers)))
        self.envelope = plain
        return begun

    def item(self, number: int, item: Item) -> str:
        """Event for a part of an answer; an empty text for a part that this protocol does not send."""
        if isinstance(item, Piece):
            name = "content" if item.kind == "text" else "reasoning_content"
            return self._chunk(number, {name: item.text}, logprobs=_logprobs(item.entries or None))
        call, tools = item if isinstance(item, ToolCall) else item.call, self.request.tools
        is_custom = _is_custom(call, tools)
        self._calls[number] += isinstance(item, ToolCall)
        if isinstance(item, CallEnd if is_custom else ToolCall):
            shown = _call(call, tools, call.arguments if is_custom else "")
        elif isinstance(item, Arguments) and not is_custom:
            shown = {"function": {"arguments": item.text}}
        else:
            return ""
        return self._chunk(number, {"tool_calls": [{"index": self._calls[number]} | shown]})

    def ended(self, number: int) -> str:
        answer = self.answers.answers[number]
        return "" if answer.is_cut else self._chunk(number, {}, finish_reason(answer))

    def _chunk(
        self, number: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None
    ) -> str:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self.choice(choice)


def logprobs_of(body: dict[str, Any], asked: bool, needed: str) -> int | None:
    """Number of top log probabilities per token. Raises: Refused for `top_logprobs` without `logprobs`."""
    count = body.get("top_logprobs")
    if count and not asked:
        raise wrong("top_logprobs", f"with {needed}", count)
    return count or 0 if asked else None


def finish_reason(answer: Answer) -> str:
    if answer.reason == "length":
        return "length"
    return "tool_calls" if any(call.is_whole for call in answer.calls) else "stop"


def usage(answers: Answers) -> dict[str, Any]:
    return {
        "prompt_tokens": answers.prompt_tokens,
        "completion_tokens": answers.tokens,
        "total_tokens": answers.prompt_tokens + answers.tokens,
        "prompt_tokens_details": {
            "cached_tokens": answers.cached_tokens,
            "disk_tokens": answers.disk_tokens,
        },
        "completion_tokens_details": {"reasoning_tokens": answers.reasoning_tokens} | answers.drafts_form,
    }


def envelope(prefix: str, kind: str, served: Served) -> dict[str, Any]:
    """Fields common to an answer and its chunks."""
    return {"id": new_id(prefix), "object": kind, "created": int(time.time()), "model": served.name}


def _message(answer: Answer, tools: dict[str, Tool]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [_call(call, tools, call.arguments) for call in answer.calls]
    return message


def _is_custom(call: ToolCall, tools: dict[str, Tool]) -> bool:
    return call.name in tools and tools[call.name].kind == "custom"


def _call(call: ToolCall, tools: dict[str, Tool], arguments: str) -> dict[str, Any]:
    if _is_custom(call, tools):
        custom_call = {"name": tools[call.name].own_name, "input": input_of(call)}
        return {"id": call.id, "type": "custom", "custom": custom_call}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _logprobs(entries: list[Any] | None) -> dict[str, Any] | None:
    if entries is None:
        return None
    return {"content": [entry.chat_form() for entry in entries], "refusal": None}
