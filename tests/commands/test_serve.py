"""The commands serve and chat: transformers' own, with a model that this package quantised."""

import argparse
import json
import urllib.request

import pytest
import torch
import transformers
from support import tiny_models
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.cli.chat import RichInterface

import torch_moe_mps
from torch_moe_mps.commands import main
from torch_moe_mps.commands.arguments import parser
from torch_moe_mps.commands.chat import _free_port
from torch_moe_mps.commands.serving import server
from torch_moe_mps.commands.sources import load
from torch_moe_mps.transformers.quantized_states import QuantizedStates

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def checkpoint(tmp_path):
    """With a tokenizer of letters, and a chat template without roles.

    A Mixtral: transformers' server does not look for parts of an answer, such as thinking, in its text.
    """
    with tiny_models.groups_of_32():
        tiny_models.tiny_model("mixtral", head_dim=32).save_pretrained(tmp_path / "model")
    letters = {chr(97 + i): i for i in range(26)} | {"?": 26}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="?", chat_template=TEMPLATE
    )
    fast.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def options(command: str, *arguments) -> argparse.Namespace:
    return parser().parse_args([command, *map(str, arguments)])


def expected_text(checkpoint, prompt: str, tokens: int) -> str:
    model = torch_moe_mps.from_pretrained(checkpoint, bits=4, group_size=32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        output = model.generate(ids, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :])


def test_serve_answers_with_the_quantised_model(checkpoint):
    port = _free_port()
    given = options("serve", checkpoint, "--bits", 4, "--group-size", 32, "--device", "cpu")
    with server(given, port=port, non_blocking=True, log_level="error") as serve:
        try:
            while not serve.server.started:
                assert serve._thread.is_alive()
            body = {"model": str(checkpoint), "messages": [{"role": "user", "content": "hello"}]}
            body |= {"max_tokens": 6, "temperature": 0}
            url = f"http://localhost:{port}/v1/chat/completions"
            request = urllib.request.Request(
                url, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            answer = json.loads(urllib.request.urlopen(request, timeout=120).read())
        finally:
            serve.kill_server()
    assert answer["choices"][0]["message"]["content"] == expected_text(checkpoint, "hello", 6)


def test_chat(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # restored, if the chat changes it
    said = iter(["hello", "!exit"])
    monkeypatch.setattr(RichInterface, "input", lambda self: next(said))
    monkeypatch.setattr(RichInterface, "confirm", lambda self, *arguments, **kwargs: False)
    flags = ["--set", "max_new_tokens=6", "--set", "do_sample=False"]
    assert (
        main(["chat", str(checkpoint), *flags, "--bits", "4", "--group-size", "32", "--device", "cpu"]) == 0
    )
    text = expected_text(checkpoint, "hello", 6)
    assert text in capsys.readouterr().out


@pytest.mark.parametrize("bits", [8, 16])
def test_the_bits_of_keys_and_values(checkpoint, bits):
    model = load(options("chat", checkpoint, "--kv-bits", bits), str(checkpoint), "cpu")
    ids = torch.ones(1, 5, dtype=torch.long)
    cache = model.generate(ids, max_new_tokens=2, return_dict_in_generate=True).past_key_values
    assert [isinstance(layer.keys, QuantizedStates) for layer in cache.layers] == [bits == 8] * 2


def test_a_server_that_cannot_start_is_one_line(checkpoint, tmp_path, capsys, monkeypatch):
    assert main(["serve", str(tmp_path / "nothing")]) == 1
    assert "is neither a folder nor the name of a model on the Hub" in capsys.readouterr().err
    assert main(["serve", str(checkpoint), "--continuous-batching", "--kv-bits", "8"]) == 1
    assert capsys.readouterr().err == (
        "torch-moe-mps: error: --kv-bits must be 16 with --continuous-batching, whose cache of pages is "
        "transformers' own, got 8\n"
    )
    monkeypatch.setattr("transformers.cli.serve.is_serve_available", lambda: False)
    assert main(["serve", str(checkpoint), "--device", "cpu"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("pip install transformers[serving]`")
