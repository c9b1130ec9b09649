"""The command line without servers: its names, its errors, and the block it prints."""

from __future__ import annotations

import argparse
import json
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import __version__, cli
from gateway.adapters.engines.propensity import Trust
from gateway.cli.admin import keys
from gateway.cli.process import arguments
from gateway.cli.process.datadir import DataDir
from gateway.cli.process.serve import banner, curl, python
from gateway.errors import ConfigError, Unavailable

FACTS = {
    "base_url": "http://127.0.0.1:8080/v1",
    "admin_url": "http://127.0.0.1:8081",
    "data_key": "bt_data_x",
    "admin_key": "bt_admin_y",
}
WORKERS = """
workers:
  - {name: one, handle: atlas, kind: openai, model: m, url: "http://127.0.0.1:1/v1",
     price: {input_usd_per_mtok: 1, output_usd_per_mtok: 2}}
pools: {main: [one]}
default: main
"""


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool.yaml"
    path.write_text(WORKERS)
    return path


@pytest.fixture(autouse=True)
def _data_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_DATA_DIR", str(tmp_path / "data"))


def test_the_commands_are_these() -> None:
    assert list(cli.COMMANDS) == [
        "serve",
        "check",
        "doctor",
        "status",
        "rollouts",
        "explain",
        "spend",
        "migrate",
        "backup",
        "restore",
        "journal",
        "keys",
        "orgs",
        "credits",
        "sessions",
        "pools",
        "workers",
        "alerts",
        "audit",
        "retention",
        "experience",
        "policy",
        "replay-workers",
        "traces",
        "record",
        "evaluate",
        "gate",
        "train",
        "worker",
    ]


@pytest.mark.parametrize("command", [[name] for name in cli.COMMANDS] + [["keys", "create"]])
def test_every_command_explains_itself(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    assert f"usage: baton {' '.join(command)}" in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"baton {__version__}\n"


def test_without_a_command_all_are_listed_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    said = capsys.readouterr().err
    assert sorted(name for names in cli.GROUPS.values() for name in names) == sorted(cli.COMMANDS)
    assert all(f"  {name} " in said and command.summary in said for name, command in cli.COMMANDS.items())
    assert said.index("Start:") < said.index("  serve ") < said.index("Learn:")


def test_a_reader_that_leaves_is_no_traceback() -> None:
    command = f'{sys.executable} -c \'from gateway import cli; cli.COMMANDS["check"] = cli.Command("", lambda p: None, '
    command += 'lambda o: [print(n) for n in range(100_000)] and 0); raise SystemExit(cli.main(["check"]))\' | head -1'
    done = subprocess.run(
        ["bash", "-c", command + "; echo ${PIPESTATUS[0]}"], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("0\n141\n", "")


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConfigError("a wrong setting"), 2), (Unavailable("a dead server"), 1), (KeyboardInterrupt(), 130)],
)
def test_errors_are_a_line_and_a_status(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: argparse.Namespace) -> int:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "check", cli.Command("", arguments.check, fail))
    assert cli.main(["check"]) == status
    assert capsys.readouterr().err == (f"{error}\n" if status != 130 else "")


def test_check_says_what_is_right(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--pool", str(pool), "--conductor", "worker:one"]) == 0
    out = capsys.readouterr().out
    assert f"{pool}: 1 workers, pools main, default main; without a description, which a planner goes by: one" in out
    assert "worker one of the pool" in out


def test_check_of_a_conductor_by_url_and_of_servers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("secret-value")
    for name, value in {
        "BATON_CONDUCTOR": "http://127.0.0.1:1/v1#m",
        "BATON_CONDUCTOR_INPUT_USD_PER_MTOK": "0",
        "BATON_CONDUCTOR_OUTPUT_USD_PER_MTOK": "0",
        "BATON_CONDUCTOR_API_KEY": f"file:{tmp_path / 'key'}",
        "DATABASE_URL": "postgresql://u:secret-value@127.0.0.1:1/d",
    }.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["check"]) == 1
    out = capsys.readouterr().out
    assert "-- postgres   DATABASE_URL does not answer: " in out
    assert "http://127.0.0.1:1/v1#m, by prompt unless it serves a policy; it does not answer now" in out
    assert "secret-value" not in out


@pytest.mark.parametrize("trainable", [True, False])
def test_check_says_whether_plans_of_a_conductor_by_url_are_trained_on(
    trainable: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def trust(_api: object, model: str) -> Trust:
        return Trust({}, trainable, f"{model} says so")

    monkeypatch.setattr("gateway.cli.process.check.trust_in", trust)
    for name in ("INPUT", "OUTPUT"):
        monkeypatch.setenv(f"BATON_CONDUCTOR_{name}_USD_PER_MTOK", "0")
    assert cli.main(["check", "--conductor", "http://127.0.0.1:1/v1#m"]) == 0
    said = "its plans are trained on: m says so" if trainable else "its plans are not trained on: m says so"
    assert said in capsys.readouterr().out


def test_check_reads_a_policys_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"name": "conductor", "version": "7"}))
    assert cli.main(["check", "--conductor", str(tmp_path)]) == 0
    assert "conductor@7" in capsys.readouterr().out


def test_check_says_which_planner_plans_and_what_it_was_trained_on(
    pool: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["check"]) == 0
    arena = capsys.readouterr().out
    assert "arena@3, trained on 902 rollouts: logged, for pool arena, prompt compact-1" in arena
    assert "`baton`: the shipped conductor plans, for simulated workers. Next: workers of your own" in arena
    assert cli.main(["check", "--pool", str(pool)]) == 0  # the simulator's conductor does not plan here
    alone = capsys.readouterr().out
    assert "ok conductor  none; it may be smol, which plans on any pool; worker:NAME" in alone
    assert "`baton`: the rule plans; there is one model to choose. Next: a second model in the pool." in alone
    assert cli.main(["check", "--pool", str(pool), "--conductor", "worker:one"]) == 0
    said = capsys.readouterr().out
    assert "`baton`: the rule plans, and one on trial in 10 % of the requests. Next: 60 judged requests more" in said
    monkeypatch.setenv("BATON_DEFAULT_POLICY", "conductor")
    assert cli.main(["check", "--pool", str(pool), "--conductor", "worker:one"]) == 0
    assert "`baton`: one plans. Next: `baton train status`" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_planner_that_is_not_in_the_pool_is_one_line_before_anything_starts(
    command: str, pool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--data-dir", str(tmp_path / "data")] if command == "serve" else []
    assert cli.main([command, *more, "--pool", str(pool), "--conductor", "worker:nix"]) == 2
    assert capsys.readouterr().err == "BATON_CONDUCTOR=worker:nix: no such model; known: one\n"
    assert cli.main([command, *more, "--conductor", "worker:nix"]) == 2
    assert "the workers are simulated, and none of them plans; name a pool file too" in capsys.readouterr().err


def test_a_port_that_must_be_free_is_tried_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_PORT_STRICT", "true")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--data-dir", str(tmp_path / "data"), "--port", str(port)]) == 2
    said = capsys.readouterr()
    assert f"127.0.0.1:{port} is taken; free it" in said.err
    assert "postgres" not in said.out


@pytest.mark.parametrize("conductor", ["embedded", "policy/shipped/arena-3"])
def test_the_simulators_conductor_is_refused_on_another_pool(
    conductor: str, pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", "--pool", str(pool), "--conductor", conductor]) == 2
    error = capsys.readouterr().err
    assert "was trained on the simulator" in error
    assert "choose smol, which plans on any pool; worker:NAME" in error
    pool.write_text(pool.read_text().replace("main", "arena"))
    assert cli.main(["check", "--pool", str(pool), "--conductor", conductor]) == 0


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--conductor", "worker:two"], {}, "BATON_CONDUCTOR=worker:two: no such model; known: one"),
        (
            ["--conductor", "nowhere"],
            {},
            "nowhere/manifest.json:1: there is no such directory; BATON_CONDUCTOR must be",
        ),
        ([], {"BATON_DEFAULT_POOL_NAME": "other"}, "BATON_DEFAULT_POOL_NAME=other"),
        ([], {"BATON_PROT": "1"}, "did you mean BATON_PORT?"),
        ([], {"BATON_PEPPER": "env:NOT_SET"}, "NOT_SET"),
        ([], {"DATABASE_URL": "mysql://h"}, "postgresql://"),
    ],
)
def test_check_names_the_place_and_the_fix(
    arguments: list[str],
    environment: dict[str, str],
    said: str,
    pool: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["check", "--pool", str(pool), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_check_names_the_line_of_a_pool_file(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool.write_text(WORKERS.replace("[one]", "[two]"))
    assert cli.main(["check", "--pool", str(pool)]) == 2
    assert capsys.readouterr().err.startswith(f"{pool}:5: ")


def test_a_manifest_that_is_no_object_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "manifest.json").write_text("[]")
    assert cli.main(["check", "--conductor", str(tmp_path)]) == 2
    assert "not a JSON object" in capsys.readouterr().err


def test_keys_without_a_gateway_say_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", "list"]) == 2
    assert "start it (`baton serve`), set DATABASE_URL, or give its admin URL" in capsys.readouterr().err


def test_caps_must_be_an_object() -> None:
    assert keys._object('{"rounds_max": 1}') == {"rounds_max": 1}
    for text in ("[]", "{"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a JSON object"):
            keys._object(text)


def test_replay_needs_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay-workers", str(tmp_path / "absent")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_the_admin_key_is_shown_once() -> None:
    first = banner(FACTS, Path("/data"), new=True, took_s=1.25)
    again = banner(FACTS, Path("/data"), new=False, took_s=1.25)
    assert "bt_admin_y   (shown once)" in first
    assert "bt_admin_y" not in again
    assert "made at the first start; see /data/serve.json" in again
    assert all(FACTS[name] in again for name in ("base_url", "admin_url"))
    assert FACTS["data_key"] not in again


def test_later_snippets_read_the_key_from_the_facts(tmp_path: Path) -> None:
    (tmp_path / "serve.json").write_text(json.dumps(FACTS, indent=2))
    again = banner(FACTS, tmp_path, new=False, took_s=1.25)
    (line,) = [line for line in again.splitlines() if "export OPENAI_API_KEY=" in line]
    shown = subprocess.run(["sh", "-c", f"{line}; echo $OPENAI_API_KEY"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == FACTS["data_key"]
    assert '-H "authorization: Bearer $OPENAI_API_KEY"' in again
    compile(again[again.index("from openai") :], "snippet", "exec")


def test_the_banner_says_who_plans_in_lines_that_fit() -> None:
    plans = "`baton`: the rule plans (0 outcomes). Next: " + "about 60 outcomes " * 12
    shown = banner(FACTS, Path("/data"), new=True, took_s=1.25, plans=plans)
    at = shown.index("`baton`: the rule plans (0 outcomes).")
    assert max(map(len, shown[at : at + len(plans)].splitlines())) <= 120


def test_a_gateway_without_keys_of_its_own_says_so() -> None:
    none = banner({**FACTS, "data_key": None, "admin_key": None}, Path("/data"), new=False, took_s=1.25)
    assert "data key    none of its own: the database has keys" in none


def test_the_banner_says_what_simulated_workers_know() -> None:
    simulated = banner(FACTS, Path("/data"), new=True, took_s=1.25, simulated=True)
    assert "make serve POOL=deploy/pools/smol.yaml" in simulated
    assert "The workers are simulated" in simulated
    assert "simulated" not in banner(FACTS, Path("/data"), new=True, took_s=1.25)


def test_the_snippets_are_well_formed() -> None:
    words = shlex.split(curl(FACTS))
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8080/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "baton"
    compile(python(FACTS), "snippet", "exec")


def test_serve_says_when_another_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with DataDir(tmp_path / "data").locked():
        assert cli.main(["serve"]) == 3
    assert "already running on" in capsys.readouterr().err


def test_evaluate_becomes_the_program_that_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []

    def execv(_path: str, command: list[str]) -> None:
        became.append(command)
        raise SystemExit(7)

    monkeypatch.setattr("os.execv", execv)
    with pytest.raises(SystemExit):
        cli.main(["evaluate", "--env", "arena", "--policy", "fixed:*", "--out", "x.json"])
    assert became[0][1:] == ["-m", "policy", "evaluate", "--env", "arena", "--policy", "fixed:*", "--out", "x.json"]
    monkeypatch.setattr("gateway.cli.process.services.find_spec", lambda _name: None)
    assert cli.main(["evaluate", "--env", "arena"]) == 2
