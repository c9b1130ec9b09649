"""The compose file and the image speak of settings that exist, and pin what they run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from gateway.config import Settings, variable

ROOT = Path(__file__).resolve().parents[2]
KNOWN = {variable(name) for name in Settings.model_fields} | {"DATABASE_URL", "REDIS_URL"}


def _compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return found


def test_every_variable_is_a_setting() -> None:
    given = set(_compose()["services"]["gateway"]["environment"])
    assert {"DATABASE_URL", "REDIS_URL", "BATON_CONDUCTOR"} <= given <= KNOWN
    image = re.findall(r"\b(BATON_[A-Z_]+)=", (ROOT / "Dockerfile").read_text())
    assert set(image) <= KNOWN
    assert "BATON_DATA_DIR" in image


def test_every_image_has_a_version() -> None:
    images = [service["image"] for service in _compose()["services"].values() if "image" in service]
    assert len(images) == 3
    assert all(re.search(r":v?[a-z]*\d", image) for image in images)


def test_the_admin_listener_is_published_to_this_machine_only() -> None:
    ports = [str(port) for port in _compose()["services"]["gateway"]["ports"]]
    assert [port for port in ports if port.endswith("8081")] == ["127.0.0.1:8081:8081"]


def test_stopping_waits_longer_than_draining() -> None:
    grace_s = float(_compose()["services"]["gateway"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > Settings.model_fields["drain_s"].default


def test_the_image_drops_root_and_installs_by_hash() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER baton"]
    assert lines.index("USER baton") < next(i for i, line in enumerate(lines) if line.startswith("ENTRYPOINT"))
    assert any("--require-hashes" in line for line in lines)


def test_the_gpu_profile_is_a_vllm_the_gateway_can_name() -> None:
    vllm = _compose()["services"]["vllm"]
    assert vllm["profiles"] == ["gpu"]
    assert "--logprobs-mode=processed_logprobs" in vllm["command"]
    assert "--served-model-name=conductor" in vllm["command"]
