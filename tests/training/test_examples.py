"""Examples of a file: the tokens of a chat template, and the loss where transformers says answers are."""

import json

import pytest
from support.checkpoints import tokenizer_of
from tokenizers import processors

from torch_moe_mps.training.examples import read_examples

LETTERS = "abcdefghijklmnopqrstuvwxyz.<>?"
# Marks answers for transformers; our reading does not know the marks.
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<a>{% generation %}{{ m['content'] + '.' }}"
    "{% endgeneration %}{% else %}<u>{{ m['content'] + '.' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "so long"},
]


def tokenizer(template: str | None = TEMPLATE):
    made = tokenizer_of(LETTERS, unk_token="?", pad_token="?", eos_token=".")
    made.chat_template = template
    return made


def read(tmp_path, *lines, tokens=tokenizer, longest=100):
    file = tmp_path / "data.jsonl"
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    file.write_bytes(b"\n".join(texts))
    return read_examples(str(file), tokens(), longest)


def test_answers_of_a_conversation(tmp_path):
    (example,) = read(tmp_path, {"messages": CHAT})
    right = tokenizer().apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    assert example.ids == right["input_ids"] and example.kind == "answers"
    masked = [
        token if mask else -100
        for token, mask in zip(right["input_ids"], right["assistant_masks"], strict=True)
    ]
    assert example.labels == masked and example.learnt == sum(right["assistant_masks"])


def test_a_conversation_that_the_assistant_begins(tmp_path):
    """No text asks for its first message, which has no loss."""
    (example,) = read(tmp_path, {"messages": CHAT[1:]})
    learnt = tokenizer().decode([label for label in example.labels if label >= 0])
    assert learnt.replace(" ", "") == "so?long."


def test_a_template_that_changes_earlier_answers(tmp_path):
    """The loss is on the last answer alone."""
    template = TEMPLATE.replace(
        "m['content'] + '.' }}{% endg", "(m['content'] if loop.last else 'x') + '.' }}{% endg"
    )
    (example,) = read(tmp_path, {"messages": CHAT}, tokens=lambda: tokenizer(template))
    learnt = tokenizer().decode([label for label in example.labels if label >= 0])
    assert learnt.replace(" ", "") == "so?long."


def test_a_template_that_does_not_show_answers(tmp_path):
    template = (
        "{{ messages | map(attribute='content') | join('.') }}{% if add_generation_prompt %}<a>{% endif %}"
    )
    (example,) = read(tmp_path, {"messages": CHAT}, tokens=lambda: tokenizer(template))
    assert example.kind == "conversation" and example.labels == example.ids


def test_completions_and_texts(tmp_path):
    pair, text, plain = read(
        tmp_path, {"prompt": "ab", "completion": "cde"}, b"", {"text": "abc"}, {"text": "a.", "other": 1}
    )
    ids = tokenizer().convert_tokens_to_ids
    assert pair.ids == ids([*"abcde."]) and pair.labels == [-100, -100, *ids([*"cde."])]
    assert (text.ids, text.labels, text.line) == (ids([*"abc."]), ids([*"abc."]), 3)
    assert plain.ids == ids([*"a."])  # ends already


def test_tokens_of_no_text_have_no_loss_but_the_end(tmp_path):
    """Those that a tokenizer puts around each text, whose places are empty."""

    def around():
        made = tokenizer_of(LETTERS, unk_token="?", pad_token="?", bos_token="<", eos_token=".")
        marks = [(mark, made.convert_tokens_to_ids(mark)) for mark in "<>."]
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="< > $A > .", special_tokens=marks
        )
        return made

    pair, text = read(tmp_path, {"prompt": "", "completion": "cde"}, {"text": "ab"}, tokens=around)
    ids = tokenizer().convert_tokens_to_ids
    assert pair.ids == ids([*"<>cde>."]) and pair.labels == [-100, -100, *ids([*"cde"]), -100, *ids(["."])]
    assert text.ids == ids([*"<>ab>."]) and text.labels == [-100, -100, *ids([*"ab"]), -100, *ids(["."])]


def test_cut(tmp_path):
    (example,) = read(tmp_path, {"text": "abcdefgh"}, longest=4)
    assert len(example.ids) == len(example.labels) == 4 and example.is_cut


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not valid JSON: Expecting property name"),
        (b"[1]", "must be a JSON object, got a list"),
        (b'{"text": "\xff"}', "must be in UTF-8, got invalid start byte"),
        (b"[" * 100_000, "not valid JSON: maximum recursion depth exceeded"),
        (b'{"text": ' + b"1" * 5000 + b"}", "not valid JSON: Exceeds the limit (4300 digits)"),
        (b'{"text": "\\ud800abc"}', "must have characters of Unicode, got half of a surrogate pair"),
        ({"question": "?"}, 'must have "messages", "prompt" and "completion", or "text", got \'question\''),
        ({}, 'must have "messages", "prompt" and "completion", or "text", got nothing'),
        ({"prompt": "a"}, "must have"),
        ({"prompt": "a", "completion": "b", "text": "c"}, "must have"),
        ({"prompt": "a", "completion": ""}, '"completion" must have characters, got none'),
        ({"text": 3}, '"text" must be a string, got a int'),
        ({"messages": []}, '"messages" must be a list of messages, got []'),
        ({"messages": "hi"}, '"messages" must be a list of messages'),
        ({"messages": [{"content": "a"}]}, 'a message must have "role" and "content"'),
        ({"messages": [{"role": "user", "content": 1}]}, 'the "content" of a message must be a string'),
        ({"messages": CHAT[:1]}, "the last message must be of the assistant, got one of user"),
        ({"text": "."}, "must have a token behind the first that the loss is on, got none"),
        ({"prompt": "a" * 100, "completion": "b"}, "that the loss is on, got none in the first 100"),
    ],
)
def test_refused(tmp_path, line, message):
    with pytest.raises(ValueError) as error:
        read(tmp_path, {"text": "ok"}, line)
    assert str(error.value).startswith(f"{tmp_path}/data.jsonl:2: ") and message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mark_of_the_order_of_bytes_is_left_out(tmp_path):
    """Windows' editors begin UTF-8 with it."""
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "abc"}\r\n{"text": "abd"}\r\n')
    assert [each.line for each in read_examples(str(file), tokenizer_of(LETTERS, unk_token="?"), 9)] == [1, 2]


def test_refused_templates_and_files(tmp_path):
    fails = "{{ raise_exception('no system here') }}"
    with pytest.raises(
        ValueError, match=r"jsonl:1: must be a conversation that the .* takes, got no system here"
    ):
        read(tmp_path, {"messages": CHAT}, tokens=lambda: tokenizer(fails))
    with pytest.raises(
        ValueError, match=r'jsonl:1: "messages" need a chat template, got a model without one'
    ):
        read(tmp_path, {"messages": CHAT}, tokens=lambda: tokenizer(None))
    with pytest.raises(ValueError, match="must have a line with an example, got none"):
        read(tmp_path, b"", b"  ")
    with pytest.raises(ValueError, match="nowhere must be a file that can be read: No such file"):
        read_examples(str(tmp_path / "nowhere"), tokenizer(), 9)
