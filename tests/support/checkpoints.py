"""Checkpoints for tests, in the layouts that are found on the Hub."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from torch_moe_mps.commands.perplexity import SAMPLE
from torch_moe_mps.quantization import quantize


@contextlib.contextmanager
def changed(file: Path) -> Iterator[dict]:
    """What a file has, of JSON or of tensors, to be changed within `with`."""
    is_json = file.suffix == ".json"
    content = json.loads(file.read_text()) if is_json else load_file(file)
    yield content
    if is_json:
        file.write_text(json.dumps(content))
    else:
        save_file({name: t.contiguous() for name, t in content.items()}, file, metadata={"format": "pt"})


def drop_zero_experts(file: Path, experts: int) -> None:
    """Drops matrices for ids beyond the experts, which transformers writes and LongCat's makers do not."""
    with changed(file) as tensors:
        for name in [*tensors]:
            number = re.search(r"\.experts\.(\d+)\.", name)
            if number is not None and int(number[1]) >= experts:
                del tensors[name]


def fp8_blocks(model, folder: Path, block: int = 32) -> None:
    """A checkpoint with the matrices in FP8, one scale for a square block, and experts one by one."""
    model.save_pretrained(folder)
    with changed(folder / "model.safetensors") as tensors:
        for name in [n for n in tensors if n.endswith("_proj.weight")]:
            weight = tensors[name].float()
            rows, columns = weight.shape
            blocks = weight.view(rows // block, block, columns // block, block)
            scale = blocks.abs().amax((1, 3)) / 448
            codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            tensors[name] = codes.view(rows, columns)
            tensors[f"{name}_scale_inv"] = scale
    with changed(folder / "config.json") as config:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [block, block],
            "activation_scheme": "dynamic",
        }


def mxfp4_blocks(model, folder: Path) -> None:
    """A checkpoint with blocks and scales, as gpt-oss has them."""
    model.save_pretrained(folder)
    with changed(folder / "model.safetensors") as tensors:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            packed, scales, _ = quantize(tensors.pop(name).mT.contiguous(), 4, 32, "mxfp4")
            tensors[f"{name}_blocks"] = packed.view(torch.uint8).reshape(*scales.shape, 16)
            tensors[f"{name}_scales"] = scales
    with changed(folder / "config.json") as config:
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def add_tokenizer(folder: Path) -> None:
    """A tokenizer of the characters of the sample text."""
    tokenizer_of([*sorted(set(SAMPLE.read_text())), "??"], unk_token="??").save_pretrained(folder)


LETTERS = [*map(chr, range(97, 123)), "?"]


def tokenizer_of(tokens: list[str], **settings: object) -> transformers.PreTrainedTokenizerFast:
    """One whose tokens are single characters, in this order, and others by the `settings`."""
    words = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=settings.get("unk_token", "?")))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
