"""One gateway for all of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres_server import TEMPLATE, PostgresServer
from tests.redis_server import start_redis
from tests.security.gateway import PROVIDER_KEY, Gateway, running


@pytest.fixture(scope="session")
def served(pg_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Up from the first test that asks for it to the end of the session."""
    place = tmp_path_factory.mktemp("gateway")
    redis = start_redis(place)
    database_url = pg_server.create(TEMPLATE)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PROVIDER_KEY", PROVIDER_KEY)
        with running(Gateway(place, database_url, redis)) as gateway:
            yield gateway
    redis.stop()
    pg_server.drop(database_url)


@pytest.fixture
def gateway(served: Gateway) -> Iterator[Gateway]:
    """The gateway, with conductor and workers as at first."""
    served.upstream.reset()
    yield served
    served.upstream.reset()
