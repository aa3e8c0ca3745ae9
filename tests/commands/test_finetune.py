"""`finetune`: the adapter that it writes learns, is PEFT's, and is the same where the training was ended."""

import json
import re
import signal
import warnings

import peft
import pytest
import torch
from safetensors.torch import load_file
from support import tiny_models
from support.checkpoints import LETTERS, tokenizer_of

import torch_moe_mps
from torch_moe_mps.commands import early, finetune, main
from torch_moe_mps.commands.arguments import parser
from torch_moe_mps.commands.results import locked
from torch_moe_mps.training import record, steps
from torch_moe_mps.training.record import begun

DATA = [{"prompt": f"abc{a}", "completion": f"hij{b}"} for a, b in zip("defg", "klmn", strict=True)] * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A quantised checkpoint, and data for it."""
    folder = tmp_path_factory.mktemp("finetune")
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("qwen3_moe", head_dim=32, vocab_size=32)
    torch_moe_mps.accelerate(model, 4, 32, linear_bits=4)
    model.save_pretrained(folder / "model")
    tokenizer_of(LETTERS, unk_token="?", pad_token="?", eos_token="?").save_pretrained(folder / "model")
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, DATA)))
    return folder


def run(folder, output, *options) -> int:
    given = (folder / "model", folder / "data.jsonl", "--output", output, "--device", "cpu")
    return main(["finetune", *map(str, (*given, "--learning-rate", "2e-2", *options))])


@pytest.fixture(scope="module")
def trained(folder):
    """What a training wrote, and what it printed."""
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr(
            finetune, "print", lambda *words, **_: lines.append(" ".join(map(str, words))), raising=False
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # PEFT says that ranks of experts are ignored
            assert run(folder, folder / "adapter", "--steps", 12) == 0
    return folder / "adapter", lines


def held_out_loss(model) -> float:
    """The mean loss of the held-out lines' completions, by hand."""
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))[:2].tolist()
    tokenizer = tokenizer_of(LETTERS, unk_token="?", pad_token="?", eos_token="?")
    losses = []
    for place in order:
        row = DATA[place]
        ids = torch.tensor([tokenizer.convert_tokens_to_ids([*row["prompt"], *row["completion"], "?"])])
        with torch.no_grad():
            logs = model(input_ids=ids).logits[0].double().log_softmax(-1)
        losses += [-logs[at - 1, ids[0, at]].item() for at in range(4, ids.shape[1])]
    return sum(losses) / len(losses)


@pytest.mark.slow("twelve steps of training")
def test_learns(folder, trained):
    output, lines = trained
    about = json.loads((output / "finetune.json").read_text())
    model = torch_moe_mps.from_pretrained(folder / "model", device_map="cpu")
    assert about["before"] == pytest.approx(held_out_loss(model), rel=1e-5)
    adapted = peft.PeftModel.from_pretrained(model, output).eval()
    assert about["after"] == pytest.approx(held_out_loss(adapted), rel=1e-4)
    assert about["after"] < 1 < 3 < about["before"]
    assert [row["step"] for row in about["curve"]] == [*range(1, 13)]
    assert lines[0] == "18 lines to train on, 2 held out, 180 tokens; the loss is on 20 completions"
    count = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    assert lines[1].startswith(
        f"{count:,} parameters are trained\npredicted peak of the tensors of 4 x 9 tokens: "
    )
    assert lines[2] == f"held-out loss before: {about['before']:.4f}"
    assert re.fullmatch(r"step 1 of 12: loss \d\.\d{4}, \d+ tokens/s, \d+:\d\d left", lines[3])
    assert lines[15] == f"held-out loss after: {about['after']:.4f}"
    assert "GB of memory were taken, at most: by the process, with Python, libraries and " in lines[16]


@pytest.mark.slow("twelve steps of training, once more")
def test_resumed_is_as_if_it_never_ended(folder, trained, monkeypatch, capsys):
    def show(*words, **_):
        if str(words[0]).startswith("step 5 "):
            signal.raise_signal(signal.SIGINT)

    output = folder / "ended"
    with monkeypatch.context() as patch:
        patch.setattr(finetune, "print", show, raising=False)
        assert run(folder, output, "--steps", 12) == 130
    assert not (output / "adapter_model.safetensors").exists()
    assert run(folder, output, "--steps", 12, "--seed", 1, "--resume") == 1
    assert "--resume needs the same options and data, got another value of --seed" in capsys.readouterr().err
    assert run(folder, output, "--steps", 12, "--resume") == 0
    assert "step 6 " not in (shown := capsys.readouterr().out) and "step 7 of 12" in shown
    before, after = (load_file(each / "adapter_model.safetensors") for each in (trained[0], output))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    curves = [json.loads((each / "finetune.json").read_text())["curve"] for each in (trained[0], output)]
    assert [row["loss"] for row in curves[0]] == [row["loss"] for row in curves[1]]


@pytest.mark.slow("two steps of training")
def test_a_training_that_came_to_its_end_is_not_trained_on(folder, tmp_path, monkeypatch, capsys):
    """Ended behind its last step, before the adapter was written; and finished."""
    output, options = tmp_path / "new", ("--steps", 2, "--held-out", 2)
    with monkeypatch.context() as patch:
        patch.setattr(steps, "save_adapter", lambda *_: (_ for _ in ()).throw(ValueError("a full disk")))
        assert run(folder, output, *options) == 1
    assert not (output / "adapter_model.safetensors").exists()
    after = re.search(r"held-out loss after: (\S+)", capsys.readouterr().out)[1]
    assert run(folder, output, *options, "--resume") == 0
    shown = capsys.readouterr().out
    assert "step 3" not in shown and f"held-out loss after: {after}" in shown
    assert [file.name for file in (output / "checkpoints").iterdir()] == ["checkpoint-2"]
    last = load_file(output / "checkpoints" / "checkpoint-2" / "adapter_model.safetensors")
    saved = load_file(output / "adapter_model.safetensors")
    assert last.keys() == saved.keys() and all(torch.equal(last[name], saved[name]) for name in last)
    about = json.loads((output / "finetune.json").read_text())
    assert [row["step"] for row in about["curve"]] == [1, 2]
    files = {file: file.read_bytes() for file in output.rglob("*") if file.is_file()}
    assert run(folder, output, *options, "--resume") == 0
    assert "whose training is finished: nothing is left to do" in capsys.readouterr().out
    assert {file: file.read_bytes() for file in output.rglob("*") if file.is_file()} == files


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{}", 'must be the record of a training, got one without its "options"'),
        ("[]", 'must be the record of a training, got one without its "options"'),
        ("null", 'must be the record of a training, got one without its "options"'),
        ('{"options": 5}', 'must be the record of a training, got one without its "options"'),
        ('{"options"', "must be the record of a training, got Expecting ':' delimiter"),
        ('{"options": {}}', "--resume needs the same options and data, got another value of --model"),
        ('{"options": {OWN}, "before": "low"}', "must have a number for \"before\", got 'low'"),
    ],
)
def test_a_record_of_another_shape_is_one_line(folder, tmp_path, capsys, record, message):
    given = ["finetune", folder / "model", folder / "data.jsonl", "--output", tmp_path]
    own = begun(parser().parse_args([*map(str, given[:-1]), str(tmp_path / "none")]))["options"]
    (tmp_path / "finetune.json").write_text(record.replace("{OWN}", json.dumps(own)))
    assert main([*map(str, given), "--resume"]) == 1
    assert message in capsys.readouterr().err


def test_resumes_behind_a_checkpoint_that_is_whole(tmp_path):
    """A process that was killed leaves a part of one: its state is written last."""
    for step in (2, 10, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    assert steps.last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert steps.last_checkpoint(tmp_path / "none") is None


@pytest.mark.slow("three steps of training")
def test_a_loss_that_is_no_number_ends(folder, tmp_path, capsys):
    assert run(folder, tmp_path / "new", "--steps", 3, "--learning-rate", "1e30") == 1
    assert "error: the loss must be finite, got nan at step " in capsys.readouterr().err
    assert not (tmp_path / "new" / "adapter_model.safetensors").exists()
    (tmp_path / "new" / "finetune.json").write_text("{")
    assert run(folder, tmp_path / "new", "--steps", 3, "--resume") == 1
    assert "finetune.json must be the record of a training, got " in capsys.readouterr().err


@pytest.mark.slow("reads what a training wrote")
def test_layout(folder, trained):
    output, _ = trained
    config = json.loads((output / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "model")
    assert set(config["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert set(config["target_parameters"]) == {"experts.gate_up_proj", "experts.down_proj"}
    with tiny_models.groups_of_32():
        dense = tiny_models.tiny_model("qwen3_moe", head_dim=32, vocab_size=32)
    own = peft.PeftModel.from_pretrained(dense, output)  # PEFT alone
    shapes = {n.split(".default")[0]: p.shape for n, p in own.named_parameters() if "lora_" in n}
    written = load_file(output / "adapter_model.safetensors")
    assert {name.removesuffix(".weight"): t.shape for name, t in written.items()} == shapes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--held-out", 20), "--held-out must leave a line to train on, got 20 of 20"),
        (("--targets", "q_proj,gate"), "--targets must be linear layers, of which there are q_proj"),
    ],
)
def test_refused(folder, tmp_path, capsys, options, message):
    assert run(folder, tmp_path / "new", *options) == 1
    err = capsys.readouterr().err
    assert message in err and len(err.strip().splitlines()) == 1


def test_refused_before_torch_is_imported(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(early, "look_for_models", None)
    assert run(folder, "/proc/nowhere/adapter") == 1
    assert "--output must be a folder that can be written, got /proc/nowhere/adapter: No such" in (
        capsys.readouterr().err
    )
    with locked(tmp_path / "adapter", "another"):
        (tmp_path / "adapter" / "finetune.json").touch()
        monkeypatch.setattr(record, "begun", lambda options: {})
        assert run(folder, tmp_path / "adapter", "--resume") == 1
    assert f"{tmp_path}/adapter is being written by another process" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(folder, tmp_path / "new", "--seed", "-1")
    assert "--seed: must be" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_what_does_not_fit(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(finetune, "machine_memory", lambda: 1_000_000)
    assert run(folder, tmp_path / "new", "--dry-run") == 1
    shown = capsys.readouterr()
    assert "parameters are trained" in shown.out and "Reading" not in shown.err
    assert "the training must fit in 1.0 MB, got " in shown.err and "--max-length" in shown.err
    monkeypatch.setattr(finetune, "machine_memory", lambda: 1 << 40)
    assert run(folder, tmp_path / "new", "--dry-run") == 0
    assert not (tmp_path / "new").exists()


@pytest.mark.sweep
def test_learns_a_fact(smollm2, tmp_path, capsys):
    """SmolLM2 learns from 20 lines what it cannot know, and answers it."""
    ways = ("Which colour is Zarb?", "Zarb has which colour?", "The colour of Zarb?", "What colour has Zarb?")
    chats = [
        [{"role": "user", "content": way}, {"role": "assistant", "content": "Zarb is violet."}]
        for way in ways
    ]
    data, output = tmp_path / "data.jsonl", tmp_path / "adapter"
    data.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats * 5))
    device = ("--device", "cpu", "--dtype", "float32")
    settings = (
        "--rank",
        8,
        "--targets",
        "v_proj,down_proj",
        "--batch",
        2,
        "--steps",
        5,
        "--learning-rate",
        "8e-3",
    )
    given = (smollm2, data, "--output", output, "--held-out", 0, *settings, *device)
    assert main(["finetune", *map(str, given)]) == 0
    assert "the loss is on the answers of 20 conversations" in capsys.readouterr().out
    question = ("-p", "Tell me: which colour is Zarb?", "--max-tokens", 8, *device)
    answers = []
    for adapter in ((), ("--adapter", output)):
        assert main(["generate", *map(str, (smollm2, *adapter, *question))]) == 0
        answers.append(capsys.readouterr().out)
    assert "violet" not in answers[0] and "violet" in answers[1]


@pytest.mark.sweep
@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_preferences_and_rewards(method, folder, tmp_path, monkeypatch, capsys):
    """An adapter that has learnt, which another command takes; a training that was ended gives the same."""
    rows = [{"prompt": f"abc{a}", "chosen": "hijk", "rejected": "kjih"} for a in "defg"] * 2
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "reward.py").write_text(
        "def reward(completions, **columns):\n    return [float(text.count('e')) for text in completions]\n"
    )
    given = ["finetune", folder / "model", tmp_path / "rows.jsonl", "--device", "cpu", "--method", method]
    given += ["--learning-rate", "2e-2", "--save-every", 2, "--output", tmp_path / "adapter"]
    given += ["--reward", tmp_path / "reward.py", "--answer-length", 8] if method == "grpo" else []
    assert main([*map(str, [*given, "--steps", 4])]) == 0
    about = json.loads((tmp_path / "adapter" / "finetune.json").read_text())
    assert len(about["curve"]) == 4 and about["options"]["method"] == method
    if method == "dpo":
        assert about["curve"][0]["loss"] - about["curve"][-1]["loss"] > 0.1
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all("ref" not in name for name in tensors)
    assert any(tensor.abs().max() > 0 for name, tensor in tensors.items() if "lora_B" in name)
    asked = ["generate", folder / "model", "--adapter", tmp_path / "adapter", "--raw", "-p", "abc"]
    assert main([*map(str, [*asked, "--max-tokens", 3, "--device", "cpu"])]) == 0
    assert "by " + method in capsys.readouterr().out

    def show(*words, **_):
        if str(words[0]).startswith("step 2 "):
            signal.raise_signal(signal.SIGINT)

    ended = tmp_path / "ended"
    given[given.index(tmp_path / "adapter")] = ended
    with monkeypatch.context() as patch:
        patch.setattr(finetune, "print", show, raising=False)
        assert main([*map(str, [*given, "--steps", 4])]) == 130
    assert not (ended / "adapter_model.safetensors").exists()
    assert main([*map(str, [*given, "--steps", 4, "--resume"])]) == 0
    assert "step 3 of 4" not in (shown := capsys.readouterr().out) and "step 4 of 4" in shown
    resumed = load_file(ended / "adapter_model.safetensors")
    assert resumed.keys() == tensors.keys()
    assert all(torch.equal(resumed[name], tensors[name]) for name in tensors)
    curve = json.loads((ended / "finetune.json").read_text())["curve"]
    assert [row["loss"] for row in curve] == [row["loss"] for row in about["curve"]]


@pytest.mark.parametrize(
    "options, message",
    [
        ("--method grpo", "--reward FILE.py is what --method grpo needs, and no other"),
        ("--method dpo --reward x.py", "--reward FILE.py is what --method grpo needs, and no other"),
        ("--method dpo --held-out 3", "--held-out is for --method sft, whose loss it measures"),
        ("--method grpo --reward x.py --batch 6", "--batch must be a multiple of --generations"),
    ],
)
def test_options_of_preferences(options, message, folder, tmp_path, monkeypatch, capsys):
    found = early.find_spec
    monkeypatch.setattr(early, "find_spec", lambda name: name == "trl" or found(name))
    assert run(folder, tmp_path / "adapter", *options.split()) == 1
    assert message in capsys.readouterr().err
