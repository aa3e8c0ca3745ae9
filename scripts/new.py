"""Lays out the files of a new operator, or of a new family of models, and says what is left to fill in.

The operator runs as it is laid out: it gives half of each element, on the CPU and in the simulator, and its
tests pass. CONTRIBUTING.md says what each file has ("Add an operator", "Add a family").
"""

import argparse
import keyword
import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "torch_moe_mps"
WIRING = f"{PACKAGE}/transformers/wiring.py"
USED_BY = "tests/pinned/used_by.txt"
FAMILIES = f"{PACKAGE}/models/families"

# {file: its text} of an operator; NEW_ONE stands for its name.
OPERATOR = {
    f"{PACKAGE}/ops/families/NEW_ONE.py": '''"""The operator NEW_ONE."""

from torch import Tensor

from .._checks import wide
from .._registry import operator
from .._sample import Calls, Changes


@operator("x[..., H] -> [..., H]:x", public="what users call it for")
def NEW_ONE(x: Tensor) -> Tensor:
    """Half of each element.

    In models no rule puts it in yet.

    Args:
        x: [..., H], float32, float16 or bfloat16.

    Returns: [..., H], in the dtype of x.

    Raises: ValueError for a dtype or a device that does not fit.

    Example:
        >>> ops.NEW_ONE(torch.tensor([3.0, 4.0])).tolist()
        [1.5, 2.0]
    """
    return (wide(x) / 2).to(x.dtype)


CALLS: Calls = {
    "NEW_ONE": lambda s: s.of("x[T, H]"),
}
CHANGES: Changes = {}
''',
    f"{PACKAGE}/shaders/NEW_ONE.metal": """#include "common.h"

template <typename T>
[[kernel]] void NEW_ONE(device const T* x [[buffer(0)]], device T* output [[buffer(1)]],
                     constant uint& count [[buffer(2)]], uint index [[thread_position_in_grid]]) {
  if (index < count) output[index] = T(float(x[index]) / 2);
}

INSTANTIATE("NEW_ONE", NEW_ONE<MOE_DTYPE>)
""",
    f"{PACKAGE}/csrc/NEW_ONE.mm": """#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "register.h"
#include "tensors.h"

namespace moe_mps {
namespace {

using at::Tensor;

constexpr int64_t kThreads = 128;  // Untuned.

Tensor NEW_ONE(const Tensor& x_) {
  const Tensor x = x_.contiguous();
  Tensor output = at::empty(x.sizes(), x.options());
  if (output.numel() == 0) return output;
  check_counted("x", x.numel(), x.sizes());
  Commands commands;
  commands.add({"NEW_ONE", x.scalar_type()}, "NEW_ONE")
      .bind(x, output)
      .params(static_cast<uint32_t>(x.numel()))
      .threadgroups({ceil_div(x.numel(), kThreads)}, {kThreads});
  commands.encode();
  return output;
}

}  // namespace

MOE_OPERATOR(NEW_ONE)

}  // namespace moe_mps
""",
    "tests/support/ops/NEW_ONE.py": '''"""The operator NEW_ONE: valid arguments, and results in float64."""

from support.oracles import exact
from support.oracles_operators import Expected


def draw_NEW_ONE(d):
    return {"x": d.values(*d.one((3, 64), (2, 1, 5), (0, 7)))}


def expected_NEW_ONE(a):
    return [Expected(exact(a.x) / 2, 0 * exact(a.x))]
''',
    "tests/ops/test_NEW_ONE.py": '''"""NEW_ONE at values that random calls do not draw."""

import torch

from torch_moe_mps.ops import NEW_ONE


def test_what_is_not_finite_stays_so(device):
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0]], device=device)
    torch.testing.assert_close(NEW_ONE(x), x, equal_nan=True)
''',
}
LEFT_OF_OPERATOR = """Left to fill in (CONTRIBUTING.md, "Add an operator"):
- torch_moe_mps/ops/families/NEW_ONE.py: schema, formula, docstring, and calls of the self-check
- torch_moe_mps/shaders/NEW_ONE.metal and torch_moe_mps/csrc/NEW_ONE.mm: the kernel, and what encodes it
- tests/support/ops/NEW_ONE.py and tests/ops/test_NEW_ONE.py: arguments, results in float64, special values
- CONTRIBUTING.md: the family in the list of "Which room does what"
- docs/operators.md: each new name of an argument
- scripts/make/make_used_by.py, once a rule puts it into models; then scripts/test --pin
Test it with: scripts/test tests/ops -k NEW_ONE"""

# The same of a family, which is named as transformers' model_type.
FAMILY = {
    f"{FAMILIES}/NEW_ONE/__init__.py": '''"""NEW_ONE: what only this architecture needs."""

from .. import Family
from .rules import rewrite_NEW_ONE

FAMILY = Family(rules=(rewrite_NEW_ONE,))
''',
    f"{FAMILIES}/NEW_ONE/rules.py": '''"""The rules of NEW_ONE."""

from collections.abc import Callable

from torch import nn

from ...basics.report import Done


def rewrite_NEW_ONE(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """The forward of a module of NEW_ONE, and what it runs; None for any other module."""
    return None
''',
    "tests/models/families/test_NEW_ONE.py": '''"""NEW_ONE against its own eager code."""

import pytest
from support import families

NAME = "NEW_ONE"


def test_a_checkpoint_loads_and_its_tokens_are_those_of_eager_code(tmp_path):
    families.check_tokens(NAME, tmp_path)


@pytest.mark.sweep
def test_every_call(tmp_path):
    families.check_every_call(NAME, tmp_path)


@pytest.mark.sweep
def test_bfloat16_logits():
    families.check_bfloat16(NAME)
''',
}
LEFT_OF_FAMILY = f"""Left to fill in (CONTRIBUTING.md, "Add a family"):
- {FAMILIES}/NEW_ONE/: the rule, and the parts that other tables take; delete what the family does not need
- tests/models/families/test_NEW_ONE.py: modules with one thing changed, which must run unmodified
- tests/support/tiny_models.py, if the architecture needs sizes of its own
- scripts/make/make_models_table.py, and scripts/test --pin
Test it with: scripts/test tests/models/families/test_NEW_ONE.py"""


def write(files: dict[str, str], name: str) -> None:
    """Writes files that do not exist yet. Raises: ValueError for one that does, before any is written."""
    texts = {
        ROOT / path.replace("NEW_ONE", name): text.replace("NEW_ONE", name) for path, text in files.items()
    }
    for path in texts:
        if path.exists():
            raise ValueError(f"NAME must be new, got {name}: {path.relative_to(ROOT)} exists")
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(f"wrote   {path.relative_to(ROOT)}")


def insert(file: str, pattern: str, line: str) -> None:
    """Adds a line in its order to the lines of a file that match a pattern."""
    path = ROOT / file
    lines = path.read_text().splitlines(keepends=True)
    places = [number for number, each in enumerate(lines) if re.match(pattern, each)]
    after = [number for number in places if lines[number] < line]
    lines.insert(after[-1] + 1 if after else places[0], line)
    path.write_text("".join(lines))
    print(f"changed {file}")


def new_operator(name: str) -> None:
    if re.search(rf"^{name}:", (ROOT / USED_BY).read_text(), re.MULTILINE):
        raise ValueError(f"NAME must be new, got {name}: {USED_BY} has this operator")
    write(OPERATOR, name)
    begin = "from .families."
    insert(f"{PACKAGE}/ops/__init__.py", re.escape(begin), f"{begin}{name} import {name} as {name}\n")
    path = ROOT / PACKAGE / "csrc/metal/library.mm"
    text, place = path.read_text(), '"hyper_connection", '
    assert text.count(place) == 1, f"the list of libraries in {path} has another form"
    path.write_text(text.replace(place, f'{place}"{name}", '))
    print(f"changed {path.relative_to(ROOT)}")
    insert(
        "tests/pinned/used_by.txt", r"\w+:", f"{name}: \n"
    )  # as make_used_by.py has it, which takes minutes
    for path in (ROOT, ROOT / "scripts/make"):
        sys.path.insert(0, str(path))
    sys.argv[1:] = []
    runpy.run_path(str(ROOT / "scripts/make/make_operators_table.py"), run_name="__main__")
    print("changed docs/operators.md")
    print(LEFT_OF_OPERATOR.replace("NEW_ONE", name))


def new_family(name: str) -> None:
    write(FAMILY, name)
    insert(WIRING, r'    "\w+",$', f'    "{name}",\n')
    print(LEFT_OF_FAMILY.replace("NEW_ONE", name))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/new", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("operator", "family"))
    parser.add_argument(
        "name", metavar="NAME", help="of the operator, or transformers' model_type of the family"
    )
    options = parser.parse_args()
    try:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", options.name) or keyword.iskeyword(options.name):
            raise ValueError(f"NAME must be lower-case letters, digits and _, got {options.name!r}")
        {"operator": new_operator, "family": new_family}[options.kind](options.name)
    except ValueError as error:
        print(f"scripts/new: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
