"""The house check fails for each firm limit, and passes where none is exceeded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from pathlib import Path

import pytest

from scripts import house

CALLED = "def start() -> None:\n    stop()\n\n\ndef stop() -> None:\n    start()\n"
LONG = "def run() -> None:\n" + "    print(run)\n" * 61
Check = Callable[[Mapping[str, str]], tuple[int, str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Check]:
    """Run `--check` on a product of the given files; the exit status and what is printed."""

    def run(files: Mapping[str, str]) -> tuple[int, str]:
        for name, source in ({"pyproject.toml": "", "gateway/main.py": CALLED} | dict(files)).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
        status = house.main(["--check"])
        return status, capsys.readouterr().out

    monkeypatch.setattr(house, "ROOT", tmp_path)
    _forget()
    yield run
    _forget()


def _forget() -> None:
    house.modules.cache_clear()
    house.imports.cache_clear()


def test_a_house_within_its_limits_passes(check: Check) -> None:
    assert check({}) == (0, "")


@pytest.mark.parametrize(
    ("files", "row"),
    [
        ({f"gateway/hall/f{n}.py": "" for n in range(house.ROOM_FILES_MAX + 1)}, "files in one room"),
        (
            {"gateway/hall/a.py": "import gateway.hall.b\n", "gateway/hall/b.py": "import gateway.hall.a\n"},
            "cycles of files",
        ),
        (
            {
                "gateway/a/one.py": "import gateway.b.one\n",
                "gateway/b/one.py": "",
                "gateway/b/two.py": "import gateway.a.two\n",
                "gateway/a/two.py": "",
            },
            "cycles of rooms",
        ),
        (
            {f"gateway/core/{room}/x.py": "" for room in "abcdef"}
            | {f"gateway/core/{a}/{b}.py": f"import gateway.core.{b}.x\n" for a, b in combinations("abcdef", 2)},
            "arrows between rooms: core",
        ),
        (
            {f"{package}/{n}.py": f"class Row{n}: ...\n" for package in house.PACKAGES for n in range(6)}
            | {"gateway/uses.py": "Row0, Row1, Row2, Row3, Row4, Row5\n"},
            "public class names used twice",
        ),
        ({"gateway/a.py": "LIMIT = 1\n"}, "definitions without a caller in the product"),
        ({"gateway/a.py": LONG}, "function lines: longest"),
    ],
)
def test_each_firm_limit_fails_the_check(check: Check, files: Mapping[str, str], row: str) -> None:
    status, printed = check(files)
    assert status == 1
    assert [line.partition(" is ")[0] for line in printed.splitlines()] == [f"house: {row}"]


def test_the_check_is_part_of_make_check() -> None:
    root = Path(__file__).resolve().parents[1]
    assert "\n.venv/bin/python -m scripts.house --check\n" in (root / "scripts" / "check").read_text(encoding="utf-8")
