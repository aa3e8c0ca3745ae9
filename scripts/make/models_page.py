"""Writes docs/models.md from the rows in tests/pinned/models.txt.

make_models_table.py and make_serving_table.py find the rows out, with tiny models, and call this. The page
has what differs between architectures: a column or a cell that is "yes" everywhere is a sentence.
"""

import ast
import re
from collections.abc import Iterable

import paths

ROWS = paths.REPOSITORY / "tests" / "pinned" / "models.txt"
DOCUMENT = paths.REPOSITORY / "docs" / "models.md"
LAUNCHES = paths.REPOSITORY / "tests" / "transformers" / "models" / "test_launches.py"
EXPERTS, ROUTERS, DENSE = "experts", "routers left unchanged", "dense"
WITHOUT = "experts without transformers' interface"
TOKENS, OTHERS, SERVING = "tokens that are not captured", "others", "serving"

PAGE = """# Models

This page lists which models of transformers {transformers} run on the operators, and what of each runs
unmodified. Nothing here was measured on a Mac.

The operators run the experts of {served} of the {named} Mixture-of-Experts architectures in transformers
(those whose config has experts). {experts} of the {named} have transformers' interface of experts ({classes}
classes); the table lists them. The [others](#experts-without-the-interface) have code of their own.
[Dense models](#dense-models), [other causal models](#other-causal-models) and [serving](#serving) follow.

`scripts/make/make_models_table.py` builds a tiny model with random weights of each architecture, and finds
the answers with it. Tests compare them with `tests/pinned/models.txt`.

{right}

A decode step is captured from the third call with the same call signature on, and then runs as one call
([speed.md](speed.md#counts)). {captured} Each was tried with a prompt of 29 tokens: the last eight of 16
generated tokens ran as one call.

- **Experts** is the activation of `moe_experts`. "own" means that the layer runs `expert_mm`, the model's
  own activation and norm, `expert_mm` and `moe_weighted_reduce`.
- **Router** is the scoring of `moe_router`. "float32" means that `router_logits` computes the logits. "own"
  means that the model's router runs unmodified.
- **Dispatches** are the Metal kernels of one layer for one token with a cache, in bfloat16, for each type of
  layer in the config. The first number is transformers' own code with its default experts, `grouped_mm`, and
  2 experts for a token. The second number is a captured step in 4 bits. The first layer counts what all
  layers share. "-" means that the layers were not found, or that the model does not run in bfloat16.
- **mlx-lm** is "yes" if mlx-lm {mlx_lm} has the architecture. It lacks {missing} of the {experts}.

| Architecture | Experts | Router | Dispatches | mlx-lm |
|---|---|---|---|---|
{rows}

{with_interface} of {experts} run their experts on the operators, and {routed} also run their router on them.
The formulas of these routers differ from those of `moe_router`: {routers}.

The layers of these models can be spread over several Macs ([distributed.md](distributed.md)), except those
of {uncut}.

### Experts without the interface

The operators also run the experts of these architectures, whose experts do not have transformers' interface:
{others_on_operators}. The experts of the other {left} run unmodified:

{reasons}

The stacks of experts are called `gate_up_proj` or `up_proj`, and `down_proj`. The stacks of dbrx and jetmoe
get these names once they are quantised or on the disk. `importance` leaves out experts that are called
without ids, which are those of jetmoe and llama4. Published folders of step3p7, llama4 and longcat_flash
load like any other, with these exceptions:

- step3p7: MTP layers are left out, because transformers' config lacks their sizes.
- llama4: the class with images raises an error for any call in transformers 5.24. Accelerated, it runs.
- longcat_flash: published folders lack matrices that transformers creates and nothing reads. `bits`,
  `convert` and `experts_memory` load such a folder, dense loading does not.
- GGUF files have the language models of step3p7 and llama4; those of longcat_flash are refused.

## Dense models

Models without experts are quantised, accelerated and converted in the same way. These were tried, and are
right as above: {dense}.

4-bit checkpoints of mlx-lm are read, and `convert --to mlx` writes them, with the same logits. The exceptions
are models that mlx-lm lacks or computes differently: {not_mlx}.

Other models work, too, if the form of their norms, linear layers and rotary embedding is known. Everything
else runs unmodified.

## Other causal models

transformers maps {others} more architectures to a causal model. Tiny models of {right_others} of them have
the logits of their eager code within the bound above. The eager code of the other {raising} raises an error
for a tiny model: {raising_names}.

{captured_others} have captured decode steps (`tests/pinned/models.txt` has each). Decode steps of these run
module by module: {uncaptured_names}.

## Serving

`chat`, `serve` and `generate_batch` run several sequences in one step (continuous batching). A prompt that
begins like an earlier one computes only its new tokens (prefix cache), and draft tokens are verified together
(speculative decoding). All architectures above, with experts and dense, do all three, with these exceptions:

{exceptions}

In four architectures, compressed or indexed attention counts from a sequence's first token. That part runs
once for each sequence of a step, and everything else runs once for all. The table has the dispatches of a
token of tiny models with two layers (`tests/transformers/models/test_launches.py`):

| Architecture | One sequence | Four sequences in one step | Four steps of one sequence |
|---|---|---|---|
{sequences}
"""


def sections() -> dict[str, list[str]]:
    """{section: its lines}, the first one under ""."""
    names = re.split(r"^## (.*)\n", ROWS.read_text(), flags=re.MULTILINE)
    return dict(zip(["", *names[1::2]], [part.splitlines() for part in names[::2]], strict=True))


def write(found: dict[str, list[str]]) -> None:
    """Replaces the sections that were found, and writes the page."""
    every = sections() | found
    parts = [f"## {name}\n" * bool(name) + "".join(f"{line}\n" for line in every[name]) for name in every]
    ROWS.write_text("".join(parts))
    DOCUMENT.write_text(page())


def rows(section: str) -> dict[str, list[str]]:
    """{architecture: cells} of a table."""
    lines = [line.strip("| ").split(" | ") for line in sections()[section] if line.startswith("| ")]
    return {name: cells for name, *cells in lines}


def pinned() -> Iterable[tuple[str, tuple[int, int]]]:
    """(architecture, (dispatches for one sequence, for four)) as SEQUENCES of a test has them."""
    statements = ast.parse(LAUNCHES.read_text()).body
    (value,) = (each.value for each in statements if ast.unparse(each).startswith("SEQUENCES = "))
    return ast.literal_eval(value).items()


def is_on_operators(cells: list[str]) -> bool:
    return cells[0].startswith(("moe_experts", "expert_mm"))


def page() -> str:
    found, served = sections(), rows(SERVING)
    experts, dense, others = rows(EXPERTS), rows(DENSE), rows(OTHERS)
    without = {*rows(WITHOUT)}
    own_experts = {name: cells[0] for name, cells in rows(WITHOUT).items() if not is_on_operators(cells)}
    by_reason: dict[str, list[str]] = {}
    for name, why in own_experts.items():
        by_reason.setdefault(why.removeprefix("no: "), []).append(name)
    with_interface = sum(map(is_on_operators, experts.values()))
    version, classes, mlx_lm = re.findall(r"[\d.]+", found[""][0])
    own = [line.removeprefix("- ").partition(": ")[0] for line in found[ROUTERS]]
    both = experts | dense
    ways = {name: cells[-1] for name, cells in others.items()}
    steps = {
        way: [name for name in ways if ways[name].startswith(way)] for way in ("one", "module", "its own")
    }
    assert sum(map(len, steps.values())) == len(others)
    return PAGE.format(
        transformers=version,
        classes=classes,
        mlx_lm=mlx_lm,
        experts=len(experts),
        missing=sum(served[name][1] == "no" for name in experts),
        right=right(both),
        captured=captured(len(both), found[TOKENS]),
        rows="\n".join(shortened(name, cells, served[name][1]) for name, cells in experts.items()),
        named=len(experts) + len(without),
        served=with_interface + len(without) - len(own_experts),
        with_interface=with_interface,
        left=len(own_experts),
        others_on_operators=", ".join(sorted(without - own_experts.keys())),
        reasons="\n".join(f"- {', '.join(names)}: {why}" for why, names in by_reason.items()),
        routed=len(experts) - len(own),
        routers=", ".join(own),
        uncut=", ".join(name for name, cells in both.items() if cells[-3] != "yes"),
        dense=", ".join(dense),
        not_mlx=", ".join(name for name, cells in dense.items() if cells[1] != "yes"),
        others=len(others),
        right_others=sum(cells[-2] == "yes" for cells in others.values()),
        captured_others=len(steps["one"]),
        uncaptured_names=", ".join(steps["module"]),
        raising=len(steps["its own"]),
        raising_names=", ".join(steps["its own"]),
        exceptions="\n".join(exceptions(served)),
        sequences="\n".join(f"| {name} | {one} | {four} | {4 * one} |" for name, (one, four) in pinned()),
    )


def right(both: dict[str, list[str]]) -> str:
    """A sentence about the columns "Quantised" and "Whole model"."""
    cells_of = {name: cells[-2:] for name, cells in both.items()}
    wrong = [f"{name} ({', '.join(cells)})" for name, cells in cells_of.items() if {*cells} != {"yes"}]
    return (
        "In float32, the logits (or hidden states) of each model equal those of its eager code within 1e-5.\n"
        "In 4 bits, they equal those of a dense model with the same rounded weights"
        + (f", except {', '.join(wrong)}." if wrong else ".")
    )


def captured(count: int, reasons: list[str]) -> str:
    """A sentence about the architectures whose decode steps are captured."""
    others = f", except {'; '.join(reasons)}" if reasons else ""
    return f"This holds for {count - len(reasons)} of {count} architectures, with experts or dense{others}."


def shortened(name: str, cells: list[str], in_mlx_lm: str) -> str:
    activation, router, _, dispatches, *_ = cells
    activation = "own" if activation.startswith("expert_mm") else activation[len("moe_experts (") : -1]
    router = re.sub(r"(moe_\w*)router \((\w+)\)", lambda m: f"{'hash ' * ('hash' in m[1])}{m[2]}", router)
    router = router.replace("; router_logits", ", float32")
    return f"| {name} | {activation} | {router} | {dispatches} | {in_mlx_lm} |"


def exceptions(served: dict[str, list[str]]) -> Iterable[str]:
    apart = [name for name, cells in served.items() if cells[2] == "-"]
    yield f"- {', '.join(apart)} do not generate text from only tokens."
    columns = ("continuous batching", "prefix cache", "speculative decoding")
    for name, (_, _, *cells) in served.items():
        lacks = [column for column, cell in zip(columns, cells, strict=True) if cell == "no"]
        if lacks:
            yield f"- {name} has no {' and no '.join(lacks)}: sequences run one after the other."


if __name__ == "__main__":
    paths.words(__doc__)
    DOCUMENT.write_text(page())
