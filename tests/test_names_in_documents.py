"""Names in backticks of the documents exist: in the code, as files and options, or in another library."""

import functools
import importlib.util
import itertools
import re
from pathlib import Path

import pytest
from support.processes import REPOSITORY

from torch_moe_mps.models.families import Family

FOLDERS = ("torch_moe_mps", "docs", "tests", "scripts", "hub", ".github")
SUFFIXES = {"", ".py", ".mm", ".h", ".metal", ".m", ".cpp", ".cu", ".toml", ".yml", ".txt", ".nix", ".sh"}
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "tests/*/README.md", "torch_moe_mps/**/README.md", "hub/*.md")
    for path in REPOSITORY.glob(pattern)
    if path.name != "CHANGELOG.md"  # which names what there was
)
# {a file of another library that has the names, or the library's name: names}
OTHERS = {
    "transformers/integrations/moe.py": "ExpertsInterface",
    "transformers/core_model_loading.py": "Fp8Dequantize",
    "transformers/models/glm5_next/modeling_glm5_next.py": "Glm5NextTextAttention",
    "transformers/models/deepseek_v4/modeling_deepseek_v4.py": "hc_head",
    "transformers/configuration_utils.py": "base_model_pp_plan",
    "transformers/distributed/pipeline_parallel.py": "pipeline_parallel_naive_forward",
    "transformers/cli/serving/model_manager.py": "ModelManager _validate_args",
    "transformers/utils/generic.py": "valid_keys",
    "transformers/modeling_utils.py": "use_kernels",
    "transformers/quantizers/quantizer_metal.py": "MetalConfig",
    "peft/tuners/tuners_utils.py": "_replace_module",
    "peft/tuners/lora/config.py": "alpha_pattern",
    "torch/nn/parallel/distributed.py": "GLOO_SOCKET_IFNAME",
    "torch/_inductor/config.py": "enable_auto_functionalized_v2 auto_functionalized_v2",
    "mlx/core/__init__.pyi": "gather_qqmm qqmm",
    "mlx_lm/utils.py": "bailing_moe_v3",
    "TRL": "add_fused_lm_head",
    "lm-evaluation-harness": "HFLM pretrained model_args --model_args",
    "torchrun": "--node-rank",
    "transformers serve": "--attn-implementation --experts-implementation",
    "macOS and its programs": "en0 bridge0 ifconfig openssl zshrc WithUnretainedReferences",
    "kernels": "noarch",
    "Qwen3's template": "no_think",
    "proposals to other libraries": "is_like adapter_parameters",
}
THEIRS = {name for names in OTHERS.values() for name in names.split()}


@functools.cache
def files() -> dict[str, str]:
    """{"/path in the repository": its text, or "" for documents and pins}"""
    paths = [*REPOSITORY.glob("*.*"), *(p for folder in FOLDERS for p in (REPOSITORY / folder).rglob("*"))]
    names = {"/" + path.relative_to(REPOSITORY).as_posix(): path for path in paths if path.is_file()}
    return {
        name: path.read_text()
        if path.suffix in SUFFIXES and path != Path(__file__) and "/pinned/" not in name
        else ""
        for name, path in names.items()
    }


@functools.cache
def words() -> list[set[str]]:
    """Words of each file, and of its path."""
    return [{*re.findall(r"\w+", f"{name} {text}", re.ASCII)} for name, text in files().items()]


@pytest.fixture(scope="module", autouse=True)
def parsed():
    """Every file is read once, and not within the time of a test."""
    return words()


@functools.cache
def is_known(*names: str) -> bool:
    """Whether one file has all of these words."""
    return any(found.issuperset(names) for found in words())


def unknown(text: str) -> list[str]:
    """Words, attributes, files and options in backticks, outside of blocks, that nobody has."""
    spans = re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    found = []
    for span in spans:
        for dotted in re.findall(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*", re.sub(r"\d+x\d+", "", span)):
            names = [name for name in dotted.split(".") if name not in THEIRS]
            pairs = [*itertools.pairwise(names)] if len(names) > 1 else [(name,) for name in names]
            found += [dotted for pair in pairs if not is_known(*pair)]
        paths = re.findall(r"(?<![\w/~.<>@*-])(?:[\w-]+/)+[\w.]*\.(?:py|mm|h|metal|txt|md)\b(?!/)", span)
        found += [path for path in paths if not any(name.endswith(f"/{path}") for name in files())]
        options = {*re.findall(r"(?<!\S)--[a-z][\w-]*", span)} - THEIRS
        found += [option for option in options if not any(option in text for text in files().values())]
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_names_exist(document):
    assert not unknown(document.read_text())


def test_names_that_do_not_exist_are_found():
    wrong = (
        "`LAYER_HOOKS` `growing.in_memory_of` `families.ANSWERS` `caches/hold.py` `accelerate(m, --byte 4)`"
    )
    found = ["LAYER_HOOKS", "growing.in_memory_of", "families.ANSWERS", "caches/hold.py", "--byte"]
    assert unknown(wrong) == found
    assert not unknown("`growing.with_spare` `caches/held.py` `restore(model)` `--bits` ```\nNONE\n```")


@pytest.mark.parametrize("place", [place for place in OTHERS if "/" in place])
def test_names_of_other_libraries_are_theirs(place):
    package, _, file = place.partition("/")
    spec = importlib.util.find_spec(package)
    found = [Path(root, file) for root in spec.submodule_search_locations] if spec else []
    if not any(path.is_file() for path in found):
        pytest.skip(f"{package} is not installed, or in a version without this file")
    (text,) = (path.read_text() for path in found if path.is_file())
    assert {*re.findall(r"\w+", OTHERS[place])} <= {*re.findall(r"\w+", text)}


def test_the_parts_of_a_family():
    """The table of CONTRIBUTING.md has a row for each field, and no other."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("| part | table |")[2].partition("\n\n")[0]
    cells = re.findall(r"^ *\| (`.*?) \|", text, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(Family._fields)
