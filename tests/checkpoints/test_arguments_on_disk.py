"""Arguments of `from_pretrained` for experts on the disk: what finds, names and casts the weights."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support.experts_on_disk import same
from support.models import prompt, tiny
from transformers import BitsAndBytesConfig, Qwen3MoeModel

from torch_moe_mps import from_pretrained
from torch_moe_mps.checkpoints import on_disk
from torch_moe_mps.models.modules.experts_on_disk import expert_pools

BITS = {"bits": 4, "group_size": 32}
WEIGHTS = "model.safetensors"


def write(folder: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
    tiny("qwen3_moe", dtype=dtype, seed=seed).save_pretrained(folder)


@pytest.fixture(autouse=True)
def _few_slots(monkeypatch):
    monkeypatch.setattr(on_disk, "slots_in", lambda layers, memory: 3)


def files_in(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob(f"*{on_disk.NAME}")}


def logits(name: Path | str, **options) -> torch.Tensor:
    with torch.no_grad():
        return from_pretrained(str(name), **options)(prompt()).logits


def check(name: Path | str, **options) -> None:
    """The model whose experts are on the disk is the resident one of the same arguments."""
    assert same(logits(name, experts_memory="1GB", **options), logits(name, **options))


@pytest.mark.slow("loads six models")
def test_two_checkpoints_of_a_folder(tmp_path):
    """One in a subfolder, one as a variant: each has its own file of experts."""
    write(tmp_path)
    write(tmp_path / "inner", seed=1)
    write(tmp_path / "other", seed=2)
    shutil.move(tmp_path / "other" / WEIGHTS, tmp_path / "model.fp16.safetensors")
    for arguments in ({"subfolder": "inner"}, {"variant": "fp16"}, {}):
        check(tmp_path, **arguments)
    assert files_in(tmp_path) == {on_disk.NAME, f"inner/{on_disk.NAME}", f"fp16.{on_disk.NAME}"}


@pytest.mark.slow("loads two models")
def test_a_subfolder_of_the_hub(tmp_path):
    repository = tmp_path / "models--org--name"
    write(repository / "snapshots" / ("c" * 40) / "inner")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c" * 40)
    check("org/name", subfolder="inner", cache_dir=str(tmp_path), local_files_only=True)
    assert Path(*files_in(tmp_path)).parts[-2:] == ("inner", on_disk.NAME)


@pytest.mark.slow("loads eight models")
def test_dtypes(tmp_path):
    """By either name, and where neither the config nor the caller has one."""
    write(tmp_path)
    for name in ("torch_dtype", "dtype"):
        check(tmp_path, **{name: torch.float32})
    (tmp_path / on_disk.NAME).unlink()
    check(tmp_path, torch_dtype="float16", dtype="bfloat16")
    write(tmp_path / "unnamed", dtype=torch.float32)
    config = tmp_path / "unnamed" / "config.json"
    about = json.loads(config.read_text())
    del about["dtype"]
    config.write_text(json.dumps(about))
    assert logits(tmp_path / "unnamed").dtype == torch.float32
    check(tmp_path / "unnamed")


@pytest.mark.slow("loads four models")
@pytest.mark.parametrize("stored", ["experts one by one", "stacks"])
def test_names_that_the_caller_maps(tmp_path, stored):
    """The experts of a wrong layer would be taken by their names in the file."""
    if stored == "stacks":
        tiny("gpt_oss", dtype=torch.bfloat16).save_pretrained(tmp_path)
    else:
        write(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / WEIGHTS)
    turned = {"model.layers.0.": "model.layers.1.", "model.layers.1.": "model.layers.0."}

    def renamed(name: str) -> str:
        return name.replace(name[:15], turned.get(name[:15], name[:15])).replace("model.", "saved.", 1)

    mapped = {renamed(name): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(mapped, tmp_path / WEIGHTS, metadata={"format": "pt"})
    plain = {r"^saved\.": "model."}
    crossed = {
        r"^saved\.layers\.0\.": "model.layers.1.",
        r"^saved\.layers\.1\.": "model.layers.0.",
        r"^saved\.(?!layers)": "model.",
    }
    check(tmp_path, key_mapping=plain)
    if stored == "stacks":
        check(tmp_path, key_mapping=crossed)
        assert not files_in(tmp_path)
        return
    with pytest.raises(ValueError, match="has the experts of another checkpoint or format: remove it"):
        from_pretrained(str(tmp_path), experts_memory="1GB", key_mapping=crossed)
    (tmp_path / on_disk.NAME).unlink()
    check(tmp_path, key_mapping=crossed)


@pytest.mark.slow("loads three models")
def test_classes_of_a_checkpoint_have_one_file(tmp_path, monkeypatch):
    write(tmp_path)
    ids, options = prompt(), {"model_class": Qwen3MoeModel, **BITS}
    model = from_pretrained(str(tmp_path), experts_memory="1GB", **options)
    with torch.no_grad():
        expected = from_pretrained(str(tmp_path), **options)(ids).last_hidden_state
        assert same(model(ids).last_hidden_state, expected)
    monkeypatch.setattr(on_disk, "written", None)
    check(tmp_path, **BITS)
    layers = expert_pools(from_pretrained(str(tmp_path), experts_memory="1GB", **BITS)).layers
    assert [pool.about.name for pool in layers] == [f"model.layers.{n}.mlp.experts" for n in range(2)]


REFUSED = {
    "max_memory": {0: "1GB"},
    "offload_folder": "somewhere",
    "state_dict": {},
    "dtype": {"": torch.float32},
    "ignore_mismatched_sizes": True,
    "use_safetensors": False,
    "quantization_config": BitsAndBytesConfig(load_in_8bit=True),
    "tp_plan": "auto",
    "adapter_kwargs": {"subfolder": "adapter"},
    "use_kernels": True,
    "no_such_argument": 3,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path, name):
    """In one line that names it, before anything is read or written."""
    write(tmp_path)
    with pytest.raises(
        ValueError, match=rf"from_pretrained: {name} must be .*leave out {name} or exp"
    ) as error:
        from_pretrained(str(tmp_path), experts_memory="1GB", **{name: REFUSED[name]})
    assert "\n" not in str(error.value) and not files_in(tmp_path)


def test_experts_on_several_devices_are_refused(tmp_path):
    write(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.layers": "mps", "model.norm": "mps", "lm_head": "cpu"}
    with pytest.raises(ValueError, match=r"device_map must be one device .*, got cpu and mps$"):
        from_pretrained(str(tmp_path), experts_memory="1GB", device_map=places)
