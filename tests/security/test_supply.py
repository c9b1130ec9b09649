"""S8: what is installed is what was pinned, importing speaks to nobody, and the image runs as nobody."""

from __future__ import annotations

import json
import re
import site
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

from packaging.markers import Marker
from packaging.utils import canonicalize_name

from tests.security.report import measured

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
OURS = {"baton"}
INSTALLERS = {"pip", "setuptools", "wheel", "uv"}  # what makes the environment, before any lock is read
PTH = {
    "distutils-precedence.pth",  # setuptools'
    "a1_coverage.pth",  # coverage's, for programs that tests start
}
PTH_FORMS = re.compile(r"(__editable__\.baton-[\w.]+|_virtualenv|baton|__editable___baton_\w+_finder)\.pth")


def entries(lock: Path) -> dict[str, str]:
    """Requirement → its text, of a lock."""
    found = re.split(r"\n(?=\S)", lock.read_text(encoding="utf-8").strip())
    return {entry.split(" ")[0].strip("\\ \n"): entry for entry in found}


def test_every_requirement_has_an_exact_version_and_hashes() -> None:
    count = 0
    for lock in LOCKS:
        for name, entry in entries(lock).items():
            assert re.match(r"^[a-z0-9][\w.-]*(\[[\w,-]+\])?==\S+", name), f"{lock.name}: {name}"
            assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry), f"{lock.name}: {name}"
            assert "@" not in name, f"{lock.name}: {name}"
            count += 1
    measured("S8", f"{count} requirements in {len(LOCKS)} locks, all with exact version and hash")
    assert count > 300


def test_the_lock_is_made_with_a_cooldown_and_installed_with_its_hashes() -> None:
    assert re.search(r'cooldown="\$\{COOLDOWN:-7 days\}"', (ROOT / "scripts" / "lock").read_text(encoding="utf-8"))
    assert "--exclude-newer" in (ROOT / "scripts" / "lock").read_text(encoding="utf-8")
    install = (ROOT / "scripts" / "install").read_text(encoding="utf-8")
    assert "--require-hashes" in install
    assert "--only-binary" in install


def test_nothing_is_installed_that_no_lock_names() -> None:
    named: dict[str, set[str]] = {}
    for lock in LOCKS:
        for requirement, entry in entries(lock).items():
            name, _, version = requirement.partition("==")
            marker = re.search(r" ; ([^\\\n]+)", entry)
            if marker is None or Marker(marker[1].strip()).evaluate():
                named.setdefault(canonicalize_name(name.partition("[")[0]), set()).add(version.strip(" ;\\"))
    inside = Path(sys.prefix).resolve()
    mine = [one for one in distributions() if inside in Path(str(one.locate_file(""))).resolve().parents]
    installed = {canonicalize_name(one.metadata["Name"]): one.version for one in mine}
    strangers = {name for name in installed if name not in named and name not in OURS | INSTALLERS | {"torch"}}
    assert strangers == set()


def test_npm_packages_are_locked_with_digests() -> None:
    locks = [path for path in (ROOT / "tests").rglob("package-lock.json") if "node_modules" not in path.parts]
    packages = [one for lock in locks for name, one in json.loads(lock.read_text())["packages"].items() if name]
    assert [one for one in packages if not str(one.get("integrity")).startswith("sha512-")] == []
    measured("S8", f"{len(packages)} packages of npm in {len(locks)} locks, all with their digest")
    assert len(packages) > 5


def test_the_images_that_compose_runs_name_their_release() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    images = re.findall(r"^\s+image: (\S+)", text, re.MULTILINE)
    assert len(images) >= 3
    for image in images:
        assert re.search(r":\D{0,2}\d[\w.-]*$|@sha256:[0-9a-f]{64}$", image), image


def test_no_file_runs_at_start_that_is_not_known() -> None:
    found = {path.name for place in site.getsitepackages() for path in Path(place).glob("*.pth")}
    assert {name for name in found if name not in PTH and not PTH_FORMS.fullmatch(name)} == set()


def test_importing_the_gateway_opens_no_socket_and_starts_nothing_of_its_own() -> None:
    script = (
        "import sys\nseen = []\n"
        "sys.addaudithook(lambda event, args: seen.append((event, str(args[:2]))) if event.startswith(('socket.', "
        "'subprocess.', 'os.system', 'os.exec', 'os.posix_spawn')) and event != 'socket.__new__' else None)\n"
        "import gateway, gateway.wiring.build, gateway.cli.process.serve, gateway.adapters.upstream.litellm\n"
        # croniter, of the queue, asks `file` whether this Python is one of 32 bits
        "print([one for one in seen if one[0] != 'subprocess.Popen' or \"['file', '-b'\" not in one[1]])"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_the_image_runs_as_nobody_from_pinned_parts() -> None:
    whole = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = whole.splitlines()
    instructions = [line.split(" ", 1) for line in lines if re.match(r"^[A-Z]+ ", line)]
    users = [argument for name, argument in instructions if name == "USER"]
    assert users[-1] not in ("root", "0")
    froms = [re.fullmatch(r"(\S+) AS (\S+)", argument) for name, argument in instructions if name == "FROM"]
    known = {"${PYTHON_IMAGE}"}
    for stage in froms:  # each is of the one image, or of a stage before it
        assert stage is not None
        assert stage[1] in known
        known.add(stage[2])
    runtime = whole.split("FROM ${PYTHON_IMAGE} AS runtime")[1]
    assert "USER baton" in runtime.split("FROM ")[0]
    assert "USER" not in "".join(runtime.split("FROM ")[1:])  # what is made of it stays that user
    (image,) = [argument for name, argument in instructions if name == "ARG" and "PYTHON_IMAGE" in argument]
    assert re.search(r"=python:3\.\d+-slim-\w+$", image)
    assert "--require-hashes" in whole
    assert "--only-binary :all:" in whole
    assert not re.search(r"\b(curl|wget|apt-get|git clone)\b", whole)
    assert not any(name == "ADD" for name, _ in instructions)
