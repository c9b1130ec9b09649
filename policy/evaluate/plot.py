"""Every picture of the project as SVG: accuracy over dollars, shares of workers, rounds, lines in panels, ratios.

Pure. A picture is a list of SVG elements that `_svg` puts on a white ground; positions are pixels, y points down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 1000, 560
LEFT, RIGHT, TOP, BOTTOM = 64, 400, 40, 56  # margins; the list of names stands in the right one
USD_FLOOR = 1e-3  # a logarithm has no zero: cheaper points stand at the left edge
COLOURS = {"fixed": "#8a8f98", "router": "#2f6fde", "tuned": "#8f4bd8", "conductor": "#d4351c", "endpoint": "#c98a00",
           "oracle": "#1d8a4c"}  # fmt: skip
WORKER_COLOURS = ("#2f6fde", "#d4351c", "#1d8a4c", "#c98a00", "#8f4bd8", "#0e8f9c", "#d0559a", "#6b7280", "#7a5230")
LINE_COLOURS = ("#d4351c", "#8a8f98", "#1d8a4c")
DASHES = {"oracle": "2 4", "router": "7 4", "fixed": "1 3"}
LINE_PX, LABEL_PX, PANEL_PX, RATIO_PX = 19, 15, 170, 26  # heights: a line of the list, a name, a panel, a bar
ROUND_HEIGHT, ROUND_WIDTH, ROUND_LEFT, ROUND_TOP, ROUND_GAP = 400, 360, 60, 52, 90
ROUND_NAMES_X = ROUND_LEFT + 2 * ROUND_WIDTH + ROUND_GAP + 8
NAME_CHARS_MAX = 34
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1f2430}.t{font-size:15px;font-weight:600}.s{fill:#5b6270}"
    ".g{stroke:#e4e6eb}.n{font-size:11px;font-weight:600}.c{fill:none;stroke:#1f2430;stroke-dasharray:4 3;opacity:.45}"
)


# ---------------------------------------------------------------- accuracy over dollars


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
        x, _ = where[point.name]
        parts.append(_bar(x, axes.y(point.low), axes.y(point.high), COLOURS[point.kind]))
    places: list[tuple[float, float]] = []
    for number, point in enumerate(ranked, 1):
        x, y = where[point.name]
        places.append(_free(x, y, places))
        parts += _marker(number, point, x, y, places[-1])
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
                parts.append(_line((x, TOP), (x, bottom), 'class="g"'))
                parts.append(_text(x, bottom + 18, f"${tick:g}", anchor="middle", css="s"))
    step = _step(axes.accuracy[1] - axes.accuracy[0])
    for index in range(math.ceil(axes.accuracy[0] / step), math.floor(axes.accuracy[1] / step) + 1):
        y = axes.y(index * step)
        parts.append(_line((LEFT, y), (right, y), 'class="g"'))
        parts.append(_text(LEFT - 8, y + 4, f"{index * step:.2f}", anchor="end", css="s"))
    middle = (LEFT + right) / 2
    return [*parts, _text(middle, HEIGHT - 14, "dollars per 1,000 questions (logarithmic)", anchor="middle", css="s")]


def _step(span: float) -> float:
    return next((step for step in (0.01, 0.02, 0.05, 0.1) if span / step <= 9), 0.2)


def _curve(members: Sequence[str], where: Mapping[str, tuple[float, float]]) -> str:
    return _path(sorted(where[name] for name in members if name in where), 'class="c"')


def _free(x: float, y: float, places: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Where a number stands beside its dot: the first of four corners that no other number covers."""
    corners = [(x + right, y + down) for right, down in ((7, -5), (7, 13), (-20, -5), (-20, 13))]
    return next((c for c in corners if all(abs(c[0] - a) > 15 or abs(c[1] - b) > 11 for a, b in places)), corners[0])


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


def points_of(report: Mapping[str, Any], kinds: Mapping[str, str]) -> list[Point]:
    """The points of a report's policies, the oracle among them."""
    every = {"oracle": report["oracle"], **report["policies"]}
    return [
        Point(name, kinds[name], row["usd_per_1k"], row["accuracy"], *row["accuracy_ci"]) for name, row in every.items()
    ]


# ---------------------------------------------------------------- who was called


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


# ---------------------------------------------------------------- rounds of learning


class RoundScore(Protocol):
    """What a policy scored after a round: the share right with its interval, and dollars per 1,000 requests."""

    @property
    def accuracy(self) -> float:
        """Share right, in [0, 1]."""
        ...

    @property
    def low(self) -> float:
        """Lower end of its interval."""
        ...

    @property
    def high(self) -> float:
        """Upper end."""
        ...

    @property
    def usd_per_1k(self) -> float:
        """Dollars per 1,000 requests."""
        ...


def rounds(
    curve: Sequence[RoundScore],
    others: Mapping[str, RoundScore],
    title: str,
    tries: Sequence[str] = (),
    bars: str = "95 % intervals",
) -> str:
    """Accuracy and dollars over rounds, beside policies that do not learn. `curve`: the live version after each round,
    the cold start first; `others`: by name. `tries`: the end of each round's job, shown under its point. `bars`: what
    the intervals of the scores are."""
    most = max(score.usd_per_1k for score in (*curve, *others.values())) * 1.15 or 1.0
    right = _RoundPanel(ROUND_LEFT, 1.0, 0.2, len(curve), "{:.1f}")
    spent = _RoundPanel(ROUND_LEFT + ROUND_WIDTH + ROUND_GAP, most, _usd_step(most), len(curve), "${:.2f}")
    parts = [
        *right.frame(f"right, of 1, with {bars}", tries),
        *spent.frame("dollars per 1,000 requests", tries),
        *right.levels(others, lambda score: score.accuracy),
        *spent.levels(others, lambda score: score.usd_per_1k, named=False),
        *(_bar(right.x(at), right.y(one.low), right.y(one.high), COLOURS["conductor"]) for at, one in enumerate(curve)),
        *right.line([score.accuracy for score in curve]),
        *spent.line([score.usd_per_1k for score in curve]),
    ]
    return _svg(ROUND_HEIGHT, title, parts)


def kind_of(name: str) -> str:
    """The kind of a baseline, which gives its colour."""
    return "oracle" if name == "oracle" else "fixed" if name.startswith("fixed:") else "router"


def _usd_step(most: float) -> float:
    power: float = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (0.2, 0.5, 1.0, 2.0) if most / (step * power) <= 6)


class _RoundPanel:
    """One plane: rounds to the right, a quantity from 0 to `most` upwards."""

    def __init__(self, left: float, most: float, step: float, points: int, label: str) -> None:
        self._left, self._most, self._step, self._points, self._label = left, most, step, points, label
        self._bottom = ROUND_HEIGHT - BOTTOM

    def x(self, index: int) -> float:
        return self._left + ROUND_WIDTH * (index + 0.5) / self._points

    def y(self, value: float) -> float:
        return self._bottom - value / self._most * (self._bottom - ROUND_TOP)

    def frame(self, name: str, tries: Sequence[str]) -> list[str]:
        """Grid, numbers, names of both axes."""
        end, parts = self._left + ROUND_WIDTH, [_text(self._left, ROUND_TOP - 12, name, css="s")]
        for index in range(math.floor(self._most / self._step + 1e-9) + 1):
            y = self.y(index * self._step)
            parts.append(_line((self._left, y), (end, y), 'class="g"'))
            parts.append(_text(self._left - 6, y + 4, self._label.format(index * self._step), anchor="end", css="s"))
        for index in range(self._points):
            number = "cold" if index == 0 else str(index)
            parts.append(_text(self.x(index), self._bottom + 16, number, anchor="middle", css="s"))
            if 0 < index <= len(tries) and tries[index - 1] != "done":
                parts.append(_text(self.x(index), self._bottom + 29, tries[index - 1], anchor="middle", css="s"))
        return [*parts, _text(self._left + ROUND_WIDTH / 2, ROUND_HEIGHT - 10, "rounds", anchor="middle", css="s")]

    def levels(
        self, others: Mapping[str, RoundScore], of: Callable[[RoundScore], float], *, named: bool = True
    ) -> list[str]:
        """Lines across for policies that do not learn; names at the right of both panels, none on another."""
        parts, free_y = [], math.inf
        for name, score in sorted(others.items(), key=lambda item: of(item[1])):
            y, kind = self.y(of(score)), kind_of(name)
            dash = f'stroke="{COLOURS[kind]}" stroke-dasharray="{DASHES[kind]}" stroke-width="1.6"'
            parts.append(_line((self._left, y), (self._left + ROUND_WIDTH, y), dash, name))
            if named:
                free_y = min(y + 4, free_y - LABEL_PX)
                parts.append(_line((ROUND_NAMES_X, free_y - 4), (ROUND_NAMES_X + 18, free_y - 4), dash))
                parts.append(_text(ROUND_NAMES_X + 24, free_y, name))
        return parts

    def line(self, values: Sequence[float]) -> list[str]:
        """The learner, with its last value."""
        colour = COLOURS["conductor"]
        where = [(self.x(index), self.y(value)) for index, value in enumerate(values)]
        dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in where]
        x, y = where[-1]
        return [_trace(where, colour), *dots, _text(x + 8, y - 8, self._label.replace(".1f", ".2f").format(values[-1]))]


# ---------------------------------------------------------------- shares over time


@dataclass(frozen=True, slots=True)
class Panel:
    """Shares in [0, 1] over a count that runs from 0 to `end`. `lines`: points (count, share) by name; `marks`: counts
    at which something happened, by its name."""

    title: str
    end: float
    lines: Mapping[str, Sequence[tuple[float, float]]]
    marks: Mapping[str, float]


def panels(title: str, every: Sequence[Panel]) -> str:
    """The panels one under the other. Lines of one name have the same colour in all."""
    parts = [part for index, panel in enumerate(every) for part in _panel(TOP + index * PANEL_PX, panel)]
    return _svg(TOP + len(every) * PANEL_PX + 10, title, parts)


def _panel(top: int, panel: Panel) -> list[str]:
    bottom, height, right = top + PANEL_PX - 36, PANEL_PX - 62, WIDTH - 90
    x_step = (right - LEFT) / max(1.0, panel.end)
    parts = [_text(LEFT, top + 12, panel.title, css="s")]
    for tick in (0.0, 0.5, 1.0):
        y = bottom - tick * height
        parts.append(_line((LEFT, y), (right, y), 'class="g"'))
        parts.append(_text(LEFT - 8, y + 4, f"{tick:.0%}", anchor="end", css="s"))
    for name, at in panel.marks.items():
        x = LEFT + at * x_step
        parts.append(_line((x, bottom - height), (x, bottom), 'stroke="#5b6270"'))
        parts.append(_text(x, bottom + 16, name, anchor="middle", css="s"))
    for row, (name, points) in enumerate(panel.lines.items()):
        colour = LINE_COLOURS[row]
        parts.append(_trace([(LEFT + at * x_step, bottom - share * height) for at, share in points], colour))
        parts.append(_text(right + 10, bottom - height + 14 + 16 * row, name, fill=colour))
    return parts


# ---------------------------------------------------------------- ratios


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio above 0 with the least and the most of its rounds. `marked`: in the colour of the project."""

    name: str
    value: float
    low: float
    high: float
    marked: bool = False


def ratios(title: str, every: Sequence[Ratio]) -> str:
    """Bars on a logarithmic axis, one under the other, with a line at 1. Raises ValueError if there are none."""
    least, most = min(one.low for one in every), max(one.high for one in every)
    low, high = math.log10(min(least, 1.0)) - 0.1, math.log10(max(most, 1.0)) + 0.1
    left, right, bottom = 260, WIDTH - 120, TOP + 12 + RATIO_PX * len(every)

    def x(value: float) -> float:
        return left + (math.log10(value) - low) / (high - low) * (right - left)

    parts = []
    for exponent in range(math.ceil(low), math.floor(high) + 1):
        parts.append(_line((x(10.0**exponent), TOP), (x(10.0**exponent), bottom), 'class="g"'))
        parts.append(_text(x(10.0**exponent), bottom + 16, f"{10.0**exponent:g} ×", anchor="middle", css="s"))
    for row, one in enumerate(every):
        y = TOP + 12 + row * RATIO_PX
        colour = COLOURS["conductor" if one.marked else "fixed"]
        box = f'x="{left}" y="{y}" width="{x(one.value) - left:.1f}" height="{RATIO_PX - 10}" fill="{colour}"'
        parts += [f"<rect {box}/>", _text(left - 10, y + 12, _short(one.name), anchor="end")]
        parts.append(_line((x(one.low), y + 8), (x(one.high), y + 8), 'stroke="#1f2430" stroke-width="1.2"'))
        parts.append(_text(max(x(one.value), x(one.high)) + 8, y + 12, f"{one.value:.3g} ×"))
    parts.append(_line((x(1.0), TOP), (x(1.0), bottom), 'stroke="#5b6270"'))
    return _svg(bottom + 30, title, parts)


# ---------------------------------------------------------------- SVG elements


def _svg(height: int, title: str, parts: Sequence[str]) -> str:
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><style>{STYLE}</style>'
    ground = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return "\n".join([head, ground, _text(LEFT, 24, title, css="t"), *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, *, anchor: str = "start", css: str = "", fill: str = "") -> str:
    style = (f' class="{css}"' if css else "") + (f' style="fill:{fill}"' if fill else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _line(start: tuple[float, float], end: tuple[float, float], style: str, title: str = "") -> str:
    ends = f'x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
    return f"<line {ends} {style}><title>{escape(title)}</title></line>" if title else f"<line {ends} {style}/>"


def _path(points: Sequence[tuple[float, float]], style: str) -> str:
    return f'<polyline {style} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _trace(points: Sequence[tuple[float, float]], colour: str) -> str:
    return _path(points, f'fill="none" stroke="{colour}" stroke-width="2"')


def _bar(x: float, low: float, high: float, colour: str) -> str:
    return _line((x, low), (x, high), f'stroke="{colour}" stroke-width="1.2" opacity="0.55"')


def _short(name: str) -> str:
    return name if len(name) <= NAME_CHARS_MAX else f"…{name[1 - NAME_CHARS_MAX :]}"
