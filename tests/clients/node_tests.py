"""Each `test("…")` of a `.test.mjs` as a pytest item; a file runs once, in one Node process."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 60
NAMED = re.compile(r'^test\("([^"]+)"', re.MULTILINE)


class NodeFile(pytest.File):
    """A file of `node --test`. `outcomes`: test name → what went wrong, None where nothing did."""

    def __init__(self, *, node: str, facts: Path, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.node = node
        self.facts = facts
        self._outcomes: dict[str, str | None] | None = None

    def collect(self) -> Iterable[pytest.Item]:
        """One item a test."""
        for name in NAMED.findall(self.path.read_text(encoding="utf-8")):
            yield NodeItem.from_parent(self, name=name)

    def outcome(self, name: str) -> str | None:
        """Runs the file first, if it has not run. Raises KeyError for a test that Node did not report."""
        if self._outcomes is None:
            self._outcomes = self._run()
        return self._outcomes[name]

    def _run(self) -> dict[str, str | None]:
        known = json.loads(self.facts.read_text())
        with tempfile.NamedTemporaryFile(suffix=".xml") as report:
            command = [self.node, "--import", "./loopback.mjs", "--test", "--test-reporter=junit"]
            done = subprocess.run(
                [*command, f"--test-reporter-destination={report.name}", self.path.name],
                cwd=self.path.parent,
                env={"BASE_URL": known["base_url"], "KEY": known["key"], "BROKE_KEY": known["broke_key"]},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            text = Path(report.name).read_text()
        if not text:
            raise AssertionError(f"{self.path.name} did not run:\n{done.stdout}{done.stderr}")
        cases = ET.fromstring(text).iter("testcase")  # noqa: S314  Node's own report
        return {case.attrib["name"]: _failure(case) for case in cases}


class NodeItem(pytest.Item):
    """One test of the file."""

    parent: NodeFile

    def runtest(self) -> None:
        """Fails with Node's own report of the failure."""
        failure = self.parent.outcome(self.name)
        if failure is not None:
            raise NodeFailure(failure)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        """Without the Python frames, which say nothing."""
        return str(excinfo.value) if excinfo.errisinstance(NodeFailure) else str(super().repr_failure(excinfo, style))


class NodeFailure(Exception):
    """What Node said went wrong."""


def _failure(case: ET.Element) -> str | None:
    found = case.find("failure")
    return None if found is None else f"{found.attrib.get('message', '')}\n{found.text or ''}"
