"""The documents name files that exist, and the version that the package has."""

import json
import re
import runpy
import shlex
import warnings

import peft
import pytest
import torch
from support import tiny_models
from support.checkpoints import LETTERS, tokenizer_of
from support.pages import script_of
from support.processes import REPOSITORY
from tokenizers import decoders
from torch.nn.functional import silu

import torch_moe_mps
from torch_moe_mps._text import one_of
from torch_moe_mps._versions import FAILS, MACOS, MACOS_OF_TORCH, TENSOR_UNITS, TORCH, dotted
from torch_moe_mps._weight_formats import BITS, GROUP_SIZES
from torch_moe_mps.commands.arguments import parser
from torch_moe_mps.models.basics.interface import formats_of
from torch_moe_mps.ops import PUBLIC
from torch_moe_mps.ops._registry import WITH_BACKWARD
from torch_moe_mps.quantization import dequantize

DOCUMENTS = [
    *REPOSITORY.glob("*.md"),
    *(REPOSITORY / "docs").glob("*.md"),
    *(REPOSITORY / "tests").glob("*/README.md"),
]
# Not followed by a placeholder, as in tests/ops/test_<family>.py.
PATH = re.compile(r"\b((?:docs|scripts|tests|torch_moe_mps|csrc|shaders)/[\w./-]*\w)(?![\w/<])")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_and_paths_exist(document):
    text = document.read_text()
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert "://" in link or (document.parent / link).exists(), link
    for path in PATH.findall(text):
        roots = (REPOSITORY, REPOSITORY / "torch_moe_mps")
        assert any((root / path).exists() for root in roots), path


def anchors_of(text: str) -> set[str]:
    """Names under which GitHub has the headings of a page."""
    outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    headings = (heading.lower() for heading in re.findall(r"^#+ (.*)$", outside, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_lead_to_headings(document):
    for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text()):
        page = document.parent / path if path else document
        if page.suffix == ".py":  # a line
            continue
        assert anchor in anchors_of(page.read_text()), f"{path}#{anchor}"


def test_changelog_begins_with_the_version():
    latest = re.search(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE).group(1)
    assert latest == torch_moe_mps.__version__


def test_the_recipe_of_the_page_of_weights():
    """linear_bits, embedding_bits, keep and overrides as docs/weights.md writes them."""
    text = (REPOSITORY / "docs" / "weights.md").read_text()
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


def test_the_example_of_operators():
    """It runs, experts are as torch computes them, and affine formats have these bits and groups."""
    text = (REPOSITORY / "docs" / "operators.md").read_text()
    source, _ = blocks_of(text)
    torch.manual_seed(0)
    with torch.no_grad():
        exec(compile(source, "operators.md", "exec"), found := {})
        x, inner = found["x"].cpu(), found["inner"]
        gate_up, down = (dequantize(found[name]).cpu() for name in ("gate_up", "down"))
        chosen = torch.topk(found["logits"].cpu(), 2)
        for token, (ids, logits) in enumerate(zip(chosen.indices, chosen.values, strict=True)):
            halves = [(gate_up[i] @ x[token]).split(inner) for i in ids]
            parts = [down[i] @ (silu(gate) * up) for i, (gate, up) in zip(ids, halves, strict=True)]
            right = sum(weight * part for weight, part in zip(logits.softmax(0), parts, strict=True))
            torch.testing.assert_close(found["out"][token].cpu(), right, rtol=1e-4, atol=1e-4)
    bits, sizes = one_of(BITS["affine"]), one_of(GROUP_SIZES["affine"])
    assert f"| `affine4_64` and alike | {bits} | {sizes} |" in text


def blocks_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_operators_that_train(capsys):
    """Their gradients are those of a loop over experts in float64."""
    _, source = blocks_of((REPOSITORY / "docs" / "operators.md").read_text())
    torch.manual_seed(0)
    exec(compile(source, "operators.md", "exec"), found := {})
    matrices = found["router"].weight, found["gate_up"], found["down"]
    x = found["x"].cpu().double()
    router, gate_up, down = leaves = [each.detach().cpu().double().requires_grad_() for each in matrices]
    weights, ids = (x @ router.T).softmax(-1).topk(found["top_k"])
    rows = []
    for token in range(len(x)):
        out = torch.zeros_like(x[token])
        for weight, expert in zip(weights[token], ids[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            out = out + weight * (down[expert] @ (silu(gate) * up))
        rows.append(out)
    torch.stack(rows).square().mean().backward()
    for ours, right in zip(matrices, leaves, strict=True):
        torch.testing.assert_close(ours.grad.cpu().double(), right.grad, rtol=1e-4, atol=1e-6)
    assert capsys.readouterr().out.count("tensor(") == 3


def cells_of_the_readme(begin: str) -> list[str]:
    """Mixtral's, Qwen3-MoE's and gpt-oss's cells in README's table of counts."""
    (row,) = re.findall(rf"^\| {begin}.*", (REPOSITORY / "README.md").read_text(), re.MULTILINE)
    return row.strip("| ").split(" | ")[-3:]


def test_the_counts_in_the_readme():
    """Kernels and operators of a layer for one token, as the generated table has them."""
    table = (REPOSITORY / "docs" / "models.md").read_text().partition("\n## ")[0]
    rows = {
        name: re.findall(r"(\w* ?)(\d+) / (\d+)", cells)
        for name, cells in re.findall(r"^\| (mixtral|qwen3_moe|gpt_oss) \|(.*)", table, re.MULTILINE)
    }
    ((_, eager, ours),), ((_, eagers, same),) = rows["mixtral"], rows["qwen3_moe"]
    (sliding, theirs, most), (_, _, least) = rows["gpt_oss"]
    assert sliding == "sliding "
    written = cells_of_the_readme("this package, 4 bits, captured: kernels")
    assert written == [ours, same, f"{least}; {most} with a sliding window"]
    assert cells_of_the_readme("transformers, `grouped_mm`, its default") == [eager, eagers, theirs]
    config = tiny_models.tiny_model("mixtral").config
    assert config._experts_implementation == "grouped_mm" and config.num_experts_per_tok == 2
    assert "its default experts, `grouped_mm`, and 2 experts" in " ".join(table.split())


@pytest.mark.slow("builds small models of three architectures")
def test_the_operators_of_transformers_in_the_readme():
    """Of aten, in one layer, with each of its experts, as scripts/bench/count_operators.py counts them."""
    script = runpy.run_path(str(REPOSITORY / "scripts" / "bench" / "count_operators.py"))
    for experts in ("grouped_mm", "batched_mm", "eager"):
        counts = [
            script["of_token"](name, 3, count, experts) - script["of_token"](name, 2, count, experts)
            for name, count in script["EXPERTS_OF_A_TOKEN"].items()
        ]
        assert cells_of_the_readme(f"transformers, `{experts}`") == [*map(str, counts)], experts


def test_the_bounds_of_several_macs():
    """Each number of the tables in distributed.md follows from the formula above them."""
    links = {"Thunderbolt": (150e-6, 3e9), "10 GbE": (100e-6, 1.1e9), "1 GbE": (150e-6, 0.115e9)}
    text = (REPOSITORY / "docs" / "distributed.md").read_text().partition("\n## Bounds\n")[2]
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    models = {name: row for name, *row in cells if len(row) == 4 and row[0].isdigit()}
    bounds = [row for row in cells if row[1] in links]
    assert len(models) == 3 and len(bounds) == 9
    for _, gigabytes, hidden, one in models.values():
        assert one == f"{0.55 * 819 / float(gigabytes):.0f}" and hidden.isdigit()
    for name, link, *written in bounds:
        (latency, rate), (_, gigabytes, hidden, _) = links[link], models[name]
        hops = [(n - 1) * (200e-6 + latency + int(hidden) / rate) + latency for n in (2, 4, 8)]
        assert written == [f"{1 / (float(gigabytes) / (0.55 * 819) + hop):.0f}" for hop in hops]


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


def test_structured_output_as_the_page_shows_it(tmp_path, capsys):
    """With a model that writes nonsense otherwise, and a tokenizer of characters."""
    characters = [*map(chr, range(32, 127)), "<end>"]
    tokenizer = tokenizer_of(characters, unk_token=" ", eos_token="<end>", pad_token="<end>")
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    tokenizer.save_pretrained(tmp_path)
    tiny_models.tiny_model("qwen3_moe", eos_token_id=95).save_pretrained(tmp_path)
    own = {"qwen3-4bit": str(tmp_path), '"mps"': '"cpu"'}
    exec(script_of("chat.md", "### JSON that fits a schema", own), {})
    assert json.loads(capsys.readouterr().out)["sky"] in ("blue", "grey")


def test_training_as_the_page_shows_it(tmp_path, monkeypatch, capsys):
    """It learns; labels are those of the answer alone, and the adapter is one of PEFT on the loaded model."""
    template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ 'z' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'a' }}{% endif %}"
    tokenizer = tokenizer_of(LETTERS, unk_token="?", pad_token="?", eos_token="z", chat_template=template)
    tokenizer.save_pretrained(tmp_path / "model")
    with tiny_models.groups_of_32():
        dense = tiny_models.tiny_model("qwen3_moe", head_dim=32, vocab_size=32)
    dense.save_pretrained(tmp_path / "model")
    chats = [("abc", "hij"), ("defg", "kl")] * 4
    rows = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in chats]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    own = {
        "Qwen/Qwen3-30B-A3B": str(tmp_path / "model"),
        'bits=4, device_map="mps"': 'bits=4, group_size=32, device_map="cpu"',
        "2e-4": "2e-2",
        "warmup_steps=10": "warmup_steps=1, use_cpu=True, disable_tqdm=True",
    }
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        exec(script_of("finetuning.md", "## Supervised training", own), found := {})
    assert not [str(one.message) for one in said if "/peft/" in one.filename]
    peft.get_peft_model(dense, found["config"]).print_trainable_parameters()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trainable params")]
    assert len(printed) == 2 and printed[0] == printed[1]
    first = found["data"][0]
    assert tokenizer.convert_ids_to_tokens(first["input_ids"]) == [*"uabczahijz"]
    assert first["labels"] == [-100] * 6 + first["input_ids"][6:]
    losses = [row["loss"] for row in found["trainer"].state.log_history if "loss" in row]
    assert len(losses) == 6 and losses[-1] < losses[0] - 1
    ids, labels = (torch.tensor([first[name]]) for name in ("input_ids", "labels"))
    model = torch_moe_mps.from_pretrained(tmp_path / "model", bits=4, group_size=32, device_map="cpu")
    with torch.no_grad():
        before = model(input_ids=ids, labels=labels).loss
        after = peft.PeftModel.from_pretrained(model, "adapter")(input_ids=ids, labels=labels).loss
    assert after < before - 1


def test_operators_with_a_backward():
    """docs/operators.md names those that declare one."""
    text = (REPOSITORY / "docs" / "operators.md").read_text()
    sentence = re.search(r"^- (`[^.]*) have a backward\s\(", text, re.MULTILINE)[1]
    assert re.findall(r"`(\w+)`", sentence) == sorted(WITH_BACKWARD)
    page = (REPOSITORY / "docs" / "transformers.md").read_text()
    (row,) = re.findall(r"^\| backward \| none \| (.*) \|$", page, re.MULTILINE)
    named = {*re.findall(r"`(\w{2,})`", row)}
    assert named and named <= {*WITH_BACKWARD}
    written = f"{len(WITH_BACKWARD)} of {len(PUBLIC)} operators have a gradient."
    assert written in (REPOSITORY / "README.md").read_text()


def test_the_variables_of_the_environment():
    """docs/environment.md has a row for each variable that the code names, and for no other."""
    sources = [*REPOSITORY.glob("*.py"), *(REPOSITORY / "torch_moe_mps").rglob("*.*")]
    text = "".join(path.read_text() for path in sources if path.suffix in (".py", ".mm", ".h", ".metal"))
    rows = re.findall(
        r"^\| `(MOE_MPS_\w+)` \|", (REPOSITORY / "docs" / "environment.md").read_text(), re.MULTILINE
    )
    assert sorted(rows) == sorted({*re.findall(r"\bMOE_MPS_[A-Z_]*[A-Z]", text)})


def test_the_figures_above_the_table_are_its_own():
    """Sizes and divergences of recipes at the beginning of docs/quality.md."""
    text = (REPOSITORY / "docs" / "quality.md").read_text()
    pattern = r"^\| (.*?) \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \|"
    rows = {name: (size, kl) for name, size, kl in re.findall(pattern, text, re.MULTILINE)}
    kept = json.loads((REPOSITORY / "docs" / "quality_moe.json").read_text())
    rows |= {
        row["recipe"]: (f"{row['bytes'] / 1e6:.1f}", f"{row['texts'][1][0]:.4f}")
        for row in kept["rows"]
        if row["way"] == "importance"
    }
    written = re.findall(r"^\| (.*?) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    names = {
        "`bits=4`, MLX's rounding": "4 bits, embedding 6: MLX's rule",
        "`bits=4`, mlx-lm's awq": "mlx-lm awq, 4 bits, embedding 6",
        "`bits=4`, importance": "4 bits, embedding 6: importance",
        "`bits=5`, importance": "5 bits, embedding 6: importance",
        "llama.cpp's Q4_K_S, importance": "llama.cpp Q4_K_S, importance",
        '`mode="iq4_xs"`': "iq4_xs, attention 6",
        "llama.cpp's IQ4_XS": "llama.cpp IQ4_XS, attention Q6_K",
        "`bits=4`": "4 bits, attention 6",
    }
    assert [name for name, *_ in written] == [*names]
    for name, size, kl in written:
        right_size, right_kl = rows[names[name]]
        assert size == right_size and kl == f"{float(right_kl):.{len(kl) - 2}f}", name
    rule, own = (float(written[index][2]) for index in (0, 2))
    assert "It removes three quarters of the loss of 4 bits" in text and 3.5 <= rule / own <= 4.5


def test_the_divergences_of_formats():
    """Those of docs/weights.md are those of docs/quality.md, rounded."""
    pattern = r"^\| (.*?): (MLX's rule|importance) \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|"
    measured = (REPOSITORY / "docs" / "quality.md").read_text()
    right = {(name, way): kl for name, way, kl in re.findall(pattern, measured, re.MULTILINE)}
    names = {
        "bits=8": "8 bits",
        "bits=6": "6 bits",
        "bits=5": "5 bits, embedding 6",
        "bits=4": "4 bits, embedding 6",
        'bits=4, overrides={"self_attn.*": 5, "down_proj": 5}': "4 bits, attention and down 5, embedding 6",
        "bits=3": "3 bits, embedding 6",
        'mode="mxfp8"': "mxfp8, embedding 8",
        'mode="nvfp4"': "nvfp4, embedding 8",
        'mode="mxfp4"': "mxfp4, embedding 8",
    }
    pattern = r"^\| `(.*?)` \| [^|]+ \| [^|]+ \| (\d[\d.]+) \| ([\d.]+|refused) \|"
    rows = re.findall(pattern, (REPOSITORY / "docs" / "weights.md").read_text(), re.MULTILINE)
    assert [name for name, *_ in rows] == [*names]
    for name, *written in rows:
        for way, kl in zip(("MLX's rule", "importance"), written, strict=True):
            known = right.get((names[name], way), "refused")
            assert kl == (known if known == "refused" else f"{float(known):.{len(kl) - 2}f}"), (name, way)


def commands_in(text: str) -> list[list[str]]:
    """Arguments of each torch-moe-mps in indented lines and in backticks."""
    lines = re.findall(r"^ {4}(?:\$ )?(?:\w+=\S+ )*torch-moe-mps (.+)$", text, re.MULTILINE)
    lines += re.findall(r"`(?:\w+=\S+ )*torch-moe-mps ([^`]+)`", text)
    return [shlex.split(re.split(r"(?:^|\s)[#<>]", line)[0]) for line in lines]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_commands_have_the_options_that_documents_show(document):
    for arguments in commands_in(document.read_text()):
        if len(arguments) > 1 or arguments in (["check"], ["report"]):
            own = arguments[: [*arguments, "--"].index("--")]  # behind it are those of an agent
            parser().parse_args(own)  # exits where an option or its value is wrong


def test_commands_are_read_from_documents():
    pages = ("faq", "chat", "server", "memory", "speculative")
    text = "\n".join((REPOSITORY / "docs" / f"{page}.md").read_text() for page in pages)
    assert len(commands_in(text)) > 20
    assert commands_in('a `torch-moe-mps bench X --bits 4` b\n\n    A=1 torch-moe-mps chat "a b"  # c') == [
        ["chat", "a b"],
        ["bench", "X", "--bits", "4"],
    ]
