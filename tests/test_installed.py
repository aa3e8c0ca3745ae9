"""The installed package in programs that do not import it: a checkpoint or a name of its own imports it."""

import contextlib
import copy
import importlib
import importlib.util
import json
import runpy
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import gguf_files, installed, tiny_models
from support.checkpoints import fp8_blocks, mxfp4_blocks
from support.installed import python
from support.models import assert_close, operators_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import torch_moe_mps
import torch_moe_mps_autoload
from torch_moe_mps.transformers.basics import unmodified

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPT = "which experts"
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    return installed.package(tmp_path_factory)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A folder with a model in 4 bit, a tokenizer of bytes, and the text that the model should write."""

    def make(folder):
        with tiny_models.groups_of_32(), tiny_models.sizes(vocab_size=259):
            model = tiny_models.tiny_model("qwen3_moe")
        model.generation_config.update(do_sample=False, eos_token_id=None, pad_token_id=256)
        model.config.eos_token_id = None
        dense = copy.deepcopy(model)
        torch_moe_mps.accelerate(model, bits=4, group_size=32)
        model.save_pretrained(folder)
        letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        bytewise = Tokenizer(models.BPE(letters, []))
        bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bytewise.decoder = decoders.ByteLevel()
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=bytewise, chat_template=TEMPLATE, pad_token="<pad>"
        )
        tokenizer.save_pretrained(folder)
        ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
        written = tiny_models.dense_twin(dense, model).generate(ids, max_new_tokens=NEW_TOKENS)
        (folder / "expected.txt").write_text(tokenizer.decode(written[0, ids.shape[1] :]))

    return installed.once(tmp_path_factory, "checkpoint", make)


def expected(checkpoint: Path) -> str:
    return (checkpoint / "expected.txt").read_text()


def test_torch_imports_one_small_module(package):
    """The cost of the entry point: apart from it no module is read, and none of the package."""
    source = """
        import sys
        import torch
        before = set(sys.modules)
        torch._import_device_backends()  # what `import torch` ends with
        print(*set(sys.modules) - before)
    """
    assert python(package, source, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "torch_moe_mps_autoload"


def test_no_exception_reaches_torch(package):
    output = python(
        package,
        """
        import sys, warnings
        sys.meta_path = tuple(sys.meta_path)  # takes no further finder
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import torch
        print(torch.ones(2).sum().item(), *(warning.message for warning in caught))
        """,
    )
    assert output.startswith("2.0 torch_moe_mps will not be loaded with transformers ('tuple' object has no ")


# Imports torch and transformers in an environment with the package, and runs each program in a fork of that.
FORKS = """
    import json, os, sys, time
    spent = [0.0]
    def timed(own):
        def call(*args, **kwargs):
            start = time.process_time()
            try:
                return own(*args, **kwargs)
            finally:
                spent[0] += time.process_time() - start
        return call
    import torch_moe_mps_autoload as ours
    ours._Finder.find_spec = timed(ours._Finder.find_spec)
    ours._Finder.catch_up = timed(ours._Finder.catch_up)
    ours.autoload = timed(ours.autoload)
    start = time.process_time()
    import torch, transformers, transformers.modeling_utils, transformers.quantizers.auto
    from transformers import AutoModelForCausalLM, AutoTokenizer
    whole = time.process_time() - start
    for name, source, *given in json.loads(sys.argv[1]):
        if (process := os.fork()) == 0:
            sys.argv[1:] = given
            os.dup2(os.open(f"{name}.output", os.O_WRONLY | os.O_CREAT), 1)
            code = 1
            try:
                exec(source)
                sys.stdout.flush()
                code = 0
            finally:
                if code:
                    import traceback
                    traceback.print_exc()
                os._exit(code)
        assert os.waitpid(process, 0)[1] == 0, name
"""
# A dense model and a GGUF file in a process that does not use the package, which is installed.
UNUSED = """
import transformers.masking_utils, transformers.integrations.moe, transformers.integrations.gguf
named = "moe_mps" in transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS

def members():
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] == "transformers"]
    classes = {id(c): c for m in modules for c in [*vars(m).values()] if isinstance(c, type)}
    return {(c, name): id(value) for c in classes.values() for name, value in [*vars(c).items()]}

mapping = transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING
before, quantizers = members(), dict(mapping)
dense = AutoModelForCausalLM.from_pretrained(sys.argv[1])
gguf = AutoModelForCausalLM.from_pretrained(sys.argv[1], gguf_file="model.gguf")
dtypes = [str(p.dtype) for m in (dense, gguf) for p in m.parameters()]
own = [name for name in sys.modules if name.startswith("torch_moe_mps")]
share, after = spent[0] / whole, members()
switch = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
import torch_moe_mps.transformers
used, kept = members(), {name: mapping.get(name) is each for name, each in quantizers.items()}
changed = [[k[0].__name__, k[1]] for s in (after, used) for k, v in before.items() if s.get(k) != v]
print(json.dumps([own, share, changed, named, sorted({*dtypes}), all(kept.values()), switch]))
"""
CALLED = """
import collections
from torch.utils._python_dispatch import TorchDispatchMode

class Called(TorchDispatchMode):
    names = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "moe_mps":
            self.names[function._schema.name.partition("::")[2]] += 1
        return function(*args, **(kwargs or {}))
"""
SCRIPT = f"""
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = tokenizer(sys.argv[2], return_tensors="pt")["input_ids"]
text = tokenizer.decode(model.generate(ids, max_new_tokens=int(sys.argv[3]))[0, ids.shape[1] :])
{CALLED}
with torch.no_grad(), Called() as called:
    model(ids[:, :1])
print(json.dumps([text, called.names]))
"""
# Names of ours in plain from_pretrained, and a checkpoint that transformers would turn into 16 bits on a Mac.
BY_NAME = f"""
{CALLED}
ids = torch.tensor([[5, 9, 3, 7]])

def written(name):
    own = dict(experts_implementation=name, attn_implementation=name)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, **own)
    return model.generate(ids, max_new_tokens=12, do_sample=False).tolist()

eager, imported = written("eager"), "torch_moe_mps" in sys.modules
with Called() as called:
    ours = written("moe_mps")
import torch_moe_mps_autoload
torch_moe_mps_autoload._has_apple_gpu = lambda: True
packed = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32)
codes = [t for name, t in packed.state_dict().items() if name.endswith("packed")]
kept = [sorted({{str(t.dtype) for t in codes}}), sum(t.nbytes for t in codes)]
logits = packed(ids).logits.flatten().tolist()
print(json.dumps([eager, imported, ours, sorted(called.names), kept, logits]))
"""


@pytest.fixture(scope="module")
def programs(package, checkpoint, tmp_path_factory):
    """What each program printed, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("programs")
    tiny_models.tiny_model("llama").save_pretrained(folder / "unused")
    architecture, keys, matrices, _ = gguf_files.of_architecture("llama", "q4_0")
    gguf_files.write(folder / "unused" / "model.gguf", architecture, keys, matrices)
    tiny_models.tiny_model("qwen3_moe").save_pretrained(folder / "dense")
    made = [["unused", UNUSED, folder / "unused"], ["script", SCRIPT, checkpoint, PROMPT, NEW_TOKENS]]
    for method, architecture, write in (("mxfp4", "gpt_oss", mxfp4_blocks), ("fp8", "qwen3_moe", fp8_blocks)):
        with tiny_models.groups_of_32():
            write(tiny_models.tiny_model(architecture), folder / method)
        made.append([method, BY_NAME, folder / "dense", folder / method])
    words = [[str(folder / name), source, *map(str, given)] for name, source, *given in made]
    python(package, FORKS, json.dumps(words))
    return {name: json.loads((folder / f"{name}.output").read_text()) for name, *_ in made}, folder


@pytest.mark.slow("imports transformers in a new process")
def test_a_program_that_does_not_use_the_package(programs):
    """It imports one module of ours, for under 3 % of the time, and no class of transformers is changed.

    Nor are they where the package is imported, before it makes a model.
    """
    own, share, changed, named, dtypes, kept, switch = programs[0]["unused"]
    assert own == ["torch_moe_mps_autoload"] and share < 0.03 and changed == []
    assert named and dtypes == ["torch.float32"] and kept and switch is None


def test_script_that_knows_nothing_of_the_package(programs, checkpoint, monkeypatch):
    """Its model writes the right text, and runs the operators of an accelerated one."""
    monkeypatch.setattr(unmodified, "_all_run", False)  # as in the script's process
    text, called = programs[0]["script"]
    assert text == expected(checkpoint)
    model = torch_moe_mps.from_pretrained(str(checkpoint))
    with torch.no_grad():
        assert called == operators_of(lambda: model(torch.ones(1, 1, dtype=torch.long)))
    assert called["moe_experts_quantized"] == model.config.num_hidden_layers


@pytest.mark.parametrize("method", ["mxfp4", "fp8"])
def test_program_that_names_the_package_and_never_imports_it(programs, method, monkeypatch):
    """Its tokens are eager's, by the operators; a packed checkpoint stays packed."""
    eager, imported, ours, called, kept, logits = programs[0][method]
    packed = programs[1] / method
    assert ours == eager and len(eager[0]) == 16 and not imported
    assert {"moe_experts", "attention"} <= {*called}
    monkeypatch.setattr(torch_moe_mps_autoload, "_has_apple_gpu", lambda: False)
    dense = transformers.AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32)
    stored = load_file(packed / "model.safetensors")
    codes = [t for n, t in stored.items() if n.endswith("_blocks") or t.dtype == torch.float8_e4m3fn]
    assert kept == [["torch.int32"], sum(t.nbytes for t in codes)]  # transformers alone makes dense weights
    with torch.no_grad():
        expected = dense(torch.tensor([[5, 9, 3, 7]])).logits
    assert_close(torch.tensor(logits).view_as(expected), expected, 1e-5 if method == "mxfp4" else 0.05)


@pytest.mark.sweep
def test_switched_off(package):
    """Then the package registers when it is imported."""
    source = """
        import sys
        import torch
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
        print("torch_moe_mps" in sys.modules, "moe_mps" in ALL_EXPERTS_FUNCTIONS)
        import torch_moe_mps.transformers
        print("moe_mps" in ALL_EXPERTS_FUNCTIONS, "moe_mps" in AUTO_QUANTIZER_MAPPING)
    """
    assert python(package, source, MOE_MPS_AUTOLOAD="0").split() == ["False", "False", "True", "True"]


EXTENDED = {"extended.one": "register_one", "extended.two": "register_two"}


@pytest.fixture
def finder(tmp_path, monkeypatch):
    """Makes finders that wait for the modules extended.one and extended.two, and note which were imported."""
    noted = []
    monkeypatch.setattr(torch_moe_mps_autoload, "_call", lambda _, module: noted.append(module.__name__))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "extended").mkdir()
    for name in ("__init__", "one", "two", "three"):
        (tmp_path / "extended" / f"{name}.py").write_text(f"VALUE = '{name}'\n")
    before = list(sys.meta_path)

    def make():
        finder = torch_moe_mps_autoload._Finder()
        finder.noted = noted
        return finder

    yield make
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "extended"]:
        del sys.modules[name]


def test_modules_are_extended_after_their_import(finder):
    waiting = finder()
    waiting.wait_for(EXTENDED)
    assert importlib.util.find_spec("extended.one") and not waiting.noted  # a question is no import
    for name in ("extended.three", "extended.two", "extended.one"):
        importlib.import_module(name)
    assert waiting.noted == ["extended.two", "extended.one"]
    module = sys.modules["extended.one"]
    assert module.VALUE == "one" and module.__loader__ is module.__spec__.loader
    assert not isinstance(module.__loader__, torch_moe_mps_autoload._Loader)


def test_two_finders_end(finder):
    """Each asks all others."""
    first, second = finder(), finder()
    first.wait_for(EXTENDED)
    second.wait_for(EXTENDED)
    importlib.import_module("extended.one")
    assert first.noted == ["extended.one", "extended.one"]


def test_module_in_the_middle_of_its_import(finder, tmp_path, monkeypatch):
    """It imports torch, which installs the finder: it is extended when it is complete, by the next import."""
    waiting = finder()
    monkeypatch.setattr(torch_moe_mps_autoload, "late", lambda: waiting.wait_for(EXTENDED), raising=False)
    source = "import torch_moe_mps_autoload\ntorch_moe_mps_autoload.late()\nimport extended.three\n"
    (tmp_path / "extended" / "one.py").write_text(source)
    importlib.import_module("extended.one")
    assert waiting.missed == ["extended.one"] and not waiting.noted
    importlib.import_module("extended.two")
    assert sorted(waiting.noted) == ["extended.one", "extended.two"] and not waiting.missed


def test_module_whose_import_fails(finder, tmp_path, monkeypatch):
    waiting = finder()
    waiting.wait_for(EXTENDED)
    path = tmp_path / "extended" / "one.py"
    path.write_text("raise ImportError('not yet')\n")
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module("extended.one")
    assert not waiting.noted
    path.write_text("VALUE = 'a second attempt'\n")  # of another length: Python compares no more than that
    importlib.invalidate_caches()
    importlib.import_module("extended.one")
    assert waiting.noted == ["extended.one"]


@pytest.mark.parametrize("ending", ["", "raise ImportError('no such chip')\n"], ids=["", "failing"])
def test_nothing_is_called_inside_of_an_import_of_the_package(finder, tmp_path, monkeypatch, ending):
    """A module that imports a library is complete, or has failed, when the library is extended."""
    monkeypatch.setattr(torch_moe_mps_autoload, "_PACKAGE", "extending")
    waiting = finder()
    waiting.wait_for(EXTENDED)
    (tmp_path / "extending").mkdir()
    (tmp_path / "extending" / "__init__.py").touch()
    inner = "import extended.one, extended.two\nSEEN = list(sys.noted)\n"
    (tmp_path / "extending" / "inner.py").write_text(f"import sys\n{inner}")
    (tmp_path / "extending" / "outer.py").write_text(f"import sys\nimport extending.inner\n{inner}{ending}")
    monkeypatch.setattr(sys, "noted", waiting.noted, raising=False)
    try:
        with pytest.raises(ImportError, match="no such chip") if ending else contextlib.nullcontext():
            assert importlib.import_module("extending.outer").SEEN == []
        assert sys.modules["extending.inner"].SEEN == []
        assert waiting.noted == ["extended.one", "extended.two"]
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "extending"]:
            del sys.modules[name]


def test_module_run_as_a_program(finder, tmp_path):
    """`python -m` asks the loader of a module for its code."""
    waiting = finder()
    waiting.wait_for(EXTENDED)
    (tmp_path / "extended" / "one.py").write_text("VALUE = __name__\n")
    assert runpy.run_module("extended.one", run_name="as a program")["VALUE"] == "as a program"


def answers(address: str) -> bool:
    try:
        return urllib.request.urlopen(address).status == 200
    except OSError:
        return False


# Its cache would take a large part of the memory.
BATCHING = ("--continuous-batching", "--cb-num-blocks", "16", "--cb-max-batch-tokens", "64")


@contextlib.contextmanager
def server(package: Path, checkpoint: Path, *options: str) -> Iterator[openai.OpenAI]:
    """A client of `transformers serve CHECKPOINT` with the installed package."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    line = [Path(sys.executable).parent / "transformers", "serve", checkpoint, "--port", port, *options]
    output = package.parent / f"server-{port}.txt"
    with output.open("w") as log:
        process = subprocess.Popen(
            list(map(str, line)), stdout=log, stderr=log, env=installed.environment(package), cwd=package
        )
    try:
        deadline = time.monotonic() + 300
        while not answers(f"http://localhost:{port}/health"):
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.2)
        yield openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0)
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [(), BATCHING], ids=["", "batching"])
def test_serve(package, checkpoint, options):
    with server(package, checkpoint, *options) as client:
        question = {"role": "user", "content": PROMPT}
        stream = client.chat.completions.create(
            model=str(checkpoint), messages=[question], max_tokens=NEW_TOKENS, stream=True
        )
        parts = [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
    # transformers repeats a prompt without special tokens, and keeps back bytes that are no character yet.
    assert expected(checkpoint).strip("\ufffd") in "".join(part for part in parts if part)
    assert len(parts) > 2
