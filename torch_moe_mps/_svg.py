"""SVG elements, in greys that are legible on light and dark pages."""

from collections.abc import Iterable
from html import escape

GREY = "#808890"


def text(
    x: float, y: float, content: object, anchor: str = "start", size: int = 12, colour: str = GREY
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}>{escape(str(content))}</text>"


def line(x1: float, y1: float, x2: float, y2: float, width: float = 1, opacity: float = 1) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{GREY}" stroke-width="{width}" opacity="{opacity}"/>'


def box(x: float, y: float, width: float, height: float, colour: str, opacity: float = 1) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{colour}" opacity="{opacity}"/>'


def dot(x: float, y: float, radius: float, colour: str, title: str) -> str:
    """Disc with a tooltip."""
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}"'
    return f"<circle {place}><title>{escape(title)}</title></circle>"


def path(points: Iterable[tuple[float, float]], colour: str) -> str:
    """A line through points."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def picture(width: float, height: float, title: str, parts: list[str]) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>", ""])
