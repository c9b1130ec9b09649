"""Write deploy/grafana/dashboards/*.json: five dashboards over the gateway's metrics, with Grafana's own builders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef

from gateway.files import write_atomic
from scripts.panels import PANELS, Panel

PLACE = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="prometheus")  # of deploy/grafana/provisioning
HEIGHT, STAT_HEIGHT = 8, 4


def file_name(title: str) -> str:
    """The name of a dashboard's file, and its id in URLs."""
    return "baton-" + title.lower().replace(" ", "-")


def built(panel: Panel) -> Any:
    """The panel as a builder of Grafana's."""
    is_number = panel.kind == "number"
    builder: Any = stat.Panel() if is_number else timeseries.Panel()
    builder.title(panel.title).description(panel.says).unit(panel.unit).datasource(SOURCE)
    builder.span(panel.width).height(STAT_HEIGHT if is_number else HEIGHT)
    if not is_number:
        builder.fill_opacity(30 if panel.kind == "stacked" else 5).min(0)
    for number, (query, legend) in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query).legend_format(legend).ref_id(chr(ord("A") + number))
        builder.with_target(
            target.instant() if is_number else target.range_val() if hasattr(target, "range_val") else target.range()
        )
    return builder


def render(title: str) -> str:
    """One dashboard as JSON."""
    board = dashboard.Dashboard(title).uid(file_name(title)).tags(["baton"]).refresh("30s").time("now-6h", "now")
    board.editable().timezone("browser")
    for panel in PANELS[title]:
        board.with_panel(built(panel))
    content = _without_nulls(json.loads(JSONEncoder().encode(board.build())))
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def _without_nulls(value: Any) -> Any:
    """The JSON value without members that are null: Grafana puts its defaults where a member is missing."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def main() -> None:
    """Write every file."""
    PLACE.mkdir(parents=True, exist_ok=True)
    for title in PANELS:
        write_atomic(PLACE / f"{file_name(title)}.json", render(title))


if __name__ == "__main__":
    main()
