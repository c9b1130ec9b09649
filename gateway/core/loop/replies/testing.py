"""Tests of a reply's code: the program that the jail runs, and the tests that a request itself holds. Pure.

The code runs as a module, not as the main program, and may not end the tests by leaving: `sys.exit()` at its end is
common, and would pass for a success.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

CANDIDATE = """\
__name__ = "candidate"
try:
    exec(compile(open("candidate.py").read(), "candidate.py", "exec"))
except SystemExit:
    pass"""
_FILES = """\
_defined = set(globals())
for _file in {names!r}:
    exec(compile(open(_file).read(), _file, "exec"))
for _test in [value for name, value in globals().items() if name.startswith("test") and name not in _defined]:
    if callable(_test):
        _test()"""
_NAMED = re.compile(r"```[A-Za-z0-9_+-]*[ \t]+([\w.-]{1,64})[ \t]*\n(.*?)```", re.DOTALL)
_IS_TEST = re.compile(r"(?:test_[\w-]+|[\w-]+_test|tests?)\.py")


def program_of(tests: Sequence[str]) -> str:
    """The program that runs tests, each a program, on the code in `candidate.py`."""
    return "\n".join([CANDIDATE, *tests])


def program_of_files(names: Sequence[str]) -> str:
    """The program that runs files of tests on the code in `candidate.py`: what they say, then each of their functions
    `test…`, without arguments."""
    return "\n".join([CANDIDATE, _FILES.format(names=list(names))])


def named_files(texts: Iterable[str]) -> dict[str, str]:
    """The files that texts hold: fences with a name behind the language. Of two of one name the later one counts."""
    return {name: text for each in texts for name, text in _NAMED.findall(each)}


def tests_among(files: Mapping[str, str]) -> list[str]:
    """The names of the files that are tests by Python's usual names: `tests.py`, `test_….py`, `…_test.py`."""
    return sorted(name for name in files if _IS_TEST.fullmatch(name))
