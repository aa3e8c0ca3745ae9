"""The command line before a command runs: help, version, and options that are refused."""

import argparse
import gc
import re
import shlex
import subprocess
import sys
import types

import pytest
import transformers
from support.processes import environment, python

import torch_moe_mps
from torch_moe_mps._install import install_extra
from torch_moe_mps._text import one_of
from torch_moe_mps._weight_formats import BITS, GROUP_SIZES, MODES
from torch_moe_mps.commands import main
from torch_moe_mps.commands.arguments import parse, parser
from torch_moe_mps.commands.option_checks import importing_torch
from torch_moe_mps.commands.settings import read_settings
from torch_moe_mps.quantization import Format

COMMANDS = sorted(next(a.choices for a in parser()._actions if a.dest == "command"))


def module(*arguments: str) -> subprocess.CompletedProcess:
    """A fresh process of the script `torch-moe-mps`, which says what it imported."""
    script = "import sys; from torch_moe_mps_command import run; sys.exit(run())"
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
    )


def imported(result: subprocess.CompletedProcess) -> set[str]:
    return {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["convert", "--help"], ["--version"], ["convert"]], ids=str
)
def test_the_command_line_imports_nothing_heavy(arguments):
    """torch alone takes seconds."""
    result = module(*arguments)
    assert result.returncode == (2 if arguments == ["convert"] else 0)
    assert "torch_moe_mps.commands.arguments" in imported(result)
    assert not {"torch", "transformers", "numpy", "huggingface_hub", "safetensors"} & imported(result)


def test_no_command_is_a_question_for_help(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert shown == capsys.readouterr().out and "torch-moe-mps COMMAND --help" in shown


def test_settings_keep_the_kinds_of_their_values_up_to_both_ends():
    texts = ("temperature=0", "top_p=1", "typical_p=1", "top_k=0", "min_p=0.5", "do_sample=True")
    texts += ("eos_token_id=[1, 2]", "max_time=none", "stop_strings=[a", "pad_token_id=3")
    assert read_settings(texts) == {
        "temperature": 0, "top_p": 1, "typical_p": 1, "top_k": 0, "min_p": 0.5, "do_sample": True,
        "eos_token_id": [1, 2], "max_time": None, "stop_strings": "[a", "pad_token_id": 3,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "typical_p"])
def test_numbers_that_no_sampling_has_are_refused(name):
    for value in (-0.1, *(() if name in ("temperature", "top_k") else (1.01,))):
        with pytest.raises(ValueError, match=f"--set {name} must be from 0 to .*, got {value}"):
            read_settings([f"{name}={value}"])


# {command line, where {here} is a folder: what it says}
EARLY = {
    "perplexity {here} --against {here}/nothing": "nothing is neither a folder nor the name of a model",
    "perplexity {here} --json {here}/no/file": "--json must be a file that can be written",
    "generate {here} -p a --adapter {here}/nothing": "nothing is neither a folder nor the name of an adapter",
    "generate {here} -p a --adapter {here}": "--adapter must be a folder with an adapter_config.json",
    "generate {here} -p a --prompts {here}/x": "--prompt and --prompts are two ways to give prompts",
    "generate {here} -p a --image {here}/cat.png": "--image must be a file",
    "chat {here} --prompt-folder {here}/data": "--prompt-folder must be a folder, got the file",
    "convert {here} {here}/new/..": "DST must name a new folder, got '{here}/new/..'",
    "convert {here} {here}/data/new": "DST must be a folder that can be written, got {here}/data/new: Not a",
    "convert {here} {here}": "exists; convert writes a new folder",
    "convert {here} {here}/new --recipe best --bits 4": "--recipe already sets the bits",
    "convert {here} {here}/new --save-importance {here}/x": "--save-importance needs --importance",
    "convert {here}/a.gguf {here}/new --importance auto": "--importance of a packed SRC needs --bits",
    "bench {here} --json .": "--json must be a file that can be written, got .: Is a directory",
    "fit {here} --recipe nope": "--recipe must be small, fast, best, mixed_2_6, mixed_3_4, mixed_3_6, mixed_",
    "fit {here}/folder": "folder has no config.json",
    "fit {here}/config.json": "got the file {here}/config.json: its folder is {here}",
    "generate {here} -p a --temp 0.5 --set temperature=1": "--temperature and --set temperature are one",
    "chat {here} --top-p 0.5 --set top_p=1": "--top-p and --set top_p are one setting; leave one out",
    "convert {here} {here}/new --importance {here}/no": "--importance must be auto or a file",
    "chat {here} --shares 1,2": "--shares is for the processes that torchrun starts, got one process",
    "generate {here} --prompts {here}/empty": "empty has no prompt",
    "generate {here} --prompts {here}/latin": "--prompts must be a file in UTF-8",
    "perplexity {here} --text {here}/latin": "--text must be a file in UTF-8",
}


@pytest.mark.parametrize("line", EARLY)
def test_a_cheap_error_is_said_at_once(line, tmp_path, refused, monkeypatch):
    """Before the module of the command, which imports torch, and in one line."""
    (tmp_path / "data").touch()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("torch_moe_mps.commands.importlib", None)
    assert EARLY[line].format(here=tmp_path) in refused(*line.format(here=tmp_path).split())


def test_a_cheap_error_waits_for_no_torch(tmp_path):
    """One of each way: files, the Hub, and settings, which need a module of transformers."""
    (tmp_path / "config.json").write_text("{}")
    lines = [
        "perplexity {here} --against {here}/nothing", "generate {here} -p a --adapter {here}/nothing",
        "chat {here} --set nothing=1", "convert {here} {here}",
    ]  # fmt: skip
    source = """
        import contextlib, io, sys, torch_moe_mps_command
        from torch_moe_mps.commands import main
        for line in sys.argv[1:]:
            with contextlib.redirect_stderr(io.StringIO()) as said:
                assert main(line.split()) == 1, line
            assert said.getvalue().splitlines()[-1].startswith("torch-moe-mps: error: "), line
            assert "torch" not in sys.modules, line
    """
    python(source, *(line.format(here=tmp_path) for line in lines))


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("check", "launch")])
def test_every_command_says_a_wrong_name(command, capsys, tmp_path):
    """Whatever options it has beside."""
    others = {"convert": [tmp_path / "new"], "generate": ["-p", "a"]}.get(command, [])
    assert main([command, str(tmp_path / "nothing"), *map(str, others)]) == 1
    assert "nothing is neither a folder nor the name of a model on the Hub" in capsys.readouterr().err


WRONG = {
    "convert": ("--mode q9", "--bits 7", "--group-size 0", "--linear-bits 9", "--embedding-bits 9"),
    "bench": (
        "--bits 4.5",
        "--prompt 0",
        "--max-tokens 0",
        "--turn -1",
        "--repeats 0",
        "--bandwidth 0",
        "--depth=-1,5",
        "--depth 4k",
    ),
    "chat": ("--prompt-memory nan", "--prompt-memory inf"),
    "fit": ("--context=-1", "--context many"),
    "generate": ("--batch 0", "--max-tokens 0", "--max-tokens 1.5"),
    "perplexity": ("--window 1", "--tokens 1"),
    "report": ("--minutes 0", "--minutes=-1"),
    "serve": (
        *("--port 70000", "--port=-1", "--parallel 0", "--prompt-memory=-1", "--prompt-disk=-1"),
        *("--prompt-writes=-1", "--prompt-writes much"),
        *("--allow-origin app.example", "--allow-origin https://*.example", "--allow-origin https://"),
        *("--allow-origin https://a.example/page", "--allow-origin https://me@a.example"),
        "--allow-origin ://a.example",
    ),
}


@pytest.mark.parametrize("command", ["bench", "chat", "fit", "generate", "perplexity", "serve"])
def test_the_formats_of_the_help_are_those_that_are_taken(command):
    """Of --bits and --group-size, by the list that `quantize` has; others are refused before torch."""
    actions = next(a.choices for a in parser()._actions if a.dest == "command")[command]._actions
    for option, allowed in (("bits", BITS), ("group_size", GROUP_SIZES)):
        found = next((a for a in actions if a.dest == option), None)
        if found is None:
            assert command in ("fit", "perplexity")
            continue
        assert f"{one_of(allowed['affine'])} (" in found.help
        for value in range(1, 257):
            if value in allowed["affine"]:
                assert Format(**{option: found.type(str(value))}).mode == "affine"
                continue
            with pytest.raises(argparse.ArgumentTypeError, match=f"must be {one_of(allowed['affine'])}, got"):
                found.type(str(value))


@pytest.mark.parametrize(
    "command", ["chat", "generate", "serve", "bench", "fit", "perplexity", "launch codex"]
)
def test_the_bits_of_a_kv_cache(command, capsys):
    """16 unless another is named, everywhere."""
    words = command.split()
    expected = {"4": 4, "k4v2": "k4v2", "8": 8, "16": 16}
    for text, bits in expected.items():
        assert parse([*words, "model", "--kv-bits", text]).kv_bits == bits
    assert parse([*words, "model"]).kv_bits == 16
    for wrong in ("3", "4.0", "K4V2", "k8v4", "4.2", "", "none"):
        with pytest.raises(SystemExit, match="2"):
            parse([*words, "model", "--kv-bits", wrong])
        assert capsys.readouterr().err == (
            f"torch-moe-mps {words[0]}: error: argument --kv-bits: must be 4, k4v2, 8 or 16, got {wrong}\n"
        )
    with pytest.raises(SystemExit, match="0"):
        parse([words[0], "--help"])
    assert " [--kv-bits {4,k4v2,8,16}]" in capsys.readouterr().out


def test_the_formats_of_convert(tmp_path):
    """Those of its --mode, and nothing is imported for another."""
    for arguments, expected in {
        ("--group-size", "16"): "--group-size must be 32, 64 or 128 with --mode affine, got 16",
        ("--group-size", "64", "--mode", "nvfp4"): "--group-size must be 16 with --mode nvfp4, got 64",
        ("--bits", "8", "--mode", "mxfp4"): "--bits must be 4 with --mode mxfp4, got 8",
    }.items():
        line = "import sys, torch_moe_mps_command; from torch_moe_mps.commands import main; "
        line += "code = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
        words = [sys.executable, "-c", line, "convert", "none", tmp_path / "new", *arguments]
        result = subprocess.run(words, capture_output=True, text=True, env=environment())
        assert (result.returncode, result.stderr) == (1, f"torch-moe-mps: error: {expected}\n")


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://App.example:8080/", "https://app.example:8080"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("null", "null"),
    ],
)
def test_origins_are_as_browsers_send_them(text, origin):
    assert parse(["serve", "model", "--allow-origin", text]).allow_origin == [origin]


@pytest.mark.parametrize(("command", "wrong"), [(c, w) for c in WRONG for w in WRONG[c]])
def test_a_wrong_value_is_one_line(command, wrong, capsys):
    option, value = re.split(r"[ =]", wrong)
    with pytest.raises(SystemExit, match="2"):
        main([command, "model", *([__file__] if command == "convert" else []), *wrong.split()])
    error = capsys.readouterr().err
    assert error.startswith(f"torch-moe-mps {command}: error: argument {option}: must be ")
    assert value in error.rpartition(", got ")[2]
    assert error.count("\n") == 1


def test_files_that_are_none(tmp_path, capsys):
    for command, option in (("perplexity", "--text"), ("generate", "--prompts")):
        for name, wrong in ((str(tmp_path / "none"), "does not exist"), (str(tmp_path), "is a folder")):
            assert main([command, ".", option, name]) == 1
            assert capsys.readouterr().err == (
                f"torch-moe-mps: error: {option} must be a file: {name} {wrong}\n"
            )


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"torch-moe-mps {torch_moe_mps.__version__}\n"


def test_where_an_error_comes_from(capsys):
    """Also one that is a line otherwise."""
    command = ["fit", "no_such_folder/no_such_model/at_all"]
    assert main(command) == 1
    assert capsys.readouterr().err.startswith("torch-moe-mps: error: ")
    command.append("--debug")
    with pytest.raises((OSError, ValueError)) as raised:
        main(command)
    assert len(raised.traceback) > 3


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("raise ImportError('no sharding in lib 1.0')", "ImportError: no sharding in lib 1.0"),
        ("import no_such_part", "ModuleNotFoundError: No module named 'no_such_part'"),
        (
            "raise ModuleNotFoundError(\"No module named 'accelerate'\", name='accelerate')",
            f"No module named 'accelerate'; `{install_extra('transformers')}` installs what",
        ),
    ],
)
def test_a_broken_import_is_said_with_its_cause(broken, message, refused, monkeypatch):
    """As transformers raises it for a class whose file cannot be imported."""

    def run(options):
        try:
            exec(broken)
        except ImportError as error:
            raise ModuleNotFoundError("Could not import module 'AutoModel'.") from error

    monkeypatch.setattr("importlib.import_module", lambda *name: types.SimpleNamespace(run=run))
    error = refused("check")
    assert message in error and ("pip install" in error) == ("accelerate" in broken)


def test_causes_in_a_circle_are_said_once(refused, monkeypatch):
    """A module may raise the error again that its import has met."""

    def run(options):
        first, second = ImportError("cannot import name 'a'"), ModuleNotFoundError("Could not import 'B'.")
        first.__cause__, second.__cause__ = second, first
        raise second

    monkeypatch.setattr("importlib.import_module", lambda *name: types.SimpleNamespace(run=run))
    assert "Could not import 'B'.: ImportError: cannot import name 'a'" in refused("check")


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_in_the_help_are_right(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    _, _, examples = capsys.readouterr().out.partition("examples:\n")
    assert "#" not in examples  # which is no comment in an interactive zsh
    shown = [line for line in examples.splitlines() if line.strip().startswith("torch-moe-mps ")]
    lines = [shlex.split(re.split("[<>]", line)[0]) for line in shown]
    assert len(lines) >= 2
    for line in lines:
        assert line[:2] == ["torch-moe-mps", command]
        parse(line[1:])


def test_the_help_names_every_mode(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["convert", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"--mode MODE {', '.join(MODES[:-1])} or {MODES[-1]}; " in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "a"], "torch-moe-mps convert: error: the following arguments are required: DST"),
        (
            ["convert", "a", "b", "--linear-bits", "x"],
            "torch-moe-mps convert: error: argument --linear-bits: "
            "must be 1, 2, 3, 4, 5, 6, 8, same, auto or none, got x",
        ),
        (
            ["chat", "a", "--set", "max_new_tokens"],
            "torch-moe-mps chat: error: argument --set: must be FLAG=VALUE, got 'max_new_tokens'",
        ),
        (["generate", "a", "--shares", "1,2"], "torch-moe-mps: error: unrecognized arguments: --shares 1,2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert capsys.readouterr().err == message + "\n"


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_import_of_torch_searches_for_no_garbage(monkeypatch, is_enabled):
    """Behind it the caller's setting holds again."""
    monkeypatch.delitem(sys.modules, "torch")
    before, frozen = gc.isenabled(), gc.get_freeze_count()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with importing_torch("chat"):
            assert not gc.isenabled()
        assert gc.isenabled() is is_enabled
    finally:
        (gc.enable if before else gc.disable)()
        if not frozen:
            gc.unfreeze()


def test_settings_of_draws_warn_of_nothing(caplog):
    """transformers warns of a temperature beside no `do_sample`, which the temperature implies."""
    transformers.utils.logging.warning_once.cache_clear()
    assert read_settings(["temperature=0.6", "top_k=20"]) == {"temperature": 0.6, "top_k": 20}
    assert read_settings(["temperature=0"]) == {"temperature": 0}
    assert not caplog.records
