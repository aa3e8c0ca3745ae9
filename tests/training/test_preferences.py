"""Rows and rewards of DPO and GRPO: what TRL drops or fails at after the model is loaded is said before."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
from support.checkpoints import LETTERS, tokenizer_of

from torch_moe_mps.training.examples import read_preferences
from torch_moe_mps.training.preferences import dpo_task, grpo_task, reward_of

PAIR = {"prompt": "abc", "chosen": "de", "rejected": "fghij"}
MESSAGES = [{"role": "user", "content": "abc"}]
PLAIN = "def reward(completions, **columns):\n    return {}\n"


@pytest.fixture(autouse=True)
def datasets(monkeypatch):
    """In place of `datasets`, which TRL brings: a Dataset is its rows."""

    def from_list(rows):
        if any(isinstance(value, int) and value >= 1 << 63 for row in rows for value in row.values()):
            raise OverflowError("int too big to convert")
        return rows

    monkeypatch.setitem(
        sys.modules, "datasets", SimpleNamespace(Dataset=SimpleNamespace(from_list=from_list))
    )


@pytest.fixture
def data(tmp_path):
    def write(*rows):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return str(tmp_path / "rows.jsonl")

    return write


@pytest.fixture
def reward(tmp_path):
    def write(source):
        (tmp_path / "reward.py").write_text(source)
        return str(tmp_path / "reward.py")

    return write


def tokenizer(**given):
    return tokenizer_of(LETTERS, unk_token="?", **given or {"eos_token": "?"})


def test_rows_whose_prompt_fills_the_length_are_named_and_not_counted(data, capsys):
    """TRL drops them without a word."""
    rows = [PAIR, PAIR | {"prompt": "abcd"}, PAIR | {"prompt": "abcdefgh"}]
    task = dpo_task(data(*rows), tokenizer(), 4)
    file = data(*rows)
    line = f"{file}: 2 of 3 lines have prompts of 4 tokens or more (--max-length) and are left out: 2, 3\n"
    assert capsys.readouterr().out == line
    assert [row["prompt"] for row in task.data] == ["abc"] and task.tokens == [4]
    assert dpo_task(file, tokenizer(), 9).tokens == [8, 9, 9] and not capsys.readouterr().out
    with pytest.raises(ValueError, match=r"3 of 3 lines .* none is left: --max-length must be longer"):
        dpo_task(file, tokenizer(), 3)


def test_each_row_has_the_columns_of_all(data):
    """`Dataset.from_list` takes those of the first row alone."""
    rows = read_preferences(data({"prompt": "a"}, {"prompt": "b", "answer": "c"}), "grpo")
    assert rows == {1: {"prompt": "a", "answer": None}, 2: {"prompt": "b", "answer": "c"}}


@pytest.mark.parametrize(
    ("method", "rows", "message"),
    [
        ("dpo", [PAIR, PAIR | {"chosen": MESSAGES}], ":2: all lines must have texts, or all messages, got"),
        ("dpo", [PAIR, dict.fromkeys(PAIR, MESSAGES)], ":2: all lines must have texts, or all messages"),
        ("dpo", [PAIR, {"prompt": "abc"}], ':2: "chosen" must be a text or a list of messages, got None'),
        ("dpo", [PAIR | {"prompt": ["abc"]}], ':1: a message must have "role" and "content", got \'abc\''),
        ("grpo", [{"prompt": "a", "completions": ["b"]}], ":1: a column must not have the name of an arg"),
    ],
)
def test_refused_rows(data, method, rows, message):
    file = data(*rows)
    with pytest.raises(ValueError, match="^" + re.escape(file + message)):
        read_preferences(file, method)


def test_what_arrow_does_not_hold(data):
    with pytest.raises(ValueError, match="must have one type under each key, and numbers of at most 64 bits"):
        dpo_task(data(PAIR | {"id": 1 << 63}), tokenizer(), 100)


def test_a_prompt_and_its_answer_must_fit_in_the_context(data, reward):
    file, scores = (
        data({"prompt": "ab"}, {"prompt": "abcdef"}),
        reward(PLAIN.format("[1.0] * len(completions)")),
    )
    assert grpo_task(file, tokenizer(), scores, 2, 4, 10).tokens == [6, 10]
    message = ":2: the prompt and --answer-length 4 must fit in the model's 9 tokens, got a prompt of 6"
    with pytest.raises(ValueError, match=message):
        grpo_task(file, tokenizer(), scores, 2, 4, 9)


def test_a_tokenizer_without_an_end(data, reward):
    for make in (
        lambda: dpo_task(data(PAIR), tokenizer(pad_token="?"), 100),
        lambda: grpo_task(data(PAIR), tokenizer(pad_token="?"), reward(PLAIN.format("[1, 2]")), 2, 4, 100),
    ):
        with pytest.raises(ValueError, match="needs a tokenizer with an end token, got one without"):
            make()


def test_messages_need_a_chat_template(data):
    rows = dict.fromkeys(PAIR, MESSAGES)
    with pytest.raises(ValueError, match=":1: must have messages that the chat template takes, got"):
        dpo_task(data(rows), tokenizer(), 100)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (PLAIN.format("None"), "must return a finite number for each of 2 completions, got None"),
        (PLAIN.format("[None, 1.0]"), r"for each of 2 completions, got \[None, 1.0\]"),
        (PLAIN.format("[1.0]"), r"for each of 2 completions, got \[1.0\]"),
        (PLAIN.format("[1.0, float('nan')]"), r"for each of 2 completions, got \[1.0, nan\]"),
        (PLAIN.format("__import__('sys').exit(0)"), "must run without an error, got SystemExit: 0"),
        (PLAIN.format("columns['other']"), "must run without an error, got KeyError: 'other'"),
        ("import sys\nsys.exit(0)", "must run without an error, got SystemExit: 0"),
        ("def reward(:", "must run without an error, got SyntaxError: "),
        ("score = 5", "must be a file with a function `reward`, got none in"),
    ],
)
def test_rewards_that_do_not_work_are_refused_before_the_model_is_loaded(data, reward, source, message):
    with pytest.raises(ValueError, match=message):
        grpo_task(data({"prompt": "ab"}), tokenizer(), reward(source), 2, 4, 100)


def test_a_reward_gets_the_columns_of_the_file(data, reward):
    source = (
        "def reward(prompts, completions, answer, **more):\n    return [float(text) for text in answer]\n"
    )
    task = grpo_task(data({"prompt": "ab", "answer": "3"}), tokenizer(), reward(source), 2, 4, 100)
    assert task.reward(prompts=["x"], completions=["y"], answer=["7"]) == [7.0]
    later = reward_of(reward("async def reward(completions, **more):\n    return [2] * len(completions)\n"))
    assert later(completions=["a", "b"]) == [2.0, 2.0]
