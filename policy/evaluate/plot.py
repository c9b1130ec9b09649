"""Two pictures of a comparison as SVG, made here: accuracy over dollars, and who was called. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 1000, 560
LEFT, RIGHT, TOP, BOTTOM = 64, 400, 40, 56  # margins; the list of names stands in the right one
USD_FLOOR = 1e-3  # a logarithm has no zero: cheaper points stand at the left edge
COLOURS = {"fixed": "#8a8f98", "router": "#2f6fde", "tuned": "#8f4bd8", "conductor": "#d4351c", "oracle": "#1d8a4c"}
WORKER_COLOURS = ("#2f6fde", "#d4351c", "#1d8a4c", "#c98a00", "#8f4bd8", "#0e8f9c", "#d0559a", "#6b7280", "#7a5230")
LINE_PX = 19
NAME_CHARS_MAX = 34
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1f2430}.t{font-size:15px;font-weight:600}.s{fill:#5b6270}"
    ".g{stroke:#e4e6eb}.n{font-size:11px;font-weight:600}.c{fill:none;stroke:#1f2430;stroke-dasharray:4 3;opacity:.45}"
)


@dataclass(frozen=True, slots=True)
class Point:
    """One policy on the plane. `kind` gives its colour."""

    name: str
    kind: str
    usd: float
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class _Axes:
    """Data to pixels: dollars on a logarithmic axis, accuracy on a linear one."""

    usd: tuple[float, float]
    accuracy: tuple[float, float]

    def x(self, usd: float) -> float:
        low, high = (math.log10(bound) for bound in self.usd)
        share = (math.log10(max(usd, self.usd[0])) - low) / (high - low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, accuracy: float) -> float:
        low, high = self.accuracy
        return HEIGHT - BOTTOM - (accuracy - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def scatter(points: Sequence[Point], curves: Mapping[str, Sequence[str]], title: str) -> str:
    """Accuracy with its interval over dollars per 1,000. Points carry numbers, named at the right, best first; a curve
    joins the points of one dial."""
    ranked = sorted(points, key=lambda point: (-point.accuracy, point.usd, point.name))
    axes = _axes(ranked)
    where = {point.name: (axes.x(point.usd), axes.y(point.accuracy)) for point in ranked}
    parts = [*_grid(axes), *(_curve(members, where) for members in curves.values() if len(members) > 1)]
    for point in ranked:
        x = where[point.name][0]
        parts.append(_bar(x, axes.y(point.low), axes.y(point.high), COLOURS[point.kind]))
    taken: list[tuple[float, float]] = []
    for number, point in enumerate(ranked, 1):
        x, y = where[point.name]
        taken.append(_free(x, y, taken))
        parts += _marker(number, point, x, y, taken[-1])
    height = max(HEIGHT, TOP + LINE_PX * (len(ranked) + 2))
    return _svg(height, title, parts)


def _axes(points: Sequence[Point]) -> _Axes:
    usd = [max(point.usd, USD_FLOOR) for point in points]
    low, high = min(point.low for point in points), max(point.high for point in points)
    pad = 0.05 * (high - low or 1)
    bounds = (max(0.0, low - pad), min(1.0, high + pad) if high <= 1 else high + pad)
    return _Axes((min(usd) / 1.6, max(usd) * 1.6), bounds)


def _grid(axes: _Axes) -> list[str]:
    parts = []
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for exponent in range(math.floor(math.log10(axes.usd[0])), math.ceil(math.log10(axes.usd[1])) + 1):
        for tick in (10.0**exponent, 3 * 10.0**exponent):
            if axes.usd[0] <= tick <= axes.usd[1]:
                x = axes.x(tick)
                parts.append(f'<line class="g" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}"/>')
                parts.append(_text(x, bottom + 18, f"${tick:g}", anchor="middle", css="s"))
    step = _step(axes.accuracy[1] - axes.accuracy[0])
    for index in range(math.ceil(axes.accuracy[0] / step), math.floor(axes.accuracy[1] / step) + 1):
        y = axes.y(index * step)
        parts.append(f'<line class="g" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{index * step:.2f}", anchor="end", css="s"))
    middle = (LEFT + right) / 2
    return [*parts, _text(middle, HEIGHT - 14, "dollars per 1,000 questions (logarithmic)", anchor="middle", css="s")]


def _step(span: float) -> float:
    return next((step for step in (0.01, 0.02, 0.05, 0.1) if span / step <= 9), 0.2)


def _curve(members: Sequence[str], where: Mapping[str, tuple[float, float]]) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(where[name] for name in members if name in where))
    return f'<polyline class="c" points="{path}"/>'


def _free(x: float, y: float, taken: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Where a number stands beside its dot: the first of four corners that no other number covers."""
    corners = [(x + right, y + down) for right, down in ((7, -5), (7, 13), (-20, -5), (-20, 13))]
    return next((c for c in corners if all(abs(c[0] - a) > 15 or abs(c[1] - b) > 11 for a, b in taken)), corners[0])


def _marker(number: int, point: Point, x: float, y: float, label: tuple[float, float]) -> list[str]:
    """The dot with its number, and its line in the list."""
    colour, list_x, list_y = COLOURS[point.kind], WIDTH - RIGHT + 28, TOP + LINE_PX * number
    hollow = f'fill="#fff" stroke="{colour}" stroke-width="2"' if point.kind == "oracle" else f'fill="{colour}"'
    name = f"{number}  {_short(point.name)}"
    return [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" {hollow}><title>{escape(point.name)}</title></circle>',
        _text(*label, str(number), css="n", fill=colour),
        f'<circle cx="{list_x}" cy="{list_y - 4}" r="4.5" {hollow}/>',
        _text(list_x + 12, list_y, name),
        _text(WIDTH - 62, list_y, f"{point.accuracy:.3f}", anchor="end", css="s"),
        _text(WIDTH - 8, list_y, f"${point.usd:.3g}", anchor="end", css="s"),
    ]


def shares(by_policy: Mapping[str, Mapping[str, float]], title: str) -> str:
    """Which workers each policy called, as stacked bars of its steps. Fixed workers are left to the reader."""
    workers = sorted({worker for share in by_policy.values() for worker in share})
    colours = {worker: _colour(index) for index, worker in enumerate(workers)}
    bar_x, bar_width, row_px = 260, WIDTH - RIGHT - 270, 26
    parts = []
    for row, (policy, share) in enumerate(by_policy.items()):
        y, x = TOP + 12 + row * row_px, float(bar_x)
        parts.append(_text(bar_x - 10, y + 12, _short(policy), anchor="end"))
        for worker in workers:
            width = share.get(worker, 0.0) * bar_width
            if width > 0:
                note = f"{worker}: {share[worker]:.1%}"
                box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{row_px - 8}" fill="{colours[worker]}"'
                parts.append(f"<rect {box}><title>{escape(note)}</title></rect>")
            x += width
    for row, worker in enumerate(workers):
        y = TOP + 12 + row * LINE_PX
        parts.append(f'<rect x="{WIDTH - RIGHT + 22}" y="{y}" width="12" height="12" fill="{colours[worker]}"/>')
        parts.append(_text(WIDTH - RIGHT + 42, y + 11, _short(worker)))
    return _svg(TOP + 40 + max(len(by_policy) * row_px, len(workers) * LINE_PX), title, parts)


def _colour(index: int) -> str:
    """A named one, then as many as there are workers, apart by the golden angle."""
    return WORKER_COLOURS[index] if index < len(WORKER_COLOURS) else f"hsl({round(index * 137.5) % 360} 55% 50%)"


def _svg(height: int, title: str, parts: Sequence[str]) -> str:
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><style>{STYLE}</style>'
    ground = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return "\n".join([head, ground, _text(LEFT, 24, title, css="t"), *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, *, anchor: str = "start", css: str = "", fill: str = "") -> str:
    style = (f' class="{css}"' if css else "") + (f' style="fill:{fill}"' if fill else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _bar(x: float, low: float, high: float, colour: str) -> str:
    ends = f'x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="1.2" opacity="0.55"/>'


def _short(name: str) -> str:
    return name if len(name) <= NAME_CHARS_MAX else f"…{name[1 - NAME_CHARS_MAX :]}"


def points_of(report: Mapping[str, Any], kinds: Mapping[str, str]) -> list[Point]:
    """The points of a report's policies, the oracle among them."""
    every = {"oracle": report["oracle"], **report["policies"]}
    return [
        Point(name, kinds[name], found["usd_per_1k"], found["accuracy"], *found["accuracy_ci"])
        for name, found in every.items()
    ]
