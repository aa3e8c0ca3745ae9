"""The loss curve of a training, as SVG."""

from collections.abc import Sequence

from .. import _svg as svg

_WIDTH, _HEIGHT = 620, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 44, 40
_TRAINED, _HELD_OUT = "#3d7fd9", "#d9573d"
_LINES = 5  # horizontal ones of the grid


def loss_curve(
    title: str, losses: Sequence[tuple[int, float]], held_out: tuple[float, float] | None = None
) -> str:
    """SVG of the training loss, (step, nats) at least once, and of the held-out loss before and after."""
    last = max(step for step, _ in losses)
    values = [loss for _, loss in losses] + list(held_out or ())
    low, high = min(values), max(values)
    span = (high - low) or 1.0

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / max(1, last)

    def y(loss: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (loss - low) / span

    parts = [svg.text(_LEFT, 18, title, size=14)]
    for number in range(_LINES):
        loss = low + span * number / (_LINES - 1)
        parts.append(svg.line(_LEFT, y(loss), _WIDTH - _RIGHT, y(loss), opacity=0.3))
        parts.append(svg.text(_LEFT - 6, y(loss) + 4, f"{loss:.3g}", "end"))
    parts += [
        svg.text(_LEFT, _HEIGHT - 12, "0"),
        svg.text(_WIDTH - _RIGHT, _HEIGHT - 12, f"step {last}", "end"),
        svg.text(_LEFT, 36, "loss of training, nats a token", colour=_TRAINED),
        svg.path([(x(step), y(loss)) for step, loss in losses], _TRAINED),
    ]
    if held_out is not None:
        parts.append(
            svg.text(_WIDTH - _RIGHT, 36, "held-out lines, before and after", "end", colour=_HELD_OUT)
        )
        for step, loss in zip((0, last), held_out, strict=True):
            parts.append(svg.dot(x(step), y(loss), 5, _HELD_OUT, f"{loss:.4f}"))
    return svg.picture(_WIDTH, _HEIGHT, title, parts)
