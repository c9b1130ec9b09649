"""The demo's picture: accuracy and dollars over rounds, beside what does not learn. SVG, made here. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from xml.sax.saxutils import escape

from policy.evaluate.plot import COLOURS, STYLE
from policy.recipes.traffic import Score

WIDTH, HEIGHT = 1000, 400
PANEL_WIDTH, LEFT, TOP, BOTTOM, GAP = 360, 60, 52, 52, 90
NAMES_X = LEFT + 2 * PANEL_WIDTH + GAP + 8
DASHES = {"oracle": "2 4", "router": "7 4", "fixed": "1 3"}
LABEL_PX = 15


def picture(
    curve: Sequence[Score],
    others: Mapping[str, Score],
    title: str,
    tries: Sequence[str] = (),
    bars: str = "95 % intervals",
) -> str:
    """`curve`: the live version after each round, the cold start first; `others`: by name. `tries`: what became of each
    round, shown under its point. `bars`: what the intervals of the scores are."""
    scores = [*curve, *others.values()]
    most = max(score.usd_per_1k for score in scores) * 1.15 or 1.0
    right = _Panel(LEFT, (0.0, 1.0), 0.2, len(curve), "{:.1f}")
    spent = _Panel(LEFT + PANEL_WIDTH + GAP, (0.0, most), _step(most), len(curve), "${:.2f}")
    parts = [
        f'<text x="{LEFT}" y="22" class="t">{escape(title)}</text>',
        *right.frame(f"right, of 1, with {bars}", tries),
        *spent.frame("dollars per 1,000 requests", tries),
        *right.levels(others, lambda score: score.accuracy),
        *spent.levels(others, lambda score: score.usd_per_1k, named=False),
        *right.bars(curve),
        *right.line([score.accuracy for score in curve]),
        *spent.line([score.usd_per_1k for score in curve]),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    return "\n".join([f'{head} role="img"><style>{STYLE}</style>', ground, *parts, "</svg>", ""])


def kind_of(name: str) -> str:
    """Which colour."""
    return "oracle" if name == "oracle" else "fixed" if name.startswith("fixed:") else "router"


def _step(most: float) -> float:
    power: float = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (0.2, 0.5, 1.0, 2.0) if most / (step * power) <= 6)


class _Panel:
    """One plane: rounds to the right, a quantity upwards."""

    def __init__(self, left: float, bounds: tuple[float, float], step: float, points: int, label: str) -> None:
        self._left, self._bounds, self._step, self._points, self._label = left, bounds, step, points, label

    def _x(self, index: int) -> float:
        return self._left + PANEL_WIDTH * (index + 0.5) / self._points

    def _y(self, value: float) -> float:
        low, high = self._bounds
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def frame(self, name: str, tries: Sequence[str]) -> list[str]:
        """Grid, numbers, names of both axes."""
        end, parts = self._left + PANEL_WIDTH, [_text(self._left, TOP - 12, name, css="s")]
        for index in range(math.floor(self._bounds[1] / self._step + 1e-9) + 1):
            y = self._y(index * self._step)
            parts.append(f'<line class="g" x1="{self._left}" y1="{y:.1f}" x2="{end}" y2="{y:.1f}"/>')
            parts.append(_text(self._left - 6, y + 4, self._label.format(index * self._step), "end", "s"))
        for index in range(self._points):
            told = "cold" if index == 0 else str(index)
            parts.append(_text(self._x(index), HEIGHT - BOTTOM + 16, told, "middle", "s"))
            if 0 < index <= len(tries) and tries[index - 1] != "done":
                parts.append(_text(self._x(index), HEIGHT - BOTTOM + 29, tries[index - 1], "middle", "s"))
        return [*parts, _text(self._left + PANEL_WIDTH / 2, HEIGHT - 10, "rounds", "middle", "s")]

    def levels(self, others: Mapping[str, Score], of: Callable[[Score], float], *, named: bool = True) -> list[str]:
        """What does not learn, as lines across; named at the right of both panels, no two names on each other."""
        parts, free_y = [], math.inf
        for name, score in sorted(others.items(), key=lambda item: of(item[1])):
            y, kind = self._y(of(score)), kind_of(name)
            dash = f'stroke="{COLOURS[kind]}" stroke-dasharray="{DASHES[kind]}" stroke-width="1.6"'
            ends = f'x1="{self._left}" y1="{y:.1f}" x2="{self._left + PANEL_WIDTH}" y2="{y:.1f}"'
            parts.append(f"<line {ends} {dash}><title>{escape(name)}</title></line>")
            if named:
                free_y = min(y + 4, free_y - LABEL_PX)
                sample = f'x1="{NAMES_X}" y1="{free_y - 4:.1f}" x2="{NAMES_X + 18}" y2="{free_y - 4:.1f}"'
                parts += [f"<line {sample} {dash}/>", _text(NAMES_X + 24, free_y, name)]
        return parts

    def bars(self, curve: Sequence[Score]) -> list[str]:
        """Intervals."""
        parts = []
        for index, one in enumerate(curve):
            x, low, high = self._x(index), self._y(one.low), self._y(one.high)
            ends = f'x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}"'
            parts.append(f'<line {ends} stroke="{COLOURS["conductor"]}" stroke-width="1.2" opacity="0.5"/>')
        return parts

    def line(self, values: Sequence[float]) -> list[str]:
        """The learner."""
        colour = COLOURS["conductor"]
        where = [(self._x(index), self._y(value)) for index, value in enumerate(values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in where)
        dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in where]
        last = _text(where[-1][0] + 8, where[-1][1] - 8, self._label.replace(".1f", ".2f").format(values[-1]))
        return [f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>', *dots, last]


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    style = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'
