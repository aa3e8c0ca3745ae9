"""One question gets one answer: the defaults of chat, generate, serve and generate_batch are one rule."""

import json
import shutil

import pytest
import torch
import transformers
from support.serving import client_of, said
from support.sweep import in_sweep
from tokenizers import processors

import torch_moe_mps
from torch_moe_mps.commands import main
from torch_moe_mps.serving.engine.defaults import choice

QUESTION = "Why is the sky blue?"
CONTEXT = 96


def expected(folder, prompt: str) -> str:
    """The likeliest tokens by the model's own code, to the end of the answer or of the context."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    said = json.loads((folder / "generation_config.json").read_text())
    lengths = {name: said[name] for name in ("max_new_tokens", "max_length") if name in said}
    lengths = lengths or {"max_length": CONTEXT}
    config = transformers.GenerationConfig(**lengths, eos_token_id=95, pad_token_id=95)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def changed(folder, target, **settings):
    """A copy with a short context, and other settings of its answers."""
    shutil.copytree(folder, target)
    for name, more in (
        ("config.json", {"max_position_embeddings": CONTEXT}),
        ("generation_config.json", settings),
    ):
        file = target / name
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
    return target


def begins_with_a_token(folder) -> None:
    """Lets the tokenizer put a token in front of each text, and takes the chat template away."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token, tokenizer.chat_template = "~", None
    number = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="~ $A", special_tokens=[("~", number)]
    )
    for file in folder.glob("chat_template*"):
        file.unlink()
    tokenizer.save_pretrained(folder)


QUESTIONS = ("says nothing", "neutral values", "says a length", "counts the prompt", "without a template")


@pytest.mark.slow("a model answers in four ways")
@pytest.mark.parametrize("case", in_sweep(QUESTIONS, ("says nothing", "without a template")))
def test_one_question_has_one_answer(case, printable, tmp_path, capsys, monkeypatch):
    settings = {
        "says nothing": {},
        "neutral values": {"min_p": 0.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 20},
        "counts the prompt": {"max_length": 40},
    }.get(case, {"max_new_tokens": 9})
    folder = changed(printable, tmp_path / "model", **settings)
    if case == "without a template":
        begins_with_a_token(folder)
    text = expected(folder, QUESTION)
    assert len(text) > 5
    on = [str(folder), "--device", "cpu"]
    capsys.readouterr()
    assert main(["generate", *on, "-p", QUESTION]) == 0
    assert capsys.readouterr().out == f"{text}\n"
    lines = iter([QUESTION])

    def typed(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    assert main(["chat", *on]) == 0
    assert f">:\n{text}\n" in capsys.readouterr().out
    with client_of(folder) as client:
        answer = client.chat.completions.create(model=str(folder), messages=said(QUESTION))
    assert answer.choices[0].message.content == text
    if settings:  # else it is of 20 tokens, as by generate()
        model = torch_moe_mps.from_pretrained(str(folder))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        (tokens,) = torch_moe_mps.generate_batch(model, [QUESTION], tokenizer=tokenizer, progress=False)
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        ({}, {}),
        ({"min_p": 0.0}, {"min_p": 0.0}),
        ({"top_k": 0, "top_p": 1.0}, {"top_k": 0, "top_p": 1.0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 20, "min_p": 0}, {"top_k": 20, "min_p": 0, "do_sample": True}),
        ({"temperature": 1.0}, {"temperature": 1.0, "do_sample": True}),
        ({"temperature": 0.6, "do_sample": False}, {"temperature": 0.6, "do_sample": False}),
        (
            {"temperature": 0, "top_p": 0.9, "repetition_penalty": 1.1},
            {"repetition_penalty": 1.1, "do_sample": False},
        ),
        ({"repetition_penalty": 1.1, "max_new_tokens": 3}, {"repetition_penalty": 1.1, "max_new_tokens": 3}),
        ({"temperature": None}, {"temperature": None}),
    ],
    ids=str,
)
def test_what_asks_for_a_draw(asked, settings):
    assert choice(asked) == settings


def test_an_answer_ends_by_the_end_of_the_tokenizer_too(printable, tmp_path, capsys):
    """A model that learnt chats often has the end of its base model in its generation_config."""
    folder = changed(printable, tmp_path / "model", max_new_tokens=20)
    text = expected(folder, QUESTION)
    end = next(letter for letter in text[3:] if letter.isalnum())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = end
    tokenizer.save_pretrained(folder)
    on = ["generate", str(folder), "--device", "cpu", "-p", QUESTION]
    for more, shown in (([], text.partition(end)[0]), (["--set", "eos_token_id=95"], text)):
        capsys.readouterr()
        assert main([*on, *more]) == 0
        assert capsys.readouterr().out == f"{shown.replace(end, '')}\n"
    with client_of(folder) as client:
        answer = client.chat.completions.create(model=str(folder), messages=said(QUESTION))
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == text.partition(end)[0]


def test_a_length_that_is_said_twice_is_refused(printable, refused):
    for more, message in (
        (
            ["--max-tokens", 3, "--set", "max_new_tokens=4"],
            "--max-tokens and --set max_new_tokens are one setting",
        ),
        (["--set", "max_length=30"], "--set max_length must be left out: max_new_tokens says how long"),
    ):
        assert message in refused("generate", printable, "-p", "a", *more)
