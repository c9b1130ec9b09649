"""What a Redis server is and how it is set, for `baton doctor` and `baton check`."""

from __future__ import annotations

import time
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.errors import Unavailable


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """`eviction`: its maxmemory-policy, None where it does not say. `used_bytes` of `bytes_max` (0: not limited) are in
    use. `skew_s`: its clock less this host's."""

    version: str
    eviction: str | None
    used_bytes: int
    bytes_max: int
    skew_s: float


async def examine(url: str, timeout_s: float) -> RedisFacts:
    """The facts of a server. Raises Unavailable."""
    client: Redis = Redis.from_url(
        url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0), protocol=2
    )
    try:
        facts = await client.info()
        seconds, micros = await client.time()
        skew_s = seconds + micros / 1e6 - time.time()
        return RedisFacts(
            version=str(facts["redis_version"]),
            eviction=facts.get("maxmemory_policy"),
            used_bytes=int(facts.get("used_memory", 0)),
            bytes_max=int(facts.get("maxmemory", 0)),
            skew_s=skew_s,
        )
    except (RedisError, OSError, TimeoutError, ValueError) as error:
        raise Unavailable(str(error).splitlines()[0] if str(error) else type(error).__name__) from None
    finally:
        await client.aclose()
