"""Short answers as values: numbers, fractions, quantities, sets, lists and closed expressions. Pure.

Rational numbers compare exactly. Expressions with powers, roots, π or variables are evaluated at fixed points and
compare to 10⁻⁹. Nothing of a reply is executed: `ast` parses an expression and its tree is evaluated here, with bounds
on its length and its powers. A text that is no value is compared as text.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from gateway.core.loop.replies.answers import normalise

VALUE_CHARS_MAX = 200
POWER_MAX = 64.0
TOLERANCE = 1e-9
POINTS = (0.7316, 1.9137, 3.4142)  # every variable takes these values in turn, each a little off for its name


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with a unit. `dimension`: `length`, `time`, …; the unit's own word where it is not known. `size`: in the
    base unit of the dimension; `number`: as written."""

    dimension: str
    size: Fraction
    number: Fraction


@dataclass(frozen=True, slots=True)
class Items:
    """A list (`[…]`, `(…)`) or a set (`{…}`) of values and texts. `opened` is its bracket."""

    opened: str
    items: tuple[Any, ...]


Value = Fraction | Quantity | Items | tuple[float, ...]  # floats: an expression at `POINTS`


def same_answer(a: str, b: str) -> bool | None:
    """Whether two short answers are equal: as texts in their normal form, or as values. None where that cannot be said,
    such as of `12 apples` and `12 pears`."""
    if normalise(a) == normalise(b):
        return True
    first, second = value_of(a), value_of(b)
    return False if first is None or second is None else _same(first, second)


def value_of(answer: str) -> Value | None:
    """The value of a short answer; None for text."""
    if len(answer) > VALUE_CHARS_MAX:
        return None
    text = _plain(answer)
    for read in (_rational, _items, _quantity, _expression):
        value = read(text)
        if value is not None:
            return value
    return None


def _same(a: Value, b: Value) -> bool | None:
    if isinstance(a, Items) and isinstance(b, Items):
        return a.opened == b.opened and len(a.items) == len(b.items) and _same_items(a, b)
    if isinstance(a, Items) or isinstance(b, Items):
        return False
    if isinstance(a, Quantity) and isinstance(b, Quantity):
        alike = a.dimension == b.dimension
        return a.size == b.size if alike else (None if a.size == b.size else False)
    if isinstance(a, Quantity):
        return _same_number(a, b)
    if isinstance(b, Quantity):
        return _same_number(b, a)
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    return all(math.isclose(x, y, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for x, y in _points(a, b))


def _same_number(quantity: Quantity, bare: Value) -> bool | None:
    """Whether a quantity is a number without a unit: `47 days` is 47, `50%` is 50 and 0.5; `5 km` may be 5000."""
    percent = quantity.number / 100 if quantity.dimension == "%" else quantity.number
    return True if bare in (quantity.number, percent) else (None if bare == quantity.size else False)


def _same_items(a: Items, b: Items) -> bool:
    if a.opened == "{":
        return all(any(_same_item(x, y) for y in b.items) for x in a.items)
    return all(_same_item(x, y) for x, y in zip(a.items, b.items, strict=True))


def _same_item(a: Any, b: Any) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return bool(a == b)
    return _same(a, b) is True


def _points(a: Fraction | tuple[float, ...], b: Fraction | tuple[float, ...]) -> Sequence[tuple[float, float]]:
    first = (_float(a),) * len(POINTS) if isinstance(a, Fraction) else a
    second = (_float(b),) * len(POINTS) if isinstance(b, Fraction) else b
    return list(zip(first, second, strict=True))


def _float(number: Fraction) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


# ---------------------------------------------------------------- reading

_WORDS = (("\\left", ""), ("\\right", ""), ("\\cdot", "*"), ("\\times", "*"), ("\\pi", " pi "), ("π", " pi "))
_SIGNS = (("−", "-"), ("{,}", ","), ("\\,", ""), ("\\!", ""), ("\\;", ""), ("\\ ", " "), ("\\$", ""), ("\\%", "%"))
_MIXED = re.compile(r"(?<![\w.)}])(\d{1,9})\s*\\[dt]?frac\{(\d{1,9})\}\{(\d{1,9})\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_ROOT = re.compile(r"\\sqrt\s*(?:\{([^{}]*)\}|(\w))")
_NAME_IS = re.compile(r"^\$?[A-Za-z]\s*=(?!=)\s*")
_NAMED = re.compile(r"\\(?:text|mathrm|mathbf)\s*\{([^{}]*)\}")
_NUMBER = r"[+-]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_RATIONAL = re.compile(rf"[$€£]?({_NUMBER})(?:\s*/\s*(\d+))?", re.ASCII)
_LATEX_RATIONAL = re.compile(rf"([+-]?)\(\(({_NUMBER})\)/\((\d+)\)\)", re.ASCII)
_QUANTITY = re.compile(rf"({_NUMBER})(?:\s*/\s*(\d+))?\s*(%|[A-Za-zµ][A-Za-zµ ]*)", re.ASCII)


def _plain(answer: str) -> str:
    """An answer without wrapping and without LaTeX: fractions and roots as `(a)/(b)` and `sqrt(a)`."""
    text = answer.strip().strip("`*").strip().rstrip(".").strip()
    text = _NAME_IS.sub("", text).removeprefix("\\(").removesuffix("\\)").strip("$ ") if text.count("$") != 1 else text
    for old, new in (*_WORDS, *_SIGNS):
        text = text.replace(old, new)
    text = _MIXED.sub(r"(\1+\2/\3)", _NAMED.sub(r" \1", text))
    before = None
    while before != text:  # from the inside out
        before = text
        text = _ROOT.sub(lambda m: f"sqrt({m[1] or m[2]})", text)
        text = _FRACTION.sub(lambda m: f"(({m[1] or m[2]})/({m[3] or m[4]}))", text)
    return text.strip()


def _fraction(number: str, bottom: str | None) -> Fraction | None:
    below = int(bottom or 1)
    return Fraction(number.replace(",", "")) / below if below else None


def _rational(text: str) -> Fraction | None:
    if match := _LATEX_RATIONAL.fullmatch(text):
        size = _fraction(match[2], match[3])
        return -size if size is not None and match[1] == "-" else size
    plain = _RATIONAL.fullmatch(text.replace("-$", "$-"))
    return None if plain is None else _fraction(plain[1], plain[2])


# ---------------------------------------------------------------- lists and sets

_CLOSING = {"{": "}", "[": "]", "(": ")"}


def _items(text: str) -> Items | None:
    text = text.replace("\\{", "{").replace("\\}", "}")
    if len(text) < 2 or _CLOSING.get(text[0]) != text[-1]:
        return None
    parts = _split(text[1:-1])
    if parts is None or (len(parts) == 1 and text[0] == "("):
        return None
    return Items(text[0], tuple(value if (value := value_of(part)) is not None else normalise(part) for part in parts))


def _split(text: str) -> list[str] | None:
    """The parts between the commas outside all brackets; None where brackets do not match."""
    parts, depth, begin = [], 0, 0
    for at, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth < 0:
            return None
        if sign == "," and not depth:
            parts.append(text[begin:at])
            begin = at + 1
    return [*parts, text[begin:]] if not depth and text.strip() else (None if depth else [])


# ---------------------------------------------------------------- quantities

_SCALES = {"k": Fraction(1000), "c": Fraction(1, 100), "m": Fraction(1, 1000), "µ": Fraction(1, 10**6)}
_BASES = {"m": "length", "g": "mass", "s": "time", "l": "volume", "L": "volume"}
_SECONDS = {"sec": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hr": 3600, "hour": 3600, "day": 86_400}
_LENGTHS = {"meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km", "centimeter": "cm", "centimetre": "cm"}
_OTHERS = {"gram": "g", "kilogram": "kg", "liter": "l", "litre": "l", "percent": "%"}
_SPELLED = _LENGTHS | _OTHERS


def _units() -> dict[str, tuple[str, Fraction]]:
    units = {base: (of, Fraction(1)) for base, of in _BASES.items()}
    units |= {f"{p}{base}": (of, scale) for base, of in _BASES.items() for p, scale in _SCALES.items()}
    units |= {name: ("time", Fraction(seconds)) for name, seconds in _SECONDS.items()}
    return units | {name: units.get(unit, (unit, Fraction(1))) for name, unit in _SPELLED.items()}


_UNITS: Mapping[str, tuple[str, Fraction]] = _units()


def _quantity(text: str) -> Quantity | None:
    match = _QUANTITY.fullmatch(text)
    size = None if match is None else _fraction(match[1], match[2])
    if match is None or size is None or (len(match[3]) == 1 and not text[match.end(1)].isspace() and match[3] in "xyz"):
        return None
    unit = " ".join(match[3].split())
    unit_of = _UNITS.get(unit) or _UNITS.get(unit.lower().removesuffix("s"))
    dimension, scale = unit_of or (unit.lower().removesuffix("s"), Fraction(1))
    return Quantity(dimension, size * scale, size)


# ---------------------------------------------------------------- expressions

_IMPLIED = re.compile(r"(?<=[0-9)])\s*(?=[A-Za-z(])|(?<=\))(?=[0-9])")
_EXPRESSION = re.compile(r"[0-9A-Za-z+\-*/^(). ]+", re.ASCII)
_TELLING = re.compile(
    r"[+*^]|sqrt|\bpi\b|[A-Za-z]\s*[-/]|[-/(]\s*[A-Za-z]|\d[A-Za-z]"
)  # no date and no range has these
_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: lambda x, y: x**y if abs(y) <= POWER_MAX else math.nan,
}


def _expression(text: str) -> tuple[float, ...] | None:
    body = text.replace("{", "(").replace("}", ")").strip()
    if not _EXPRESSION.fullmatch(body) or not _TELLING.search(body):
        return None
    try:
        tree = ast.parse(_IMPLIED.sub("*", body).replace("sqrt*(", "sqrt(").replace("^", "**"), mode="eval").body
        values = tuple(_at(tree, point) for point in POINTS)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None
    return values if all(map(math.isfinite, values)) else None


def _at(node: ast.expr, point: float) -> float:
    """The value of a node where its variables are near `point`. Raises ValueError for what is no arithmetic."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.Name) and node.id == "pi":
        return math.pi
    if isinstance(node, ast.Name) and len(node.id) == 1:
        return point + ord(node.id) / 1000
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return -_at(node.operand, point) if isinstance(node.op, ast.USub) else _at(node.operand, point)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_at(node.left, point), _at(node.right, point))
        if isinstance(value, complex):
            raise ValueError("no real number")
        return value
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "sqrt"
        and len(node.args) == 1
    ):
        return math.sqrt(_at(node.args[0], point))
    raise ValueError("no arithmetic")
