"""The pictures of docs/benchmarks.md, from the figures of its parts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.suite.parts.gateways import BATON, MANY, PEERS, STREAM
from bench.suite.parts.plans import FRAMEWORKS, PLANS
from policy.evaluate.plot import Ratio, ratios

CPU = "cpu_us"


def of(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Picture → SVG, for the parts that were measured and have something to compare."""
    every = {}
    if "gateways" in figures:
        bars = _gateways(figures["gateways"]["ratios"])
        every["gateways"] = ratios("Processor time of a request, as a multiple of Baton’s", bars)
    if "plans" in figures:
        bars = _plans(figures["plans"]["ratios"])
        every["plans"] = ratios("Processor time of a plan of three steps and a merge, as a multiple of Baton’s", bars)
    return every


def _gateways(found: Mapping[str, Any]) -> list[Ratio]:
    bars = [Ratio("Baton", 1.0, 1.0, 1.0, marked=True)]
    for peer in PEERS:
        for cell, shown in ((MANY, peer.shown), (STREAM, f"{peer.shown}, streams")):
            if values := found.get(peer.name, {}).get(cell, {}).get(CPU):
                bars.append(Ratio(shown, *values))
    return bars


def _plans(found: Mapping[str, Any]) -> list[Ratio]:
    names = [name for name in FRAMEWORKS if name in found]
    bars = [Ratio(FRAMEWORKS[name][0], *found[name][PLANS][CPU]) for name in names]
    return [Ratio(BATON.capitalize(), 1.0, 1.0, 1.0, marked=True), *bars]
