"""One of several processes that serve a gateway's public port: `python -m gateway.cli.process.sibling FILE`.

`baton serve` starts it (`processes.py`) and watches it. It is a gateway on the stores that it is told of, without an
admin API. It answers health, metrics and flushes of its journal on a port of loopback.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import uvloop
from fastapi import FastAPI, Response

from gateway.adapters.host import poolfile
from gateway.adapters.host.siblings import PORT_FILE
from gateway.cli.process import runtime
from gateway.cli.process.datadir import DataDir
from gateway.cli.process.listeners import Listener, bind, join, listener
from gateway.config import settings as config
from gateway.config.settings import Services, ServingProcesses, Settings
from gateway.wiring.build import Bundle, build
from gateway.wiring.shipping import FLUSH


class _Run:
    """One run, from its settings to a clean end."""

    def __init__(self, settings: Settings, services: Services, hangups: runtime.Hangups) -> None:
        self._settings = settings
        self._services = services
        self._hangups = hangups
        self.lame_duck_s = 0.0

    async def serve(self) -> None:
        """Serve until cancelled."""
        environ = config.environment()
        runtime.scrub_from_log(poolfile.secrets(poolfile.load(self._services.pool_file, environ), environ).values())
        bundle = await build(self._settings, self._services)
        bundle.admin_parts.pools.tell(learn=runtime.scrub_from_log)
        await bundle.start()
        try:
            await self._listen(bundle)
        finally:
            await bundle.stop()

    async def _listen(self, bundle: Bundle) -> None:
        settings = self._settings
        public = listener(bundle.public, join(settings.host, settings.port), settings)
        sock = bind("127.0.0.1", 0, strict=False)
        private = Listener(_private(bundle), sock, drain_s=1.0, head_bytes_max=settings.header_bytes_max)
        await public.open()
        await private.open()
        runtime.tune_garbage()
        (settings.data_dir / PORT_FILE).write_text(str(sock.getsockname()[1]))
        try:
            with runtime.large_pages():
                await self._hangups.serve(bundle.admin_parts.pools)
        finally:
            bundle.drain()
            await asyncio.sleep(self.lame_duck_s)
            await public.close()
            await private.close()


def _private(bundle: Bundle) -> FastAPI:
    """What the other processes of this gateway ask."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(bundle.health.router())

    async def flush() -> Response:
        """Return once the journal is in PostgreSQL."""
        try:
            await bundle.journal.shipped()
        except TimeoutError:
            return Response(status_code=503)
        return Response()

    app.add_api_route(FLUSH, flush)
    return app


def read(file: Path) -> tuple[Settings, Services]:
    """What `processes.py` wrote."""
    content = json.loads(file.read_text(encoding="utf-8"))
    fields: dict[str, Any] = content["services"]
    serving = ServingProcesses(**(fields["serving"] | {"directory": Path(fields["serving"]["directory"])}))
    paths = {name: Path(fields[name]) for name in ("pool_file", "policies") if fields[name]}
    fields |= paths | {"serving": serving, "pepper": bytes.fromhex(fields["pepper"])}
    return Settings(**content["settings"]), Services(**fields)


def main(file: Path) -> int:
    """Serve until a signal."""
    settings, services = read(file)
    runtime.log_to_stderr(settings.log_level, settings.log_format)
    runtime.tune_switching()
    hangups = runtime.Hangups()
    running = _Run(settings, services, hangups)
    with DataDir(settings.data_dir).locked(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(runtime.until_stopped(running, settings, hangups, orphan=True))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
