"""Models whose experts are read from the disk: they are the resident models, bit for bit."""

import copy
import pickle
import re
import shutil
from pathlib import Path

import accelerate as hf_accelerate
import peft
import pytest
import safetensors.torch
import torch
from support import gguf_files, mlx_models, processes, published
from support.checkpoints import fp8_blocks, mxfp4_blocks
from support.experts_on_disk import same
from support.models import generate, prompt, same_answers, tiny
from support.sweep import in_sweep

from torch_moe_mps import accelerate, collect_importance, from_pretrained
from torch_moe_mps._limits import LARGEST_CHUNK
from torch_moe_mps._text import bytes_in
from torch_moe_mps.checkpoints import on_disk
from torch_moe_mps.checkpoints.quantize import sizes
from torch_moe_mps.checkpoints.quantize.sizes import prompt_bytes, total_bytes
from torch_moe_mps.checkpoints.source import Source
from torch_moe_mps.disk.file import ExpertsFile
from torch_moe_mps.disk.pool import least_memory
from torch_moe_mps.disk.stored import StoredExperts
from torch_moe_mps.models.basics.interface import experts_of, on_disk_of
from torch_moe_mps.models.caches.prompt_cache import fingerprint
from torch_moe_mps.models.modules.experts_on_disk import expert_pools
from torch_moe_mps.quantization import Format
from torch_moe_mps.selfcheck import machine

BITS = {"bits": 4, "group_size": 32}


def in_safetensors(architecture: str, **overrides):
    def write(folder: Path) -> str:
        tiny(architecture, dtype=torch.bfloat16, **overrides).save_pretrained(folder)
        return str(folder)

    return write


def of_gguf(architecture: str, *kinds: str, up: str | None = None):
    def write(folder: Path) -> str:
        folder.mkdir()
        return str(gguf_files.write_file(folder / "model.gguf", architecture, kinds, up=up))

    return write


def of_mlx(folder: Path) -> str:
    folder.mkdir()
    mlx_models.write(mlx_models.tiny("qwen3_moe"), folder, 4)
    return str(folder / "mlx")


def of_mxfp4(folder: Path) -> str:
    mxfp4_blocks(tiny("gpt_oss", dtype=torch.bfloat16), folder)
    return str(folder)


def of_fp8(folder: Path) -> str:
    fp8_blocks(tiny("qwen3_moe", dtype=torch.bfloat16, hidden_size=64, moe_intermediate_size=64), folder)
    return str(folder)


def as_published(architecture: str):
    def write(folder: Path) -> str:
        published.write(architecture, folder, torch.bfloat16)
        return str(folder)

    return write


def of_ours(folder: Path) -> str:
    model = from_pretrained(in_safetensors("qwen3_moe")(folder / "dense"), **BITS)
    model.save_pretrained(folder / "ours")
    return str(folder / "ours")


CHECKPOINTS = {
    "dense": (in_safetensors("qwen3_moe"), {}),
    "while read": (in_safetensors("deepseek_v3", num_hidden_layers=3), BITS),
    "with biases": (in_safetensors("gpt_oss"), {"bits": 8, "group_size": 32}),
    "ours": (of_ours, {}),
    "stacked": (in_safetensors("gpt_oss"), {}),
    "ours in another dtype": (of_ours, {"dtype": torch.float16}),
    "mlx": (of_mlx, {}),
    "gguf": (of_gguf("qwen3moe", "q4_k", "q6_k", "q5_k", up="q5_k"), {"device_map": "cpu"}),
    "gguf with biases": (of_gguf("gpt-oss", "mxfp4", "mxfp4", "q8_0"), {"device_map": "cpu"}),
    "gguf in 32 bits": (
        of_gguf("qwen3moe", "f32", "f32", "f32"),
        {"dtype": torch.bfloat16, "device_map": "cpu"},
    ),
    "gguf, quantised again": (of_gguf("qwen3moe", "q8_0", "q8_0", "q8_0"), BITS),
    "mxfp4": (of_mxfp4, {}),
    "fp8": (of_fp8, {}),
    "step3p7": (as_published("step3p7"), {}),
    "llama4": (as_published("llama4"), BITS),
    "longcat_flash": (as_published("longcat_flash"), BITS),
    "longcat_flash of transformers": (in_safetensors("longcat_flash"), {"dtype": torch.float32}),
    "dbrx": (as_published("dbrx"), BITS),
    "jetmoe": (as_published("jetmoe"), BITS),
    "jetmoe, dense": (as_published("jetmoe"), {}),
}


@pytest.fixture
def few_slots(monkeypatch):
    """The slots of a token's experts and one more, in memory that would hold the small model as a whole."""
    monkeypatch.setattr(on_disk, "slots_in", lambda layers, memory: 3)


@pytest.mark.slow("loads two models")
@pytest.mark.parametrize(
    "name",
    in_sweep(
        [*CHECKPOINTS],
        [
            "fp8",
            "mxfp4",
            "with biases",
            "ours in another dtype",
            "longcat_flash",
            "longcat_flash of transformers",
            "gguf with biases",
            "gguf in 32 bits",
            "gguf, quantised again",
        ],
    ),
)
def test_the_resident_model(name, tmp_path, few_slots):
    write, options = CHECKPOINTS[name]
    if name == "mlx":
        pytest.importorskip("mlx_lm")
    path = write(tmp_path / "model")
    model = from_pretrained(path, experts_memory="1GB", **options)
    own_files = name in ("ours", "mxfp4", "stacked", "ours in another dtype", "jetmoe, dense")
    own_files |= name in ("gguf", "gguf with biases", "gguf in 32 bits")
    assert isinstance(expert_pools(model).layers[0].reader.file, StoredExperts) == own_files
    assert own_files == (not [*tmp_path.rglob(f"*{on_disk.NAME}")])
    with torch.no_grad():
        same_answers(from_pretrained(path, **options), model)
    counters, layers = expert_pools(model).counters, len(experts_of(model))
    assert all(
        len(experts.down_proj) == 3 for experts in experts_of(model).values() if hasattr(experts, "down_proj")
    )
    reads = 3 if "jetmoe" in name else 2  # attention's experts are read before and behind it
    assert (
        counters.layers == reads * layers and counters.hits + counters.misses >= 3 * layers
    )  # of the two for a token, ids may mean no expert
    assert counters.misses > 0 and counters.bytes_read > 0


def load(folder: Path, **options):
    return from_pretrained(str(folder), **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of 6 layers, whose experts are written."""
    folder = tmp_path_factory.mktemp("six") / "model"
    in_safetensors("qwen3_moe", num_hidden_layers=6)(folder)
    source = Source(str(folder), {})
    model = on_disk.placed(source, None)
    on_disk.experts_file(source, None, model, on_disk.layers_of(model))
    return folder


@pytest.fixture(scope="module")
def memory(folder):
    """Bytes of three slots a layer."""
    return least_memory(ExpertsFile(folder / on_disk.NAME).layers, 3)


def whole(folder: Path) -> int:
    """Bytes of all experts."""
    return least_memory(ExpertsFile(folder / on_disk.NAME).layers, 8)


def test_a_memory_that_holds_all_is_the_resident_model(folder, tmp_path, monkeypatch):
    """No pool, no file, nothing that the host is asked for, and nothing that is refused."""
    monkeypatch.setattr(on_disk, "written", None)
    in_safetensors("qwen3_moe", num_hidden_layers=6)(tmp_path)
    model = load(tmp_path, experts_memory=whole(folder))
    assert (
        expert_pools(model) is None
        and expert_pools(load(folder, experts_memory=whole(folder) - 1)) is not None
    )
    copy.deepcopy(model)


@pytest.fixture
def limited(folder, monkeypatch):
    """Sets the memory for models to what the model needs and some more bytes."""
    model = on_disk.placed(Source(str(folder), {}), None)
    needed = prompt_bytes(model, LARGEST_CHUNK) + total_bytes(model)
    monkeypatch.setattr(sizes, "_BESIDE", 0)
    return lambda more: monkeypatch.setattr(on_disk, "memory_for_models", lambda on_gpu: needed + more)


@pytest.mark.slow("loads three models")
def test_auto(folder, limited, capsys):
    """Experts are on the disk where the model is larger than memory by a byte."""
    limited(0)
    resident = load(folder, experts_memory="auto")
    assert expert_pools(resident) is None
    assert "experts_memory auto: all experts are in memory: 0.00 GB of weights" in capsys.readouterr().err
    limited(-1)
    model = load(folder, experts_memory="auto")
    assert {pool.size for pool in expert_pools(model).layers} == {5}
    said = capsys.readouterr().err
    assert (
        said.count("torch_moe_mps: ") == 1 and "GB of experts are in memory, the others on the disk: " in said
    )
    with torch.no_grad():
        same_answers(resident, model, 1)


@pytest.mark.parametrize(
    ("experts", "room", "least", "expected"),
    [
        (400, 90, 5, 45),  # GLM-5.2 on 128 GB: 35 GB were fastest, 75 lost 70 % (mlx-lm's users)
        (125, 42, 5, 21),  # Qwen3-235B-A22B on 64 GB
        (60, 46, 5, 32),  # gpt-oss-120b on 64 GB: 28 are on the disk, for half of which 14 are left
        (60, 40, 5, 20),
        (60, 60, 5, 60),
        (60, 12, 8, 8),  # a token's experts
        (60, 7, 8, 7),
    ],
)
def test_what_auto_leaves_to_the_page_cache(experts, room, least, expected, tmp_path, monkeypatch):
    """In GB. Nothing where reads past it were faster."""
    monkeypatch.setattr(machine, "cache_file", lambda: tmp_path / "measured.json")
    asked = experts * 10**9, room * 10**9, least * 10**9
    assert sizes.memory_for_slots(*asked) == expected * 10**9
    machine.remember_faster(machine.NO_CACHE, True)
    assert sizes.memory_for_slots(*asked) == room * 10**9


def test_auto_where_experts_cannot_be_on_the_disk(folder, tmp_path, limited, capsys):
    def is_resident(why: str, path: Path = folder) -> None:
        capsys.readouterr()
        assert on_disk.planned(Source(str(path), {}), None, "auto") is None
        assert why in (said := capsys.readouterr().err) and said.count("\n") == 1

    in_safetensors("llama")(tmp_path / "llama")
    limited(-1)
    is_resident("LlamaForCausalLM has no experts", tmp_path / "llama")
    limited(-whole(folder))
    is_resident("as the disk would need 0.000688 GB, for a token's 2 experts, beside the rest")
    limited(-1)


def test_what_is_refused(folder, tmp_path, monkeypatch):
    for memory in ("20 geese", "", 0, -1, True, "0GB", "9" * 400):
        with pytest.raises(
            ValueError, match='experts_memory must be bytes, a text such as "20GB", or "auto", got'
        ):
            load(folder, experts_memory=memory)
    assert on_disk.planned(Source(str(folder), {}), None, 10**5000) is None
    for place in ("meta", {"": torch.device("meta")}):
        with pytest.raises(ValueError, match=r"device_map must be a device with memory .*, got meta$"):
            load(folder, experts_memory=whole(folder) - 1, device_map=place)
    with pytest.raises(
        ValueError, match=r"experts_memory must be at least .* GB, for a token's 2 experts, got 1e-05 GB"
    ):
        load(folder, experts_memory=10_000)
    with pytest.raises(
        ValueError,
        match=r"importance must be None where experts are on the disk, got .*: leave out importance or",
    ):
        load(folder, experts_memory="1GB", importance="auto", **BITS)
    with pytest.raises(
        ValueError, match=r"experts\.moe_mps has the experts of another checkpoint or format: remove it"
    ):
        load(folder, experts_memory=3 * whole(folder) // 10, **BITS)
    with pytest.raises(ValueError, match="distributed_config must be None where experts are on the disk"):
        load(folder, experts_memory="1GB", part=lambda source, alike: None)
    in_safetensors("llama")(tmp_path / "llama")
    with pytest.raises(
        ValueError, match="experts_memory is for a model whose experts have transformers' interface"
    ):
        load(tmp_path / "llama", experts_memory="1GB")


def test_more_memory_than_the_gpu_has(folder, memory, monkeypatch):
    """The memory that is taken counts, beside the other weights, on the GPU alone."""
    model = on_disk.placed(Source(str(folder), {}), None)
    others = sum(p.nbytes for name, p in model.named_parameters() if ".experts." not in name)
    for asked, taken in ((memory, memory), (10**12, whole(folder))):
        for device, limit, fits in (
            ("mps", taken + others, True),
            ("mps", taken + others - 1, False),
            ("cpu", taken + others - 1, True),
        ):
            monkeypatch.setattr(on_disk, "memory_for_models", lambda on_gpu, limit=limit: limit)
            source = Source(str(folder), {"device_map": device})
            if fits:
                assert (on_disk.planned(source, None, asked) is None) == (asked > memory)
                continue
            expected = (
                rf"experts_memory must be at most {(limit - others) / 1e9:.3g} GB, as the GPU may have "
            )
            with pytest.raises(
                ValueError, match=expected + rf".*, got {re.escape(f'{asked / 1e9:.3g}')} GB$"
            ) as error:
                on_disk.planned(source, None, asked)
            assert "\n" not in str(error.value)


@pytest.mark.slow("loads a model eight times")
def test_the_file_is_of_the_experts_formats(tmp_path, few_slots, monkeypatch):
    """Other ways to ask for the same formats of experts, and copies of the checkpoint, have the same file."""
    in_safetensors("qwen3_moe")(tmp_path / "model")
    load(tmp_path / "model", experts_memory="1GB", **BITS)
    monkeypatch.setattr(on_disk, "written", None)
    folder = shutil.copytree(tmp_path / "model", tmp_path / "copy")
    same_files = (
        {"bits": 4, "group_size": 32, "mode": "affine"},
        {**BITS, "keep": {"lm_head", "embed_tokens"}},
        {**BITS, "overrides": {"*.q_proj": Format(8, 32), "*.experts.*": {"bits": 4}}},
        {"bits": 8, "group_size": 32, "linear_bits": None, "overrides": {"*experts*": Format(4, 32)}},
    )
    for options in same_files:
        model = load(folder, experts_memory="1GB", **options)
    with torch.no_grad():
        same_answers(load(folder, **same_files[-1]), model, 1)
    for options in ({**BITS, "overrides": {"*.experts.down_proj": Format(8, 32)}}, {"bits": 4}, {}):
        with pytest.raises(ValueError, match="has the experts of another checkpoint or format: remove it"):
            load(folder, experts_memory="1GB", **options)


@pytest.mark.slow("loads three models")
def test_an_expert_that_was_edited(tmp_path, few_slots):
    """A weight of the checkpoint that no sample would meet: its file of experts is not taken any more."""
    in_safetensors("qwen3_moe")(tmp_path)
    with torch.no_grad():
        before = load(tmp_path, experts_memory="1GB")(prompt()).logits
        file = tmp_path / "model.safetensors"
        tensors = safetensors.torch.load_file(file)
        edited = next(t for n, t in tensors.items() if n.endswith("experts.5.up_proj.weight"))
        edited.view(-1)[edited.numel() // 3 : edited.numel() // 3 + 40] = 9.0
        safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match="has the experts of another checkpoint or format: remove it"):
            load(tmp_path, experts_memory="1GB")
        (tmp_path / on_disk.NAME).unlink()
        model, resident = load(tmp_path, experts_memory="1GB"), load(tmp_path)
        assert same(resident(prompt()).logits, model(prompt()).logits)
        assert not same(before, model(prompt()).logits)


@pytest.mark.slow("loads two models")
def test_state_dicts_refuse_to_be_saved(folder, memory, tmp_path):
    """By whatever function; they have the names and shapes of the resident model's."""
    model, resident = load(folder, experts_memory=memory), load(folder)
    state = model.state_dict()
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in resident.state_dict().items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} == expected
    experts = state["model.layers.0.mlp.experts.down_proj"]
    assert repr(experts) == "Unreadable((8, 64, 64), torch.bfloat16, cpu)" and experts.device.type == "cpu"
    accelerator = hf_accelerate.Accelerator(cpu=True)
    for save in (
        lambda: torch.save(state, tmp_path / "state"),
        lambda: torch.save({"model": experts}, tmp_path / "state"),
        lambda: safetensors.torch.save_file(state, tmp_path / "file"),
        lambda: safetensors.torch.save_model(model, str(tmp_path / "model")),
        lambda: accelerator.save_model(model, str(tmp_path / "accelerator")),
        lambda: model.model.save_pretrained(tmp_path / "base"),
        lambda: copy.deepcopy(state),
        lambda: experts.clone(),
        lambda: experts.numpy(),
        lambda: torch.cat([experts, experts]),
    ):
        with pytest.raises(ValueError, match="experts is on the disk: it cannot be saved or copied"):
            save()
    assert not [*tmp_path.rglob("*.safetensors")] and not (tmp_path / "file").exists()
    with torch.no_grad():
        same_answers(resident, model, 1)


@pytest.mark.slow("loads three models, and quantises two")
def test_quantising_in_place_is_refused(folder, memory):
    """Before anything is changed; weights in memory can be quantised."""
    model = load(folder, experts_memory=memory)
    before = dict(model.named_parameters())
    with pytest.raises(
        ValueError, match=r"quantize: .*\.experts must be in memory .*, got weights on the disk$"
    ):
        accelerate(model, **BITS)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(after[name] is tensor for name, tensor in before.items())
    with torch.no_grad():
        assert same(load(folder)(prompt()).logits, model(prompt()).logits)
        accelerate(model, keep=["*experts*"], **BITS)
        resident = load(folder)
        accelerate(resident, keep=["*experts*"], **BITS)
        assert same(resident(prompt()).logits, model(prompt()).logits)


@pytest.mark.slow("loads two models")
def test_share_memory(folder, memory):
    """Moves no memory that is read into: other weights are shared."""
    model, resident = load(folder, experts_memory=memory), load(folder)
    for part in (model, model.model, model.model.layers[0].mlp.experts):
        assert part.share_memory() is part
    assert model.lm_head.weight.is_shared()
    with torch.no_grad():
        same_answers(resident, model)


@pytest.mark.slow("loads two models")
def test_what_a_model_refuses(folder, memory):
    """Copies, files and devices of a model, training: each in one line, and the model still answers."""
    model = load(folder, experts_memory=memory)
    with pytest.raises(ValueError, match="experts is on the disk: load another one for a copy"):
        copy.deepcopy(model)
    with pytest.raises(ValueError, match="experts is on the disk: it cannot be saved"):
        pickle.dumps(model)
    with pytest.raises(ValueError, match="a model whose experts are on the disk cannot be saved"):
        model.save_pretrained(folder / "saved")
    assert not (folder / "saved").exists()
    with pytest.raises(
        ValueError, match="experts is on the disk: its device and dtype are those that from_pretr"
    ):
        model.half()
    assert model.to("cpu") is model
    with pytest.raises(
        ValueError, match="experts is on the disk: training, gradients, autocast and float64 need"
    ):
        model(prompt(), labels=prompt())
    model.train()
    with torch.no_grad(), pytest.raises(ValueError, match="is on the disk: training"):
        model(prompt())
    model.eval()
    hook = model.model.layers[1].mlp.experts.act_fn.register_forward_hook(lambda *_: None)
    with torch.no_grad(), pytest.raises(ValueError, match="is on the disk: a hook on act_fn, or another for"):
        model(prompt())
    hook.remove()
    with pytest.raises(ValueError, match="is on the disk: importance needs all experts in memory"):
        collect_importance(model, torch.arange(1024) % 90, progress=False)
    for asked in ("eager", {"": "eager"}, "batched_mm"):
        with pytest.raises(
            ValueError, match=r"the experts implementation must be .moe_mps. .*, got '(eager|batched_mm)'$"
        ):
            model.set_experts_implementation(asked)
    for asked in (model.get_experts_implementation(), "moe_mps"):
        model.set_experts_implementation(asked)
    with torch.no_grad():
        same_answers(load(folder), model, 1)


def test_adapters(folder, memory, tmp_path):
    """On other layers they run and are saved; on experts they are refused, and nothing is changed."""
    model = load(folder, experts_memory=memory)
    names = [name for name, _ in model.named_parameters()]
    config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    with pytest.raises(ValueError, match="experts is on the disk: LoRA needs all experts in memory"):
        peft.get_peft_model(model, config)
    assert [name for name, _ in model.named_parameters()] == names
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with torch.no_grad():
        assert same(adapted.eval()(prompt()).logits, load(folder)(prompt()).logits)
    adapted.save_pretrained(tmp_path)
    saved = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    expected = {n: p for n, p in adapted.named_parameters() if "lora_" in n}
    assert {n.replace(".weight", ".default.weight"): t.shape for n, t in saved.items()} == {
        n: p.shape for n, p in expected.items()
    }
    assert adapted.load_adapter(tmp_path, "again").unexpected_keys == []
    again = {n.replace("default", "again"): p for n, p in expected.items()}
    assert all(torch.equal(adapted.get_parameter(n), p) for n, p in again.items())


def test_a_cached_prefix_is_of_the_file(folder, memory):
    """Whatever is in the slots, and however many there are; of another file it is another one."""
    model = load(folder, experts_memory=memory)
    before = fingerprint(model)
    with torch.no_grad():
        model(prompt())
    assert fingerprint(model) == before == fingerprint(load(folder, experts_memory=memory + 10**5))
    for experts in experts_of(model).values():
        on_disk_of(experts).key = "other"
    assert fingerprint(model) != before


@pytest.mark.slow("loads two models")
def test_an_error_of_the_disk_ends_one_call(folder, memory, simulated):
    model, resident = load(folder, experts_memory=memory), load(folder)

    def fails(*args):
        raise OSError(5, "Input/output error")

    with torch.no_grad():
        for ids in (prompt(), prompt(1, 1)):
            with simulated.reads(fails), pytest.raises(OSError, match="Input/output error"):
                model(ids)
            same_answers(resident, model, 1)


def test_a_batch_whose_tokens_need_more_than_the_slots(folder, memory):
    """The experts that its tokens need are read beside the pools, and no others."""
    model, resident = load(folder, experts_memory=memory), load(folder)
    assert expert_pools(model).layers[0].size == 3
    ids = prompt(3, 1)
    with torch.no_grad():
        assert same(resident(ids).logits, model(ids).logits)
    counters = expert_pools(model).counters
    assert counters.bytes_read < 6 * 6 * sum(expert_pools(model).layers[0].about.sizes) + 1


def test_the_file_is_written_once(folder, memory, monkeypatch):
    """And has each format of a model's experts. A start with it does not look for them elsewhere."""
    monkeypatch.setattr(on_disk, "written", None)
    monkeypatch.setattr(on_disk, "_stored", None)
    load(folder, experts_memory=memory)
    file = expert_pools(load(folder, experts_memory=memory)).layers[0].reader.file
    assert [layer.name for layer in file.layers] == [f"model.layers.{n}.mlp.experts" for n in range(6)]
    assert file.path == folder / on_disk.NAME and file.layers[0].transposed == ()


KILLED = """
    import os, signal, sys, warnings
    from itertools import count
    from pathlib import Path
    from torch_moe_mps import from_pretrained

    folder, step = Path(sys.argv[1]), int(sys.argv[2])
    path = folder / "experts.moe_mps"

    def load(last: float) -> bool:
        "Whether a new process loads the model; it is killed at this change of the file, which half happens."
        changes = count(1)

        def at_last(function):
            def changed(*args):
                if next(changes) >= last:
                    if function is pwrite:
                        pwrite(args[0], args[1][: len(args[1]) // 2], args[2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args)
            return changed

        process = os.fork()
        if process == 0:
            pwrite = os.pwrite
            for name in ("pwrite", "ftruncate", "fsync", "rename", "unlink"):
                setattr(os, name, at_last(getattr(os, name)))
            try:
                from_pretrained(str(folder), experts_memory=550_000, device_map="cpu")
            finally:
                os._exit(sys.exc_info()[0] is not None)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert status in (0, -signal.SIGKILL), status
        return status == 0

    assert load(float("inf"))
    expected, files = path.read_bytes(), {*os.listdir(folder)}
    for last in count(step, step):
        path.unlink()
        if load(last):
            break
        assert not path.exists() and load(float("inf"))
        assert path.read_bytes() == expected and {*os.listdir(folder)} == files, last
    print(last)
"""


@pytest.mark.slow("loads a model in new processes, as often as its file is changed")
@pytest.mark.parametrize("step", in_sweep((1, 29), (29,)))
def test_a_process_that_is_killed_while_it_writes(step, tmp_path):
    """By SIGKILL: half of a file is never taken for one, and the next process writes the same bytes."""
    in_safetensors("qwen3_moe", num_hidden_layers=3)(tmp_path / "model")  # 590 kB of experts
    assert int(processes.forked(KILLED, tmp_path / "model", step)) > 40


BOTH = """
    import fcntl, os, sys
    from support.models import generate, prompt
    from torch_moe_mps import from_pretrained
    from torch_moe_mps.disk import file

    (to_other, begins), (to_first, waits) = os.pipe(), os.pipe()
    fsync, flock, is_first = os.fsync, fcntl.flock, os.fork() > 0

    def fsync_once_the_other_waits(file):
        os.fsync = fsync
        os.write(begins, b".")
        os.read(to_first, 1)
        fsync(file)

    def waiting(file, how):
        if how == fcntl.LOCK_EX:
            os.write(waits, b".")
        flock(file, how)

    if is_first:
        os.fsync = fsync_once_the_other_waits
    else:
        file.NewFile.add = None
        fcntl.flock = waiting
        os.read(to_other, 1)
    try:
        model = from_pretrained(sys.argv[1], experts_memory=550_000, device_map="cpu")
        tokens = generate(model, prompt(1, 9), max_new_tokens=3, min_new_tokens=3)
        os.write(1, (str(tokens[0].tolist()) + chr(10)).encode())
    finally:
        if not is_first:
            os._exit(sys.exc_info()[0] is not None)
    assert os.wait()[1] == 0
"""


@pytest.mark.slow("loads a model in two new processes")
def test_two_processes_that_write_at_once(tmp_path):
    """One writes, the other waits for it, and both answer as the resident model."""
    in_safetensors("qwen3_moe", num_hidden_layers=3)(tmp_path / "model")
    resident = load(tmp_path / "model", device_map="cpu")
    expected = generate(resident, prompt(1, 9), max_new_tokens=3, min_new_tokens=3)[0].tolist()
    assert processes.forked(BOTH, tmp_path / "model").splitlines() == [str(expected)] * 2


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GB", 20 * 10**9), ("1.5 gib", 3 << 29), (7, 7), ("7", 7), ("64K", 64000), ("2T", 2 * 10**12)],
)
def test_sizes(text, size):
    assert bytes_in(str(text)) == size
