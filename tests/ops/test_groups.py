"""Groups of arguments: one parameter of the function, an argument of the schema for each field."""

import inspect
from typing import NamedTuple

import pytest

from torch_moe_mps.ops._groups import Grouped, prefixed


@prefixed
class Size(NamedTuple):
    width: int
    height: int | None


class Style(NamedTuple):
    colour: str = "red"
    dashed: bool = False


def drawn(name: str, outer: Size, *, inner: Size | None = None, scale: float = 1.0, style: Style) -> str:
    return f"{name} {outer} {inner} {scale} {style}"


def test_arguments():
    """Names, defaults, kinds and types are those of a function that has the arguments itself."""

    def flat(
        name: str, outer_width: int, outer_height: int | None, *, inner_width: int | None = None,
        inner_height: int | None = None, scale: float = 1.0, colour: str = "red", dashed: bool = False,
    ) -> str: ...  # fmt: skip

    assert Grouped(drawn).signature == inspect.signature(flat)
    assert Grouped(flat).signature == inspect.signature(flat) and not Grouped(flat).groups


@pytest.mark.parametrize(
    ("inner", "expected"),
    [((None, None), None), ((3, None), Size(3, None)), ((None, 4), Size(None, 4))],  # type: ignore[arg-type]
)
def test_gathered(inner, expected):
    """A group that may be none is none where all of it is: half of one is seen by the checks."""
    given = {"name": "a", "outer_width": 1, "outer_height": 2, "scale": 2.0, "colour": "blue", "dashed": True}
    given |= dict(zip(("inner_width", "inner_height"), inner, strict=True))
    made = Grouped(drawn).gathered(given)
    assert drawn(**made) == f"a {Size(1, 2)} {expected} 2.0 {Style('blue', True)}"
