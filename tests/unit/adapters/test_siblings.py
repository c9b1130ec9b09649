"""Counts over the processes of one gateway, and their metrics as one exposition."""

from __future__ import annotations

from pathlib import Path

from gateway.adapters.host.siblings import SharedCounts
from gateway.cli.process.processes import join_expositions

OWN = b"# HELP a_total What.\n# TYPE a_total counter\na_total 1.0\n"
OTHER = (
    b'# HELP b What.\n# TYPE b gauge\nb{x="}"} 2.0\n'
    b"# HELP a_total What.\n# TYPE a_total counter\na_total 3.0\na_total_created 4.0\n"
)


def test_a_limit_holds_over_all_and_a_successor_begins_at_zero(tmp_path: Path) -> None:
    first, second = (SharedCounts(tmp_path, process, 2).count("x") for process in (0, 1))
    assert [first.try_add(3), second.try_add(3), first.try_add(3), second.try_add(3)] == [True, True, True, False]
    assert (first.total, second.total, second.own) == (3, 3, 1)
    again = SharedCounts(tmp_path, 0, 2).count("x")
    assert (again.own, second.total) == (0, 1)
    again.put(2)
    again.add(-1)
    assert second.total == 2
    assert SharedCounts(tmp_path, 1, 2).count("y").total == 0


def test_samples_of_other_processes_are_labelled_and_stand_with_their_metric() -> None:
    assert join_expositions(OWN, {2: OTHER}).decode().splitlines() == [
        "# HELP a_total What.",
        "# TYPE a_total counter",
        "a_total 1.0",
        'a_total{process="2"} 3.0',
        'a_total_created{process="2"} 4.0',
        "# HELP b What.",
        "# TYPE b gauge",
        'b{process="2",x="}"} 2.0',
    ]
