"""The lines of the server's log."""

import json
import logging
import re
import time
import urllib.error
import urllib.request

import pytest
from support.asked import post, prompt_ids
from support.serving import said


def test_lines_of_the_log(here, of_openai, caplog):
    here.says("hello", cached=4)
    with caplog.at_level(logging.INFO, "torch_moe_mps.serving.http.app"):
        raw = of_openai.chat.completions.with_raw_response.create(model="m", messages=said("a"))
        deadline = time.monotonic() + 10
        while len(caplog.records) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    begins, line = [record.getMessage() for record in caplog.records]
    prompt = f"prompt {len(prompt_ids(here, 0))} tokens"
    name = raw.headers["x-request-id"]
    assert begins == f"{name} /v1/chat/completions: begins, {prompt}"
    assert line.startswith(f"{name} /v1/chat/completions: waited 0.00 s, {prompt} (4 cached) in ")
    assert ", answer 6 tokens in " in line and "tokens/s), stop" in line


def test_what_would_be_stored_is_a_line(here, caplog):
    """However often a client asks; a request for nothing is none."""
    here.says("ok")
    here.served.say_once.__self__._said.clear()
    with caplog.at_level(logging.INFO, "torch_moe_mps.serving.http.served"):
        for asked in (
            {"store": True},
            {"store": True, "metadata": {"a": "b"}},
            {"store": False, "metadata": {}},
        ):
            assert post(here, "/v1/chat/completions", {"messages": said("a")} | asked)[0] == 200
    assert [record.getMessage() for record in caplog.records if record.name.endswith(".served")] == [
        f"/v1/chat/completions: {name!r} is ignored, as this server stores no answers"
        for name in ("store", "metadata")
    ]


@pytest.mark.parametrize("tokens", [0, 3])
def test_the_line_of_a_client_that_leaves(here, caplog, tokens):
    """While its prompt is read, or its answer comes: seconds until then, and the reason."""
    generator = here.says("hello")

    def submit(job):
        generator.jobs.append(job)
        time.sleep(0.3)
        job.on_progress(0, 1)
        for token in here.served.template.tokenizer("abcdef").input_ids[:tokens]:
            job.on_token(token)

    generator.submit = submit
    body = json.dumps({"messages": said("a"), "stream": True}).encode()
    request = urllib.request.Request(f"{here.url}/v1/chat/completions", body)
    with caplog.at_level(logging.INFO, "torch_moe_mps.serving.http.app"):
        with urllib.request.urlopen(request) as answer:
            answer.readline()
            time.sleep(0.3)
        deadline = time.monotonic() + 10
        while len(caplog.records) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    del generator.submit
    line = caplog.records[-1].getMessage()
    prompt, answered = map(float, re.findall(r" in (-?[0-9.]+) s", line))
    (waited,) = map(float, re.findall(r": waited ([0-9.]+) s, ", line))
    assert 0.3 <= waited < 0.5 and prompt < 0.6  # nothing is counted twice
    assert line.endswith(", the client left") and f", answer {tokens} tokens in " in line
    assert (prompt if tokens == 0 else answered) >= 0.25 and min(prompt, answered) >= 0


def test_the_memory_of_lines_is_bounded(here, caplog):
    """However many fields clients make up, and however long their names are."""
    here.says("ok")
    with caplog.at_level(logging.INFO, "torch_moe_mps.serving.http.served"):
        body = {"messages": said("a"), **{f"f{number}": 1 for number in range(3000)}, "x" * 5000: 1}
        assert post(here, "/v1/chat/completions", body)[0] == 200
    lines = [record.getMessage() for record in caplog.records if record.name.endswith(".served")]
    assert len(lines) == 3001 and max(map(len, lines)) == 200
    assert len(here.served.say_once.__self__._said) <= 1000
