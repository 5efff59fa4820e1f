"""Draws expert_curve.svg, held-out losses with and without experts, from benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "experts-text.json"
WIDTH, HEIGHT, LEFT, BOTTOM = 560, 260, 44, 30
LOSSES = (1.2, 2.6)
COLOURS = {"experts": "#b45309", "dense": "#1d4ed8"}


def picture() -> str:
    """Both curves over training tokens."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    last = max(step for run in found["runs"].values() for step, _ in run["held_out"])
    shapes = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for loss in (1.2, 1.6, 2.0, 2.4):
        y = _y(loss)
        shapes += [f'<path d="M{LEFT} {y:.1f}H{WIDTH}" stroke="#ddd"/>', _text(8, y + 4, f"{loss:.1f}")]
    for tokens in (1, 2, 3):
        x = _x(tokens * 1e6 / found["tokens_per_step"], last)
        shapes += [
            f'<path d="M{x:.1f} 10V{_y(LOSSES[0]):.1f}" stroke="#eee"/>',
            _text(x - 62, HEIGHT - 10, f"{tokens}M tokens"),
        ]
    for place, (name, run) in enumerate(found["runs"].items()):
        points = " ".join(f"{_x(step, last):.1f},{_y(loss):.1f}" for step, loss in run["held_out"])
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        words = f"{name}: {run['held_out'][-1][1]:.3f} at the end"
        shapes.append(_text(WIDTH - 220, 30 + 18 * place, words, COLOURS[name]))
    size = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f"<svg {size}>\n" + "\n".join(shapes) + "\n</svg>\n"


def _x(step: float, last: int) -> float:
    return LEFT + (WIDTH - LEFT - 10) * step / last


def _y(loss: float) -> float:
    low, high = LOSSES
    return 10 + (HEIGHT - BOTTOM - 10) * (high - loss) / (high - low)


def _text(x: float, y: float, words: str, colour: str = "#444") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-family="sans-serif" font-size="12" fill="{colour}">{words}</text>'


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
