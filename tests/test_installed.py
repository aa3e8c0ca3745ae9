"""The installed package in a process: never imported, imported alone, and in front of plain transformers."""

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from support import gguf_files, installed, ours, tiny_models
from support.checkpoints import mxfp4_blocks
from support.installed import python
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import torch_moe_mps

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


# Models of plain transformers, dense, of a GGUF file and in MXFP4, and the package beside it. Prints what of
# the package is in the process: modules, finders, and names in modules and classes of other libraries.
NEVER_IMPORTED = """
import importlib.metadata, json, sys, types
finders = [*sys.meta_path]
import torch
from transformers import AutoModelForCausalLM
import transformers.integrations.moe, transformers.quantizers.auto

folder = sys.argv[1]
written = [
    AutoModelForCausalLM.from_pretrained(f"{folder}/dense"),
    AutoModelForCausalLM.from_pretrained(f"{folder}/dense", gguf_file="model.gguf"),
    AutoModelForCausalLM.from_pretrained(f"{folder}/mxfp4", dtype=torch.float32),
]
dtypes = sorted({str(parameter.dtype) for model in written for parameter in model.parameters()})

def is_ours(value):
    if not isinstance(value, (type, types.FunctionType, types.MethodType)):
        value = type(value)
    code = getattr(value, "__code__", None)
    file = getattr(code, "co_filename", "")
    return str(value.__module__).startswith("torch_moe_mps") or is_file_of_ours(file)

holders = {id(m): m for m in [*sys.modules.values()]}
holders |= {id(c): c for m in [*holders.values()] for c in [*vars(m).values()] if isinstance(c, type)}
names = [str(h) + "." + n for h in holders.values() for n, v in [*vars(h).items()] if is_ours(v)]
registries = [transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS, transformers.AttentionInterface()]
registries += [transformers.AttentionMaskInterface(), transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING]
modules = [name for name in sys.modules if name.startswith("torch_moe_mps")]
present = importlib.metadata.distribution("torch-moe-mps")
started = [entry.name for entry in present.entry_points if entry.group != "console_scripts"]
changed = [str(f) for f in sys.meta_path if f not in finders and "torch_moe_mps" in str(type(f))]
registered = ["moe_mps" in each for each in registries]
print(json.dumps([modules, changed, names, registered, started, dtypes]), flush=True)
"""


@pytest.fixture(scope="module")
def printed(package, checkpoint, tmp_path_factory) -> list:
    """What one process finds before it imports the package, and behind that."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("plain")
    tiny_models.tiny_model("llama").save_pretrained(folder / "dense")
    architecture, keys, matrices, _ = gguf_files.of_architecture("llama", "q4_0")
    gguf_files.write(folder / "dense" / "model.gguf", architecture, keys, matrices)
    with tiny_models.groups_of_32():
        mxfp4_blocks(tiny_models.tiny_model("gpt_oss"), folder / "mxfp4")
    source = Path(ours.__file__).read_text() + NEVER_IMPORTED + SCRIPT
    text = python(package, source, folder, checkpoint, PROMPT, NEW_TOKENS)
    return [json.loads(line) for line in text.splitlines() if line.startswith("[")]


@pytest.mark.slow("imports transformers in a new process")
def test_a_process_that_never_imports_the_package(printed):
    """Nothing of it is there: no module, no finder, no changed name, no entry point of another library."""
    assert printed[0] == [[], [], [], [False] * 4, [], ["torch.float32"]]


def test_the_import_needs_torch_and_numpy_alone(package):
    """It registers the operators. Any other library that it would import is missing here."""
    source = """
        import sys
        import numpy, torch

        class Missing:
            def find_spec(self, name, path=None, target=None):
                own = ("numpy", "torch", "torch_moe_mps")
                if name.partition(".")[0] not in (*own, *sys.stdlib_module_names):
                    raise ModuleNotFoundError(f"{name} is not installed", name=name)

        sys.meta_path.insert(0, Missing())
        before = {name.partition(".")[0] for name in sys.modules}
        import torch_moe_mps
        weight = torch.ones(8)
        print(torch.ops.moe_mps.rms_norm(torch.full((1, 8), 2.0), weight, norm_eps=0.0).tolist()[0][0])
        others = {name.partition(".")[0] for name in sys.modules} - before - {*sys.stdlib_module_names}
        print(*others)
    """
    assert python(package, source).split() == ["1.0", "torch_moe_mps"]


# Goes on with a checkpoint of the package: plain transformers refuses it, and says why in one line.
SCRIPT = """
import warnings
before = {*sys.modules}
with warnings.catch_warnings():
    warnings.filterwarnings("error", message="torch_moe_mps")
    import torch_moe_mps
    assert {*torch_moe_mps.__all__} <= {*dir(torch_moe_mps)}  # before their first use
    assert str(sys.modules["torch"].ops.moe_mps.rms_norm) == "moe_mps.rms_norm"
    assert "rms_norm" in torch_moe_mps.ops.OPERATORS
    import torch_moe_mps.transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer
import torch

class Called(TorchDispatchMode):
    names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
registries = [AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING, ALL_EXPERTS_FUNCTIONS]
registries += [AttentionInterface(), AttentionMaskInterface()]
registered = [each["moe_mps"].__module__ for each in registries]
others = [name for name in ("peft", "trl") if name in sys.modules and name not in before]
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[2])
except ValueError as error:
    refused = str(error)
model = torch_moe_mps.from_pretrained(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
ids = tokenizer(sys.argv[3], return_tensors="pt")["input_ids"]
text = tokenizer.decode(model.generate(ids, max_new_tokens=int(sys.argv[4]))[0, ids.shape[1] :])
with torch.no_grad(), Called() as called:
    model(ids[:, :1])

import peft  # behind the model
adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
trained = sorted({name.split(".")[-4] for name, p in adapted.named_parameters() if p.requires_grad})
print(json.dumps([others, registered, refused, text, sorted(called.names), trained]))
"""


def test_a_script_that_imports_the_package(printed, checkpoint):
    """The import registers operators alone, its part for transformers a quantizer and implementations.

    The model writes the right text by the operators; PEFT, imported behind it, finds quantised layers.
    """
    others, registered, refused, text, called, trained = printed[1]
    assert registered == [
        "torch_moe_mps.checkpoints.quantizer",
        "torch_moe_mps.checkpoints.own.config",
        "torch_moe_mps.models.modules.experts",
        "torch_moe_mps.models.attention.attention",
        "torch_moe_mps.models.attention.attention",
    ]
    assert others == [] and "has no `quant_method`" in refused and len(refused.splitlines()) == 1
    assert text == (checkpoint / "expected.txt").read_text()
    assert "moe_mps._moe_experts_quantized.default" in called
    assert {"q_proj", "o_proj"} <= {*trained}
