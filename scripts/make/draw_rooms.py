#!/usr/bin/env python
"""Writes docs/rooms.svg: the rooms of the package, and which of them import which."""

import paths
from support.rooms import FLOORS, PACKAGE, floor, graph

from torch_moe_mps import _svg as svg

PICTURE = paths.REPOSITORY / "docs" / "rooms.svg"
STEP, LEFT, TOP = 26, 205, 140
COLOUR = "#2f81f7"


def is_room(name: str) -> bool:
    """A floor that is a folder; the others are single files, which most rooms import."""
    return (PACKAGE / name.replace(".", "/")).is_dir()


def folder(name: str) -> str:
    """The name of a room as CONTRIBUTING has it."""
    return "transformers/*.py, public API" if name == "transformers" else f"{name.replace('.', '/')}/"


def imports_between() -> set[tuple[str, str]]:
    """(room, another one that it imports)"""
    pairs = {
        (FLOORS[floor(name)], FLOORS[floor(other)])
        for name, others in graph().items()
        for other in others
        if "torch_moe_mps" not in (name, other)
    }
    return {pair for pair in pairs if pair[0] != pair[1] and all(map(is_room, pair))}


def drawing() -> str:
    rooms = [*reversed([*filter(is_room, FLOORS)])]  # the highest floor is at the top
    width = LEFT + STEP * len(rooms) + 40
    x = {room: LEFT + STEP * (i + 0.5) for i, room in enumerate(rooms)}
    y = {room: TOP + STEP * (i + 0.5) for i, room in enumerate(rooms)}
    parts = [svg.text(10, 20, "A dot: the room of the row imports that of the column.")]
    parts.append(svg.text(10, 38, "All dots are right of the diagonal: nothing imports upwards."))
    for room in rooms:
        parts.append(svg.line(10, y[room] - STEP / 2, width - 20, y[room] - STEP / 2, opacity=0.3))
        parts.append(svg.text(LEFT - 8, y[room] + 4, folder(room), "end"))
        turned = f'<g transform="translate({x[room] + 4:.1f} {TOP - 8}) rotate(-60)">'
        parts.append(f"{turned}{svg.text(0, 0, folder(room).removeprefix('transformers/'))}</g>")
        parts.append(svg.box(x[room] - 4, y[room] - 4, 8, 8, svg.GREY, 0.5))
    for room, other in sorted(imports_between()):
        parts.append(svg.dot(x[other], y[room], 6, COLOUR, f"{folder(room)} imports {folder(other)}"))
    height = TOP + STEP * len(rooms) + 10
    return svg.picture(width, height, "The rooms of torch_moe_mps and their imports", parts)


if __name__ == "__main__":
    PICTURE.write_text(drawing())
