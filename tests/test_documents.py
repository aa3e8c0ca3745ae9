"""The documents name files that exist, and the version that the package has."""

import json
import re
import runpy

import pytest
import torch
from support import tiny_models
from support.checkpoints import tokenizer_of
from support.processes import REPOSITORY
from tokenizers import decoders

import torch_moe_mps
from torch_moe_mps._versions import FAILS, MACOS, MACOS_OF_TORCH, TENSOR_UNITS, TORCH, dotted
from torch_moe_mps.transformers.basics.interface import formats_of

DOCUMENTS = [
    *REPOSITORY.glob("*.md"),
    *(REPOSITORY / "docs").glob("*.md"),
    *(REPOSITORY / "tests").glob("*/README.md"),
]
# Not followed by a placeholder, as in tests/ops/test_<family>.py.
PATH = re.compile(r"\b((?:docs|scripts|tests|torch_moe_mps|csrc|shaders)/[\w./]*\w)(?![\w/<])")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_and_paths_exist(document):
    text = document.read_text()
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert "://" in link or (document.parent / link).exists(), link
    for path in PATH.findall(text):
        roots = (REPOSITORY, REPOSITORY / "torch_moe_mps")
        assert any((root / path).exists() for root in roots), path


def test_changelog_begins_with_the_version():
    latest = re.search(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE).group(1)
    assert latest == torch_moe_mps.__version__


def test_the_recipe_of_the_readme():
    """linear_bits, embedding_bits, keep and overrides as README writes them."""
    text = (REPOSITORY / "README.md").read_text()
    written = re.findall(r"`((?:linear_bits|embedding_bits|keep|overrides)=[^`]*)`", text)
    assert len(written) == 4
    recipe = eval(f"dict({', '.join(written)})")
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("qwen3_moe", torch.float32)
    torch_moe_mps.accelerate(model, bits=4, group_size=32, **recipe)
    layer = model.model.layers[0]
    assert [model.lm_head.format.bits, layer.self_attn.q_proj.format.bits] == [6, 8]
    assert [format.bits for format in formats_of(layer.mlp.experts).values()] == [4, 5]
    assert type(layer.self_attn.v_proj) is torch.nn.Linear


def test_the_launches_in_the_readme():
    """Those of the generated table: own code and ours, of a layer for one token."""
    table = (REPOSITORY / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| (?:mixtral|qwen3_moe|gpt_oss) \|(.*)", table, re.MULTILINE)
    pairs = [tuple(map(int, pair)) for row in rows for pair in re.findall(r"\b(\d+) / (\d+)\b", row)]
    assert len(rows) == 3 and len(pairs) == 4
    own, (least, most) = [pair[0] for pair in pairs], sorted({pair[1] for pair in pairs})
    written = (
        f"launches {least} kernels instead of {min(own)} to {max(own)} ({most} where gpt-oss has a sliding"
    )
    assert written in (REPOSITORY / "README.md").read_text().replace("\n", " ")


def test_the_bounds_of_several_macs():
    """Each number of the table in distributed.md follows from the formula above it."""
    links = [(150e-6, 3e9), (100e-6, 1.1e9), (150e-6, 0.115e9)]
    text = (REPOSITORY / "docs" / "distributed.md").read_text()
    rows = re.findall(r"^\| .* \([\d.]+; ([\d.]+); (\d+)\) \| (\d+) \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) == 3
    for gigabytes, hidden, alone, cells in rows:
        seconds = float(gigabytes) / (0.55 * 819)
        assert alone == f"{1 / seconds:.0f}"
        for (latency, rate), cell in zip(links, cells.split(" | "), strict=True):
            hops = [(n - 1) * (200e-6 + latency + int(hidden) / rate) + latency for n in (2, 4, 8)]
            assert cell == " / ".join(f"{1 / (seconds + hop):.0f}" for hop in hops)


def test_the_readme_has_the_limits_of_versions():
    text = (REPOSITORY / "README.md").read_text().replace("\n", " ")
    (needed,) = MACOS_OF_TORCH.items()
    (fails,) = FAILS.items()
    newer = next(version for version in TORCH if version not in FAILS)
    for words in (
        f"macOS {dotted(MACOS)} or newer ({dotted(needed[1])} for torch {needed[0]}, ",
        f", {dotted(TENSOR_UNITS)} for the tensor units",
        f"torch {TORCH[0]} to {TORCH[-1]} ({newer} or newer on macOS {dotted(fails[1][0])})",
    ):
        assert words in text


def test_the_api_is_what_the_docstrings_say():
    generator = runpy.run_path(str(REPOSITORY / "scripts" / "make_api.py"))
    written = (REPOSITORY / "docs" / "api.md").read_text()
    assert written == generator["document"](), "run scripts/make_api.py"
    names = re.findall(r"^## torch_moe_mps\.(\w+)$", written, re.MULTILINE)
    assert names == sorted({*torch_moe_mps.__all__} - {"ops"})


def test_structured_output_as_the_faq_shows_it(tmp_path, capsys):
    """With a model that writes nonsense otherwise, and a tokenizer of characters."""
    characters = [*map(chr, range(32, 127)), "<end>"]
    tokenizer = tokenizer_of(characters, unk_token=" ", eos_token="<end>", pad_token="<end>")
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    tokenizer.save_pretrained(tmp_path)
    tiny_models.tiny_model("qwen3_moe", eos_token_id=95).save_pretrained(tmp_path)
    text = (
        (REPOSITORY / "docs" / "faq.md").read_text().partition("## How do I get JSON that fits a schema?")[2]
    )
    snippet = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    exec(snippet.replace("qwen3-30b-4bit", str(tmp_path)).replace('"mps"', '"cpu"'), {})
    assert json.loads(capsys.readouterr().out)["sky"] in ("blue", "grey")
