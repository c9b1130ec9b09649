"""B1: schemathesis drives both listeners by their own OpenAPI: no 5xx, and nothing that it does not describe."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.security.gateway import Gateway
from tests.security.report import measured
from tests.sizes import report_row, sized

CASES_MIN = sized(small=50, ci=3_000, long=20_000)  # of both listeners together
EXAMPLES = sized(  # per operation, beside those that cover each bound of each field
    small={False: 2, True: 2}, ci={False: 80, True: 16}, long={False: 800, True: 300}
)
PHASES = sized(small="examples,fuzzing", ci="examples,coverage,fuzzing", long="examples,coverage,fuzzing")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
SEED = "20261120"
TIMEOUT_S = sized(ci=380, long=3_000)  # on a machine that is busy; alone it takes a tenth of that
cases: list[int] = []


@pytest.mark.sized
@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize("admin", [False, True])
def test_every_route_keeps_to_its_description(gateway: Gateway, tmp_path: Path, admin: bool) -> None:
    _, secret = gateway.key("admin" if admin else "data", name="schemathesis")
    url = gateway.admin if admin else gateway.public
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"]
    command += ["-H", f"Authorization: Bearer {secret}", "--phases", PHASES, "--checks", CHECKS]
    command += ["--max-examples", str(EXAMPLES[admin]), "--seed", SEED, "--workers", "1", "--no-color"]
    command += ["--warnings", "off", "--suppress-health-check", "all", "--continue-on-failure"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    told = done.stdout[-6_000:] + done.stderr[-2_000:]
    assert done.returncode == 0, told
    found = re.search(r"([\d,]+) generated", done.stdout)
    assert found is not None, told
    cases.append(int(found[1].replace(",", "")))
    measured("B1", f"{'admin' if admin else 'public'} listener: {cases[-1]} cases, 0 × 5xx, 0 schema drift")
    if len(cases) == len(EXAMPLES):
        assert sum(cases) >= CASES_MIN
        report_row("B1", cases=sum(cases), server_errors=0, drift=0)
