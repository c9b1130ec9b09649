"""Code with tests: functions that a task describes, right programs for them, and programs with a bug.

Each family has a parameter K, two right bodies and two with a bug. What a right body returns for drawn arguments makes
the tests; the first SHOWN of them stand in the request, and the grader runs all. A bug that no drawn argument shows is
no bug: the grader decides what is right, here as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

from bench.work.tasks import WorkTask

SHOWN, TESTS = 3, 12  # tests in the request, and in all
OPENINGS = ("Here is the function:", "This should do it.", "A short version:", "I kept it simple:", "")
ENDS = (  # the last words of a reply, which say nothing of its code
    "Let me know if you need tests.",
    "It runs in linear time.",
    "Feel free to ask if anything is unclear.",
    "",
)


@dataclass(frozen=True, slots=True)
class Family:
    """Functions of one argument. K stands for the parameter in `text` and in the bodies."""

    name: str
    argument: str  # its name and annotation
    text: str
    right: tuple[str, str]
    wrong: tuple[str, str]
    draw: Callable[[Random], Any]


def _numbers(draw: Random) -> list[int]:
    return [draw.randint(-12, 20) for _ in range(draw.randint(0, 11))]


def _letters(draw: Random) -> str:
    return "".join(draw.choice("aabbcxyz ") for _ in range(draw.randint(0, 12)))


def _words(draw: Random) -> str:
    return " ".join(draw.choice(("ash", "oak", "elm", "fig", "pine", "willow", "hazel")) for _ in range(9))


def _spans(draw: Random) -> list[list[int]]:
    starts = [draw.randint(0, 60) for _ in range(draw.randint(0, 6))]
    return [[start, start + draw.randint(0, 9)] for start in starts]


def _number(draw: Random) -> int:
    return draw.choice((0, draw.randint(1, 9), draw.randint(10, 5000)))


FAMILIES = (
    Family(
        "count_over", "xs: list[int]", "the number of items in `xs` that are greater than K",
        ("return sum(x > K for x in xs)", "n = 0\nfor x in xs:\n    if x > K:\n        n += 1\nreturn n"),
        ("return sum(x >= K for x in xs)", "return sum(abs(x) > K for x in xs)"), _numbers,
    ),
    Family(
        "rotate", "xs: list[int]", "`xs` rotated to the left by K places",
        ("if not xs:\n    return []\nk = K % len(xs)\nreturn xs[k:] + xs[:k]",
         "return [xs[(i + K) % len(xs)] for i in range(len(xs))]"),
        ("return xs[K:] + xs[:K]", "return [xs[(i - K) % len(xs)] for i in range(len(xs))]"), _numbers,
    ),
    Family(
        "chunks", "xs: list[int]", "`xs` cut into lists of K items, the last one shorter where needed",
        ("return [xs[i:i + K] for i in range(0, len(xs), K)]",
         "out = []\nwhile xs:\n    out.append(xs[:K])\n    xs = xs[K:]\nreturn out"),
        ("return [xs[i:i + K] for i in range(0, len(xs) - K + 1, K)]",
         "return [xs[i:i + K] for i in range(0, len(xs), K) if i + K < len(xs)]"), _numbers,
    ),
    Family(
        "shift", "text: str", "`text` with each letter a to z moved K places on, z followed by a; others stay",
        ("return ''.join(chr((ord(c) - 97 + K) % 26 + 97) if c.islower() else c for c in text)",
         "abc = 'abcdefghijklmnopqrstuvwxyz'\nreturn text.translate(str.maketrans(abc, abc[K:] + abc[:K]))"),
        ("return ''.join(chr(ord(c) + K) if c.islower() else c for c in text)",
         "return ''.join(chr((ord(c) - 97 + K) % 26 + 97) for c in text)"), _letters,
    ),
    Family(
        "kth_largest", "xs: list[int]", "the K-th largest distinct item of `xs`, or None where there are fewer",
        ("found = sorted(set(xs), reverse=True)\nreturn found[K - 1] if len(found) >= K else None",
         "left = set(xs)\nfor _ in range(K - 1):\n    left.discard(max(left, default=None))\n"
         "return max(left, default=None)"),
        ("found = sorted(xs, reverse=True)\nreturn found[K - 1] if len(found) >= K else None",
         "found = sorted(set(xs), reverse=True)\nreturn found[K - 1]"), _numbers,
    ),
    Family(
        "window_sums", "xs: list[int]", "the sums of all K neighbouring items of `xs`, in order",
        ("return [sum(xs[i:i + K]) for i in range(len(xs) - K + 1)]",
         "out = []\nfor end in range(K, len(xs) + 1):\n    out.append(sum(xs[end - K:end]))\nreturn out"),
        ("return [sum(xs[i:i + K]) for i in range(len(xs) - K)]", "return [sum(xs[i:i + K]) for i in range(len(xs))]"),
        _numbers,
    ),
    Family(
        "joined_spans", "spans: list[list[int]]",
        "the sorted spans [start, end], two of them joined wherever the next starts at most K after the other's end",
        ("out = []\nfor start, end in sorted(spans):\n    if out and start <= out[-1][1] + K:\n"
         "        out[-1][1] = max(out[-1][1], end)\n    else:\n        out.append([start, end])\nreturn out",
         "out = []\nfor span in sorted(map(list, spans)):\n    if not out or span[0] - out[-1][1] > K:\n"
         "        out.append(span)\n    elif span[1] > out[-1][1]:\n        out[-1][1] = span[1]\nreturn out"),
        ("out = []\nfor start, end in sorted(spans):\n    if out and start <= out[-1][1] + K:\n"
         "        out[-1][1] = end\n    else:\n        out.append([start, end])\nreturn out",
         "out = []\nfor start, end in spans:\n    if out and start <= out[-1][1] + K:\n"
         "        out[-1][1] = max(out[-1][1], end)\n    else:\n        out.append([start, end])\nreturn out"),
        _spans,
    ),
    Family(
        "common_words", "text: str", "the K most frequent words of `text`, equally frequent ones in order of letters",
        ("words = text.split()\nreturn sorted(set(words), key=lambda w: (-words.count(w), w))[:K]",
         "from collections import Counter\ncounts = Counter(sorted(text.split()))\n"
         "return [word for word, _ in counts.most_common(K)]"),
        ("from collections import Counter\nreturn [word for word, _ in Counter(text.split()).most_common(K)]",
         "words = text.split()\nreturn sorted(set(words), key=lambda w: (words.count(w), w))[-K:]"), _words,
    ),
    Family(
        "every_kth", "xs: list[int]", "every K-th item of `xs`, the first of them being the K-th",
        ("return xs[K - 1::K]", "return [x for i, x in enumerate(xs, 1) if i % K == 0]"),
        ("return xs[::K]", "return xs[K::K]"), _numbers,
    ),
    Family(
        "clipped", "xs: list[int]", "`xs` with each item below -K set to -K and each above K set to K",
        ("return [max(-K, min(K, x)) for x in xs]", "return [K if x > K else -K if x < -K else x for x in xs]"),
        ("return [min(K, x) for x in xs]", "return [x for x in xs if -K <= x <= K]"), _numbers,
    ),
    Family(
        "pairs", "xs: list[int]", "how many pairs of two items of `xs`, at different places, have a sum divisible by K",
        ("return sum((a + b) % K == 0 for i, a in enumerate(xs) for b in xs[:i])",
         "n = 0\nfor i in range(len(xs)):\n    for j in range(i + 1, len(xs)):\n        n += (xs[i] + xs[j]) % K == 0\n"
         "return n"),
        ("return sum((a + b) % K == 0 for i, a in enumerate(xs) for b in xs[i:])",
         "return sum((a + b) % K == 0 for a in xs for b in xs)"), _numbers,
    ),
    Family(
        "in_base", "n: int", "the digits of `n`, which is 0 or more, in base K as a text",
        ("out = ''\nwhile n:\n    n, digit = divmod(n, K)\n    out = str(digit) + out\nreturn out or '0'",
         "return (in_base(n // K) if n >= K else '') + str(n % K)"),
        ("out = ''\nwhile n:\n    n, digit = divmod(n, K)\n    out = str(digit) + out\nreturn out",
         "out = ''\nwhile n:\n    n, digit = divmod(n, K)\n    out += str(digit)\nreturn out or '0'"), _number,
    ),
)  # fmt: skip


def coding_task(number: int, seed: int) -> WorkTask:
    """One task of a family, each with another K before any comes again with other tests."""
    family = FAMILIES[number % len(FAMILIES)]
    k = 2 + number // len(FAMILIES) % 8
    draw = Random(f"{seed} code {number}")
    space: dict[str, Any] = {}
    exec(_source(family, family.right[0], k), space)  # noqa: S102 - one of the bodies above
    given = [family.draw(draw) for _ in range(TESTS)]
    tests = [f"assert {family.name}({one!r}) == {_returned(space, family, one)!r}" for one in given]
    shown = "\n".join(tests[:SHOWN])
    text = (
        f"Write a Python function `{family.name}({family.argument})` that returns "
        f"{family.text.replace('K', str(k))}. These tests must pass:\n\n```python tests.py\n{shown}\n```"
    )

    def reply(right: bool, words: Random) -> str:
        body = words.choice(family.right if right else family.wrong)
        code = f"```python\n{_source(family, body, k)}\n```"
        return "\n\n".join(filter(None, (words.choice(OPENINGS), code, words.choice(ENDS))))

    reference = {"tests": tests, "entry": family.name}
    return WorkTask(f"code-{number}", "code", text, "python", reference, reply)


def _returned(space: dict[str, Any], family: Family, argument: Any) -> Any:
    copied = deepcopy(argument)
    return space[family.name](copied)


def _source(family: Family, body: str, k: int) -> str:
    lines = body.replace("K", str(k)).splitlines()
    return "\n".join([f"def {family.name}({family.argument}):", *(f"    {line}" for line in lines)])
