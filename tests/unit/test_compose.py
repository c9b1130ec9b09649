"""The compose file: valid, the same limits on both sides, and a vLLM command line that stands in one file."""

from __future__ import annotations

import json
import os
import re
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema.validators import validator_for

from gateway.adapters.host import poolfile
from gateway.cli.process.services import starts_conductor
from gateway.config import settings as config
from gateway.config.settings import Settings

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "vllm.sh"
VLLM = ROOT / ".venv-vllm" / "bin" / "vllm"
REFERENCE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<value>[^}]*))?\}")
SECRET = {"POSTGRES_PASSWORD": "secret"}
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32 takes for --max-lora-rank


def gpu_env() -> dict[str, str]:
    lines = [line for line in (ROOT / "deploy" / "gpu.env").read_text().splitlines() if line and line[0] != "#"]
    return dict(line.split("=", 1) for line in lines)


def compose(environ: dict[str, str]) -> dict[str, Any]:
    """The file as compose reads it: variables put in, anchors merged."""

    def value(match: re.Match[str]) -> str:
        return environ.get(match["name"]) or (match["value"] if match["kind"] == "-" else "") or ""

    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(REFERENCE.sub(value, text)))


def settings_of(service: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings of a container with that environment."""
    for name in list(os.environ):
        if name.startswith("BATON_"):
            monkeypatch.delenv(name)
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, "" if value is None else str(value))
    return config.load()


def command_of(tmp_path: Path, environ: dict[str, str], *words: str) -> list[str]:
    """What deploy/vllm.sh starts, by a `vllm` that prints its arguments."""
    fake = tmp_path / "vllm"
    fake.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    fake.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **environ}
    done = subprocess.run(["bash", str(SCRIPT), *words], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("environ", [SECRET, SECRET | gpu_env()], ids=["plain", "gpu"])
def test_it_is_what_the_compose_specification_allows(environ: dict[str, str]) -> None:
    schema = json.loads((files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text())
    validator = validator_for(schema)(schema)
    assert [error.message for error in validator.iter_errors(compose(environ))] == []
    wrong = compose(environ)
    wrong["services"]["vllm"]["volume"] = []
    assert list(validator.iter_errors(wrong)) != []


def test_every_volume_is_declared_and_policies_lie_at_one_path() -> None:
    document = compose(SECRET | gpu_env())
    mounts = {
        name: dict(text.split(":")[:2] for text in service.get("volumes", []))
        for name, service in document["services"].items()
    }
    named = {source for each in mounts.values() for source in each if not source.startswith(".")}
    assert named == set(document["volumes"])
    assert {name: each["policies"] for name, each in mounts.items() if "policies" in each} == {
        "gateway": "/policies",
        "worker": "/policies",
        "vllm": "/policies",
    }
    assert document["services"]["gateway"]["environment"]["BATON_POLICIES_DIR"] == "/policies"
    assert mounts["worker"]["models"] == mounts["vllm"]["models"]
    assert "ports" not in document["services"]["vllm"]  # its routes that load weights ask for no key


@pytest.mark.parametrize("service", ["gateway", "worker"])
@pytest.mark.parametrize("environ", [SECRET, SECRET | gpu_env()], ids=["plain", "gpu"])
def test_the_gateway_knows_every_setting(
    environ: dict[str, str], service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(compose(environ)["services"][service], monkeypatch)
    gpu = environ != SECRET
    assert settings.policy_engine == ("vllm-lora" if gpu else "auto")
    assert settings.conductor_kind == ("url" if gpu else "embedded")
    assert settings.policies_path == Path("/policies")
    if service == "gateway":
        assert settings.jobs_worker is not gpu


@pytest.mark.parametrize(
    "pool", [*(ROOT / "deploy" / "pools").glob("*.yaml"), None], ids=lambda path: path and path.stem
)
def test_it_starts_with_a_pool_of_ones_own_and_without(pool: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = None if pool is None else f"/etc/baton/pools/{pool.name}"
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "OPENROUTER_API_KEY"), "a-key-1")
    service = compose(SECRET | keys | ({"BATON_POOL": inside} if inside else {}))["services"]["gateway"]
    settings = settings_of(service, monkeypatch)
    assert settings.pool == (inside and Path(inside))
    assert "./deploy/pools:/etc/baton/pools:ro" in service["volumes"]
    if pool is None:
        assert starts_conductor(settings, None)  # the shipped one
        return
    environ = service["environment"] | {"RUN_PYTHON_KEY": "a-key-2"}
    assert not starts_conductor(settings, poolfile.load(pool, environ))


def test_the_layers_of_adapters_are_named_where_they_must_be(tmp_path: Path) -> None:
    words = command_of(tmp_path, {"LORA_TARGETS": "q_proj v_proj"}, "base", "8126")
    at = words.index("--lora-target-modules")
    assert words[at + 1 : at + 3] == ["q_proj", "v_proj"]
    assert "--lora-target-modules" not in command_of(tmp_path, {}, "base", "8126")


@pytest.mark.parametrize("limits", [{}, {"BATON_POLICY_RANK_MAX": "64", "BATON_POLICY_VERSIONS_MAX": "8"}])
def test_the_limits_of_adapters_are_equal_on_both_sides(limits: dict[str, str], tmp_path: Path) -> None:
    services = compose(SECRET | gpu_env() | limits)["services"]
    vllm, gateway = (services[name]["environment"] for name in ("vllm", "gateway"))
    words = command_of(tmp_path, {name: str(value) for name, value in vllm.items()}, *services["vllm"]["command"])
    assert after(words, "--max-lora-rank") == str(gateway["BATON_POLICY_RANK_MAX"])
    assert after(words, "--max-cpu-loras") == str(gateway["BATON_POLICY_VERSIONS_MAX"])
    assert (after(words, "--host"), after(words, "--port")) == ("0.0.0.0", "8000")  # noqa: S104 - in its container
    assert words[:2] == ["serve", "Qwen/Qwen2.5-7B-Instruct"]
    assert words[-1] == "--gpu-memory-utilization=0.5"


def test_without_settings_the_script_has_the_gateways_defaults(tmp_path: Path) -> None:
    words = command_of(tmp_path, {})
    defaults = {name: field.default for name, field in Settings.model_fields.items()}
    assert int(after(words, "--max-lora-rank")) == defaults["policy_rank_max"]
    assert int(after(words, "--max-cpu-loras")) == defaults["policy_versions_max"]
    assert (after(words, "--host"), after(words, "--port")) == ("127.0.0.1", "8126")
    assert "--enable-lora" not in command_of(tmp_path, {"VERSIONS": "reload"})
    assert int(defaults["policy_rank_max"]) in RANKS


def test_the_images_are_targets_of_the_dockerfile() -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    services = compose(SECRET)["services"]
    assert (
        {services[name]["build"]["target"] for name in ("gateway", "worker")} == {"gateway", "trainer"} <= set(stages)
    )
    assert stages[-1] == "gateway"  # what `docker build .` makes


@pytest.mark.vllm
def test_vllm_knows_every_flag_of_the_script(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if request.config.option.markexpr != "vllm":
        pytest.skip("needs a real vLLM: make test-vllm")
    told = subprocess.run([str(VLLM), "serve", "--help=all"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", told))
    services = compose(SECRET | gpu_env())["services"]
    flags = {word.split("=")[0] for word in command_of(tmp_path, {}, *services["vllm"]["command"]) if word[:2] == "--"}
    assert len(flags) > 10
    assert flags - known == set()
    (ranks,) = re.findall(r"--max-lora-rank \{([\d,]+)\}", told)
    assert tuple(map(int, ranks.split(","))) == RANKS
