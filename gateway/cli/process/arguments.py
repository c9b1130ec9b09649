"""What `--help` needs: the arguments of the commands that are processes, and modules that load at their first use."""

from __future__ import annotations

import argparse
import sys
from importlib.util import LazyLoader, find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

CONDUCTORS = "auto, none, smol, embedded, DIRECTORY, worker:NAME or http://host:port/v1#model"


def lazy(name: str) -> ModuleType:
    """The module of that name, loaded at its first use."""
    if name in sys.modules:
        return sys.modules[name]
    spec = find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(name)
    spec.loader = LazyLoader(spec.loader)
    module = sys.modules.setdefault(name, module_from_spec(spec))
    spec.loader.exec_module(module)
    package, _, last = name.rpartition(".")
    setattr(sys.modules[package], last, module)
    return module


def check(parser: argparse.ArgumentParser) -> None:
    """Of `baton check`."""
    _pool(parser)
    parser.add_argument("--ask", action="store_true", help="ask each worker one short question, which is paid for")


def _pool(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pool", type=Path, help="pool file (BATON_POOL)")
    parser.add_argument("--conductor", help=CONDUCTORS)


def doctor(parser: argparse.ArgumentParser) -> None:
    """Of `baton doctor`."""
    _pool(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def serve(parser: argparse.ArgumentParser) -> None:
    """Of `baton serve`; each stands for the setting of its name."""
    parser.add_argument("--pool", type=Path, help="pool file; default: simulated workers (BATON_POOL)")
    parser.add_argument(
        "--conductor",
        help=f"{CONDUCTORS} (BATON_CONDUCTOR)",
    )
    parser.add_argument("--data-dir", type=Path, help="directory of all state; default .baton (BATON_DATA_DIR)")
    parser.add_argument("--host", help="address of the public API (BATON_HOST)")
    parser.add_argument("--port", type=int, help="its port, 0: any free one (BATON_PORT)")
    parser.add_argument("--admin-port", type=int, help="port of the admin API (BATON_ADMIN_PORT)")
    parser.add_argument("--processes", type=int, help="processes that serve the public port (BATON_PROCESSES)")


def alerts(parser: argparse.ArgumentParser) -> None:
    """Of `baton alerts`."""
    acts = parser.add_subparsers(dest="act", metavar="ACT", required=True)
    acts.add_parser("test", help="send one alert of type baton.test by hand, and say what came back")


def migrate(parser: argparse.ArgumentParser) -> None:
    """Of `baton migrate`, which has none: DATABASE_URL says which database."""


def backup(parser: argparse.ArgumentParser) -> None:
    """Of `baton backup`."""
    parser.add_argument("file", type=Path, help="the file to write; it must not exist")
    _place(parser)


def restore(parser: argparse.ArgumentParser) -> None:
    """Of `baton restore`."""
    parser.add_argument("file", type=Path, help="a file that `baton backup` wrote")
    _place(parser)


def journal(parser: argparse.ArgumentParser) -> None:
    """Of `baton journal`."""
    acts = parser.add_subparsers(dest="act", metavar="ACT", required=True)
    _place(acts.add_parser("recover", help="store what is whole in damaged segments (`*.bad`)"))


def _place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", type=Path, help="directory of all state; default .baton (BATON_DATA_DIR)")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def worker(parser: argparse.ArgumentParser) -> None:
    """Of `baton worker`."""
    parser.add_argument("--data-dir", type=Path, help="directory of its state; default .baton (BATON_DATA_DIR)")
