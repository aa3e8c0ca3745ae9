"""It starts: the wheel in an environment of its own, in fresh processes, from another folder.

Importing transformers takes most of the seconds of a command. For every change some commands run in a fork of
a process that has imported it, in the sweep all, and `serve` and `check` as users start them.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import openai
import pytest
import transformers
from support import installed, tiny_models
from support.checkpoints import LETTERS, tokenizer_of
from support.processes import LEAVE
from support.sweep import in_sweep, rows_in_sweep

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
ON_MAC = sys.platform == "darwin"
DEVICE = ("--device", "cpu")
# Of each command: what is behind the model, and what it prints.
RUNS = {
    "fit": ((), "billion weights"),
    "generate": (("-p", "abc", "--max-tokens", "3", *DEVICE), ""),
    "perplexity": (("--tokens", "40", "--window", "32", *DEVICE), "perplexity"),
    "bench": (
        ("--prompt", "4", "--max-tokens", "2", "--turn", "2", "--depth", "0", "--repeats", "1", *DEVICE),
        "| tg2 |",
    ),
    "convert": (("converted", "--bits", "4", "--group-size", "32"), "wrote converted"),
    "chat": (("--set", "max_new_tokens=3", *DEVICE), "tokens/s"),
}

OFTEN = ("chat",)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """The environment."""
    return installed.new_environment(tmp_path_factory)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("letters") / "model"
    with tiny_models.groups_of_32():
        tiny_models.tiny_model("mixtral", head_dim=32, vocab_size=27).save_pretrained(folder)
    tokenizer_of(LETTERS, unk_token="?", chat_template=TEMPLATE).save_pretrained(folder)
    return folder


def variables(**own: str) -> dict[str, str]:
    """Those of this process without what tests add."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MOE_MPS_"))}
    return kept | {"MOE_MPS_CHECK": "0", "MOE_MPS_TUNE": "0", "TQDM_DISABLE": "1"} | own


def ended(command: Sequence[object], folder: Path, said: str = "", **own: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a process in a folder, which reads `said`."""
    words = [*map(str, command)]
    result = subprocess.run(
        words, capture_output=True, text=True, timeout=500, env=variables(**own), cwd=folder, input=said
    )
    return result.returncode, result.stdout, result.stderr


# Forks for each run: its folder, what it reads, and its arguments; prints the exit codes.
FORKS = """
import gc, json, os, sys, traceback
gc.disable()
import torch, transformers.modeling_utils, transformers.generation
gc.freeze()
gc.enable()
codes = []
for arguments in json.loads(sys.argv[1]):
    if (process := os.fork()) == 0:
        for number, name in enumerate(("said", "output", "errors")):
            mode = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT
            os.dup2(os.open(f"{arguments[0]}.{name}", mode), number)
        code = 99
        try:
            from torch_moe_mps.commands import main
            code = main(arguments)
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
print(json.dumps(codes))
"""
FORKS += LEAVE


def check_run(command: str, folder: Path, code: int, output: str, errors: str) -> None:
    assert code == 0 and RUNS[command][1] in output, (command, output, errors)
    if command in ("chat", "generate"):
        assert "Reading: " in errors and "The model is ready after" in errors
    if command == "generate":
        assert output.strip() and "3 generated" in errors
    if command == "convert":
        assert (folder / "converted" / "model.safetensors").stat().st_size > 1000


def arguments_of(command: str, checkpoint: Path) -> list[str]:
    return [command, str(checkpoint), *RUNS[command][0]]


@pytest.mark.skipif(ON_MAC, reason="Metal does not survive a fork")
@pytest.mark.parametrize("commands", in_sweep((tuple(RUNS), OFTEN), (OFTEN,)), ids=len)
def test_commands_run(home, checkpoint, commands, tmp_path):
    """And `check`, which finds no Apple GPU here, and says so by its exit code, too."""
    for command in (*commands, "check"):
        (tmp_path / f"{command}.said").write_text("abc\n" if command == "chat" else "")
    asked = json.dumps([*(arguments_of(command, checkpoint) for command in commands), ["check"]])
    code, output, errors = ended([home / "bin/python", "-c", FORKS, asked], tmp_path)
    assert code == 0, errors
    *codes, code = json.loads(output)
    for command, own in zip(commands, codes, strict=True):
        texts = ((tmp_path / f"{command}.{name}").read_text() for name in ("output", "errors"))
        check_run(command, tmp_path, own, *texts)
    assert code == 2
    assert (tmp_path / "check.output").read_text().startswith("torch finds no Apple GPU here")


@pytest.mark.parametrize("packages", in_sweep(("all", "declared"), ("all",)))
def test_serve_answers_a_client(tmp_path_factory, packages, checkpoint, tmp_path):
    """In an environment with all packages of the tests, or with what the extra `serve` requires."""
    if packages == "all":
        home = installed.new_environment(tmp_path_factory)
    else:
        home = installed.declared_environment(tmp_path_factory, "serve")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [home / "bin/torch-moe-mps", "serve", checkpoint, "--port", port, *DEVICE, "--prompt-disk", "0"]
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen([*map(str, line)], stdout=file, stderr=file, env=variables(), cwd=tmp_path)
    try:
        deadline = time.monotonic() + 400
        while not is_up(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.3)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            (name,) = (model.id for model in client.models.list())
            answer = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "abc"}], max_tokens=3, temperature=0
            )
        assert answer.choices[0].message.content == written_by_transformers(checkpoint, "abc", 3)
        assert answer.usage.completion_tokens == 3
    finally:
        process.terminate()
        process.wait(60)


def written_by_transformers(checkpoint: Path, prompt: str, tokens: int) -> str:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    inputs = tokenizer(
        prompt, return_tensors="pt", return_token_type_ids=False
    )  # with a mask: "a" is the padding
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(output[0, inputs.input_ids.shape[1] :])


def is_up(address: str) -> bool:
    try:
        return urllib.request.urlopen(address).status == 200
    except OSError:
        return False


# Runs each command up to the import of torch, in a fork.
UP_TO_TORCH = """
import json, os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("torch is imported now")

sys.meta_path.insert(0, Finder())
import torch_moe_mps_command
from torch_moe_mps.commands import main
for arguments in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os._exit(main(arguments))
    os.wait()
"""


# Python's own end deletes the module, which prints; and a handler of atexit runs in either.
ENDS = """
import atexit, sys
import torch_moe_mps_command  # behind which the package imports no torch
from torch_moe_mps import commands

class Teardown:
    def __del__(self):
        print("taken apart")

commands.kept = Teardown()
def main():
    atexit.register(print, "handler")
    if sys.argv[1] == "raises":
        raise RuntimeError("of --debug")
    return 3

commands.main = main
sys.exit(commands.run())
"""


# The package, torch and a safetensors file take a second or more to import and read.
STOPPED = (("importing torch", 0.0), ("importing torch", 0.6), ("The model", 0.0))
# Ctrl-C in front of the command's first line.
EARLY = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch_moe_mps.commands.arguments":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from torch_moe_mps_command import run
run()
"""


def test_ctrl_c_while_the_command_is_imported(tmp_path):
    got = ended([sys.executable, "-c", EARLY], tmp_path)
    assert got == (130, "", "\ntorch-moe-mps: interrupted\n")


@pytest.mark.slow("starts commands in new processes")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("mark", "seconds"), rows_in_sweep(STOPPED, STOPPED[:1]))
def test_a_signal_ends_a_command(home, checkpoint, tmp_path, number, mark, seconds):
    """At any time, with a line for Ctrl-C alone: while modules are imported, and behind a model's loading."""
    line = [home / "bin/torch-moe-mps", *arguments_of("chat", checkpoint)]
    process = subprocess.Popen(
        [*map(str, line)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=variables(), cwd=tmp_path,
    )  # fmt: skip
    with process:
        said = b""
        while mark.encode() not in said:
            said += (part := os.read(process.stdout.fileno(), 1000))
            assert part, said
        time.sleep(seconds)
        process.send_signal(number)
        said += process.stdout.read()
        assert process.wait(100) == 128 + number, said
    assert b"Traceback" not in said and b"leak" not in said and b"error" not in said
    assert (said.count(b"torch-moe-mps: interrupted\n") == 1) == (number == signal.SIGINT)


@pytest.mark.parametrize(
    ("how", "code", "said"), [("returns", 3, "handler\n"), ("raises", 1, "handler\ntaken apart\n")]
)
def test_a_command_ends_without_taking_modules_apart(how, code, said):
    got = subprocess.run([sys.executable, "-c", ENDS, how], capture_output=True, text=True, env=variables())
    assert (got.returncode, got.stdout) == (code, said)
    assert ("RuntimeError: of --debug" in got.stderr) == (how == "raises")


def test_commands_say_that_they_import_torch(checkpoint, tmp_path):
    """At once: before the seconds that it takes."""
    commands = [arguments_of(command, checkpoint) for command in RUNS]
    words = [sys.executable, "-c", UP_TO_TORCH, json.dumps(commands)]
    _, output, errors = ended(words, tmp_path)
    assert output == "" and errors.splitlines() == [
        line
        for command in RUNS
        for line in (
            f"torch-moe-mps {command}: importing torch",
            "torch-moe-mps: error: torch is imported now",
        )
    ]


def test_a_wrong_option_is_refused_before_torch(tmp_path):
    words = [sys.executable, "-c", UP_TO_TORCH, json.dumps([["generate", "nowhere", "--bits", "9"]])]
    _, output, errors = ended(words, tmp_path)
    expected = "argument --bits: must be 1, 2, 3, 4, 5, 6 or 8, got 9"
    assert output == "" and errors == f"torch-moe-mps generate: error: {expected}\n"


# Imports each module as a fresh interpreter does: those of a package in forks of what has imported that.
ALL_ALONE = """
import importlib, os, pkgutil, sys, traceback

def alone(name):
    importlib.import_module(name)
    print(name, sys.modules["torch"].ops.moe_mps.rms_norm.default, flush=True)
    for child in pkgutil.iter_modules(getattr(sys.modules[name], "__path__", ())):
        if child.name != "__main__" and os.fork() == 0:
            try:
                alone(f"{name}.{child.name}")
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        elif child.name != "__main__":
            os.wait()

alone("torch_moe_mps")
"""


def modules() -> list[str]:
    """Those of the package but its `__main__`."""
    root = installed.REPOSITORY
    files = [path.relative_to(root).with_suffix("") for path in (root / "torch_moe_mps").rglob("*.py")]
    names = {".".join(file.parts).removesuffix(".__init__") for file in files}
    return sorted(name for name in names if not name.endswith("__main__"))


def printed(home: Path, source: str, *arguments: str, **own: str) -> list[str]:
    """The lines that a fresh interpreter prints."""
    code, output, errors = ended([home / "bin/python", "-c", source, *arguments], home, **own)
    assert code == 0 and not errors, errors
    return output.splitlines()


@pytest.mark.sweep
def test_each_module_alone(home):
    lines = [f"{name} moe_mps.rms_norm.default" for name in modules()]
    assert sorted(printed(home, ALL_ALONE)) == sorted(lines)
