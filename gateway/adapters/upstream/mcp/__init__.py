"""Workers of kind mcp. The library is loaded for a pool that has one, and stands in this folder alone."""

from __future__ import annotations

from gateway.adapters.upstream.http1.ways import Ways
from gateway.errors import ConfigError
from gateway.service.ports.pools import LoadedPool, ToolServers


def tool_servers(loaded: LoadedPool, ways: Ways) -> ToolServers:
    """The MCP servers of a pool, not yet connected. Raises ConfigError where the library is not installed."""
    try:
        from gateway.adapters.upstream.mcp.servers import Servers
    except ImportError:
        raise ConfigError("kind mcp needs the extra `mcp`; run scripts/install mcp") from None
    specs = [worker for worker in loaded.pools.workers if worker.kind == "mcp"]
    return Servers(specs, loaded.secrets, {one.name: ways.of_worker(one, loaded.secrets) for one in specs if one.url})
