"""`python -m tests.fuzz TARGET [--seconds S]`: one target under atheris. Exit status 1 and the input, where it breaks.

What was found interesting is kept in build/fuzz/TARGET, so that the next run goes on from there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["gateway"]):
    from tests.fuzz.targets import SEEDS, TARGETS

KEPT = Path(__file__).resolve().parents[2] / "build" / "fuzz"
INPUT_BYTES_MAX = 8192
INPUT_S_MAX = 5  # one input that takes longer is a finding: nothing here may be slow


def main() -> None:
    """Fuzz one target for the time that was given."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    options.add_argument("target", choices=TARGETS)
    options.add_argument("--seconds", type=int, default=60)
    asked = options.parse_args()
    corpus = KEPT / asked.target
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS[asked.target]):
        (corpus / f"seed-{number}").write_bytes(seed)
    bounds = [f"-max_total_time={asked.seconds}", f"-max_len={INPUT_BYTES_MAX}", f"-timeout={INPUT_S_MAX}"]
    quiet = ["-print_final_stats=1", "-verbosity=0", f"-artifact_prefix={KEPT}/{asked.target}-"]
    atheris.Setup([sys.argv[0], *bounds, *quiet, str(corpus)], TARGETS[asked.target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
