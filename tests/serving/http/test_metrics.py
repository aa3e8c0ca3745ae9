"""/health and /metrics."""

import json
import urllib.error
import urllib.request

from support.serving import said


def test_health_and_metrics(here, of_openai):
    """The counters say what was asked."""
    here.says("ok")
    of_openai.chat.completions.create(model="m", messages=said("a"))
    with urllib.request.urlopen(f"{here.url}/health") as answer:
        assert json.load(answer) == {"status": "ok", "load": "ready", "active": 0, "waiting": 0, "most": 1}
    generator = here.generator
    for active, waiting, load in ((1, 0, "busy"), (1, 2, "full"), (0, 0, "ready")):
        generator.counts.active, generator.counts.waiting = active, waiting
        with urllib.request.urlopen(f"{here.url}/health") as answer:
            assert json.load(answer)["load"] == load
    with urllib.request.urlopen(f"{here.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values["moe_mps_generated_tokens_total"]) >= 3
    assert float(values['moe_mps_requests_total{path="/v1/chat/completions",status="200"}']) >= 1
    names = "sequences_active", "sequences_most", "cached_tokens_total"
    assert {f"moe_mps_{name}" for name in names} <= values.keys()
    described = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    helps = [line.split(" ", 3)[3] for line in lines if line.startswith("# HELP")]
    assert not [text for text in helps if {"these", "them"} & {*text.split()}]  # each line stands alone
    assert described == {name.partition("{")[0] for name in values}
