"""Texts, tokens and templates by the paths of llama.cpp's server."""

import pytest
from support import scripted
from support.serving import said


@pytest.fixture
def ask(here):
    """The answer, or the message of an error."""

    def ask(path: str, body: dict):
        status, answer = scripted.ask(here, path, body)
        return answer if status == 200 else answer["error"]["message"]

    return ask


def test_tokens_of_a_text_and_back(here, ask):
    """Marks are one token each, or text with `parse_special` false; a piece has each token's text."""
    text, vocabulary = "<think>hé", here.served.template.tokenizer.get_vocab()
    tokens = ask("/tokenize", {"content": text})["tokens"]
    assert tokens == [vocabulary[part] for part in ("<think>", "h", "é")]
    spelt = ask("/tokenize", {"content": text, "parse_special": False})["tokens"]
    assert spelt == [vocabulary[character] for character in text]
    pieces = ask("/tokenize", {"content": text, "with_pieces": True})["tokens"]
    assert pieces == [{"id": token, "piece": piece} for token, piece in zip(tokens, ("<think>", "h", "é"))]  # noqa: B905
    assert ask("/detokenize", {"tokens": tokens}) == {"content": text}
    assert ask("/detokenize", {"tokens": []}) == {"content": ""}


def test_the_prompt_of_a_chat(here, ask):
    """The text that the model reads for the same chat."""
    body = {"messages": [{"role": "system", "content": "Be short."}, *said("hi")]}
    prompt = ask("/apply-template", body)["prompt"]
    assert prompt == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    here.says("ok")
    ask("/v1/chat/completions", body)
    assert here.generator.prompts == [prompt]


@pytest.mark.parametrize(
    "path, body, message",
    [
        ("/tokenize", {"content": 1}, "'content' must be a text, got 1."),
        ("/tokenize", {}, "'content' must be there, got none."),
        ("/detokenize", {"tokens": "a"}, "'tokens' must be a list of tokens, got 'a'."),
        ("/detokenize", {"tokens": [1] * 5000}, "'tokens' must have at most 4096 tokens, got 5000."),
        ("/detokenize", {"tokens": [0, -5]}, "'tokens' must be of tokens below {vocabulary}, got -5."),
        (
            "/detokenize",
            {"tokens": [10**30]},
            f"'tokens' must be of tokens below {{vocabulary}}, got {10**30}.",
        ),
        ("/apply-template", {"messages": [{"role": "no"}]}, "'messages[0].role' must be "),
    ],
)
def test_what_is_refused(here, ask, path, body, message):
    assert ask(path, body).startswith(message.format(vocabulary=len(here.served.template.tokenizer)))
