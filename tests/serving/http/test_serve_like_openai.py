"""The server answers what OpenAI's client can send as OpenAI's server does."""

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import serving
from support.serving import expected_text, said

PROMPT = "hello"


@pytest.fixture(scope="module")
def client(checkpoint):
    arguments = [*serving.QUANTISED, "--allow-host", "mac.example"]
    with serving.client_of(checkpoint, *arguments) as client:
        yield client


def post(client, path: str, body: object, **headers: str) -> tuple[int, str]:
    """The status and the text of an answer to any program: OpenAI's client would not send some of it."""
    url = str(client.base_url).removesuffix("/v1/") + path
    content = (body if isinstance(body, str) else json.dumps(body)).encode()
    request = urllib.request.Request(url, content, {"content-type": "application/json"} | headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def get(client, path: str, **headers: str) -> tuple[int, str]:
    url = str(client.base_url).removesuffix("/v1/") + path
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


CHAT, RAW, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
WRONG = [
    *((CHAT, {"messages": value}, "messages") for value in ("hi", None, [], {}, 5)),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": said("a"), "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    (RESPONSES, {"input": "a", "tools": [{"type": "namespace", "name": 5, "tools": []}]}, "tools"),
    (
        RESPONSES,
        {"input": [{"type": "function_call", "call_id": "1", "name": "a", "namespace": 5}]},
        "input[0].namespace",
    ),
    (CHAT, {"messages": [1]}, "messages[0]"),
    (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
    *(
        (CHAT, {"messages": said("a"), field: value}, field)
        for field, values in {
            "temperature": (-1, 2.5, "warm", True),
            "top_p": (2, 0, -1, "a"),
            "max_tokens": (0, -3, 1.5, "many"),
            "max_completion_tokens": (0, "many"),
            "frequency_penalty": (-3, 3, "a"),
            "presence_penalty": (-3, True),
            "top_k": (-2, 1.5),
            "min_p": (2, "a"),
            "repetition_penalty": (0, -1),
            "n": (0, 1000, "a"),
            "stop": (5, [5], [""], ["a"] * 17),
            "seed": ("a", 1.5, 1 << 70),
            "stream": ("yes", 1),
            "logit_bias": ([1], {"a": 1}, {"1": 1000}, {"1": "a"}, {"27": 1}),
            "tools": (5, [5], [{"type": "function"}]),
            "chat_template_kwargs": (5,),
            "model": (5,),
            "logprobs": (1, "yes"),
            "top_logprobs": (21, True, 1),
        }.items()
        for value in values
    ),
    (RAW, {}, "prompt"),
    (RAW, {"prompt": 5}, "prompt"),
    *((RAW, {"prompt": "a", "logprobs": value}, "logprobs") for value in (True, 6, -1, "a")),
    (RESPONSES, {}, "input"),
    (RESPONSES, {"input": 5}, "input"),
    (RESPONSES, {"input": [5]}, "input"),
    (RESPONSES, {"input": [{"type": 5}]}, "input[0].type"),
    (RESPONSES, {"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    (RESPONSES, {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"input": "a", "instructions": 5}, "instructions"),
    (RESPONSES, {"input": "a", "top_logprobs": 2}, "top_logprobs"),
    (
        RESPONSES,
        {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 21},
        "top_logprobs",
    ),
]


def test_malformed_requests_are_400_in_openais_form(client):
    """With the field that is wrong; the server answers the next one."""
    for path, body, field in WRONG:
        status, text = post(client, path, body)
        assert status == 400, (path, body, text)
        error = json.loads(text)["error"]
        assert error["type"] == "invalid_request_error" and error["message"], (path, body)
        assert error["param"] == field, (path, body, error)
    assert client.chat.completions.create(model="m", messages=said("a"), max_tokens=1).choices


@pytest.mark.parametrize("way", ["chat", "completion"])
def test_a_stop_is_not_part_of_the_text(way, client, checkpoint):
    """Of a tokenizer of words, whose text has blanks; streamed and not, alone and in a list."""
    whole = expected_text(checkpoint, PROMPT, 20)
    inside = whole[7:12]
    assert whole.find(inside) > 0 and " " in inside

    def ask(**more) -> tuple[str, str]:
        asked = {"model": "any", "temperature": 0, "max_tokens": 20, **more}
        if way == "chat":
            answer = client.chat.completions.create(messages=said(PROMPT), **asked)
        else:
            answer = client.completions.create(prompt=PROMPT, **asked)
        chunks = [answer] if not more.get("stream") else answer
        text, reason = "", None
        for chunk in chunks:
            choice = chunk.choices[0]
            part = choice.text if way == "completion" else (getattr(choice, "delta", None) or choice.message)
            text += (part if isinstance(part, str) else part.content) or ""
            reason = choice.finish_reason or reason
        return text, reason

    for stream in (False, True):
        for stop in (inside, [inside], ["zzz", inside], [whole[9:14], inside, "0"]):
            listed = [stop] if isinstance(stop, str) else stop
            expected = whole[: min(whole.find(one) for one in listed if one in whole)]
            assert ask(stop=stop, stream=stream) == (expected, "stop"), (stop, stream)
        assert ask(stop=["zzz"], stream=stream) == (whole, "length")
        # The end of the answer may be the beginning of a stop.
        assert ask(stop=[whole[-3:] + "zzz"], stream=stream) == (whole, "length")


def test_a_response_is_json_unless_it_is_streamed(client, checkpoint):
    """`instructions` are a message in front."""
    text = expected_text(checkpoint, PROMPT, 6)
    asked = {"model": "any", "input": "llo", "instructions": "he", "temperature": 0, "max_output_tokens": 6}
    answer = client.responses.create(**asked)
    assert answer.output_text == text and answer.usage.output_tokens == 6
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    events = [*client.responses.create(**asked, stream=True)]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text


def test_temperature_samples_and_a_seed_repeats(client, checkpoint):
    """transformers' server ignores a temperature of a model that is greedy by default."""
    asked = {"model": "any", "messages": said(PROMPT), "max_tokens": 20}

    def ask(**more) -> str:
        return client.chat.completions.create(**asked, **more).choices[0].message.content

    drawn = [ask(temperature=2, seed=seed) for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1] and expected_text(checkpoint, PROMPT, 20) not in drawn
    assert ask(top_p=0.9, seed=3) == ask(top_p=0.9, seed=3)


def test_a_client_that_leaves_ends_its_row(checkpoint):
    """Where several are answered together: the rest of its answer is not generated."""
    asked = {"model": "any", "messages": said("a"), "temperature": 0, "max_tokens": 10**18}
    with serving.client_of(checkpoint, "--parallel", 2) as client:
        stream = client.chat.completions.create(**asked, stream=True)
        next(iter(stream))
        stream.close()
        root, end = f"http://{client.base_url.host}:{client.base_url.port}", time.monotonic() + 60
        while json.load(urllib.request.urlopen(f"{root}/health"))["active"]:
            assert time.monotonic() < end
            time.sleep(0.05)
        with urllib.request.urlopen(f"{root}/metrics") as answer:
            lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines())
        assert float(lines["moe_mps_generated_tokens_total"]) < 255
        assert client.chat.completions.create(**asked | {"max_tokens": 2}).usage.completion_tokens == 2


def test_a_key_lets_in(checkpoint):
    """As a bearer or as x-api-key, of every path but what says that the server lives."""
    with serving.client_of(checkpoint, "--api-key", "secret", key="secret") as client:
        asked = {"messages": said("a"), "max_tokens": 1}
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret"},
            {"x-api-key": "s"},
        ):
            status, text = post(client, CHAT, asked, **headers)
            assert status == 401 and json.loads(text)["error"]["code"] == "invalid_api_key"
        status, text = post(client, "/v1/messages", asked)
        assert status == 401 and json.loads(text)["error"]["type"] == "authentication_error"
        assert post(client, CHAT, asked, **{"x-api-key": "secret"})[0] == 200
        assert [model.id for model in client.models.list()] == [checkpoint.name]
        for path, status in (("/health", 200), ("/metrics", 401), ("/v1/models", 401)):
            assert get(client, path)[0] == status, path


@pytest.mark.parametrize("key", ["schlüssel", "a\nb"])
def test_a_key_that_no_header_carries_is_refused_at_the_start(key, checkpoint, refused, monkeypatch):
    """By its option and by its variable, before the model is loaded."""
    line = f"must have only printable ASCII characters, got {key!a}"
    assert refused("serve", checkpoint, "--api-key", key) == f"--api-key {line}"
    monkeypatch.setenv("MOE_MPS_API_KEY", key)
    assert refused("serve", checkpoint) == f"MOE_MPS_API_KEY {line}"


def test_the_host_header_names_this_machine(client):
    """A page of the web whose name means this machine is refused."""
    port = client.base_url.port
    asked = {"messages": said("a"), "max_tokens": 1}
    for host in ("localhost", "127.0.0.1", "[::1]", "192.168.0.7", "MAC.example", f"localhost:{port}"):
        assert post(client, CHAT, asked, host=host)[0] == 200, host
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "127.0.0.1.evil.example"):
        status, text = post(client, CHAT, asked, host=host)
        assert status == 403 and json.loads(text)["error"]["code"] == "host_not_allowed", host


def test_one_thread_uses_the_device(checkpoint, simulated):
    """Requests side by side, streamed and not, and the end of one that is left."""
    asked = {"model": "any", "temperature": 0, "max_tokens": 3}
    with serving.client_of(checkpoint, "--device", "mps") as client, simulated.one_thread():
        create = client.chat.completions.create

        def ask(text: str, stream: bool) -> str:
            answer = create(messages=said(text), stream=stream, **asked)
            if not stream:
                return answer.choices[0].message.content
            return "".join(chunk.choices[0].delta.content or "" for chunk in answer)

        with ThreadPoolExecutor(4) as threads:
            answers = [*threads.map(ask, ["abc", "abc", "hello", "hello"], [False, True, True, False])]
        assert answers[0] == answers[1] != "" and answers[2] == answers[3] != ""
