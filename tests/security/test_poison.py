"""S9 and `train: false`, through the real log and the real export: what one key can do to what is learned."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from sqlalchemy import text

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.database import sync_engine
from gateway.adapters.postgres.inserts import insert_outcome, insert_rows
from gateway.core.log.rollout import as_payload
from policy.dataset.curate import load
from policy.dataset.export import export
from policy.dataset.rules import Rules
from policy.dataset.select import Selection
from tests.policy.dataset_rows import read
from tests.records import T0_US, a_rollout, a_round, a_step, an_outcome, event
from tests.security.gateway import Gateway, ask
from tests.security.report import measured

HONEST_KEYS, EACH = 25, 8
SHARE_MAX = 0.05


def test_a_key_that_floods_half_of_the_log_gets_a_twentieth_of_the_batch(database_url: str, tmp_path: Path) -> None:
    engine = sync_engine(database_url)
    honest = [(f"honest{n % HONEST_KEYS}", float(n % 2)) for n in range(HONEST_KEYS * EACH)]
    eve = [("eve", 1.0)] * len(honest)
    with engine.begin() as connection:
        for n, (key, value) in enumerate(honest + eve):
            asked = {"model": "baton", "messages": [{"role": "user", "content": f"TaskQuestion {n}?"}]}
            record = a_rollout(key_id=key, request=asked, created_us=T0_US + n, steps=[a_step(0)], rounds=[a_round()])
            insert_rows(connection, rows.event_rows(event("rollout", as_payload(record))))
            insert_outcome(connection, an_outcome(record.id, value, key_id=key, created_at=rows.at(T0_US)))
    engine.dispose()
    report = export(database_url, Selection(), Rules(), tmp_path / "batch.parquet")
    batch = Counter(row.key_id for row in load(database_url, Selection(), Rules()).train)
    share = batch["eve"] / batch.total()
    measured(
        "S9", f"eve judged {len(eve)} of {2 * len(honest)} rollouts and has {batch['eve']} of {batch.total()} rows"
    )
    assert batch.total() == report.kept
    assert 0 < share <= SHARE_MAX
    assert report.key_share <= SHARE_MAX
    assert report.left_out["over_key_share"] == len(eve) - batch["eve"] + len(honest) - (batch.total() - batch["eve"])


def test_rollouts_not_for_training_are_in_no_export(gateway: Gateway) -> None:
    """By key, by request, and by a key that was changed after the fact; asked for over HTTP, read as training reads."""
    _, free = gateway.key(name="free")
    _, closed = gateway.key(name="closed", train=False)
    later_id, later = gateway.key(name="later")
    asked: dict[str, str] = {}
    for name, secret, metadata in (
        ("yes", free, {}),
        ("request", free, {"train": "false"}),
        ("key", closed, {}),
        ("overruled", closed, {"train": "true"}),
        ("later", later, {}),
    ):
        with gateway.client(secret) as http:
            reply = http.post("/v1/chat/completions", json=ask(f"May you learn this: {name}?", metadata=metadata))
            assert reply.status_code == 200, reply.text
            asked[name] = reply.headers["x-baton-rollout-id"]
            outcome = {"rollout_id": asked[name], "value": True}
            assert http.post("/v1/outcomes", json=outcome).status_code in (200, 201)
    _, admin = gateway.key("admin")
    with gateway.client(admin, admin=True) as http:
        assert http.patch(f"/admin/keys/{later_id}", json={"train": False}).status_code == 200
    selected = {row.call[0] for row in read(gateway.database_url, Selection(min_outcomes=0))}
    assert {name for name, rollout in asked.items() if rollout in selected} == {"yes"}
    engine = sync_engine(gateway.database_url)
    with engine.connect() as connection:
        marked = connection.execute(
            text("SELECT id::text, train FROM rollouts WHERE id::text = ANY(:ids)"), {"ids": list(asked.values())}
        )
        trains = {str(row[0]): bool(row[1]) for row in marked}
    engine.dispose()
    assert json.dumps({name: trains[rollout] for name, rollout in asked.items()}) == json.dumps(
        {"yes": True, "request": False, "key": False, "overruled": False, "later": True}
    )
