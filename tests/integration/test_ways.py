"""Ways out: workers behind a proxy, behind an authority of their own, and with a certificate that Baton shows."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop
import yarl

from gateway.adapters.engines.http import EngineApi
from gateway.adapters.upstream.client import http_client
from gateway.adapters.upstream.conductor.client import HttpConductor
from gateway.adapters.upstream.http1.ways import Ways
from gateway.adapters.upstream.pooled import pooled_workers
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import ConfigError, UpstreamError
from gateway.service.ports.request import WorkerCall
from tests.integration.test_workers_swap import call, pool, worker
from tests.upstreams.authority import Authority
from tests.upstreams.proxy import Proxy
from tests.upstreams.server import Reply, Request, Server, event, event_stream, json_reply

CHOICE = {"index": 0, "message": {"role": "assistant", "content": "well"}, "finish_reason": "stop"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
WHOLE = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [CHOICE], "usage": USAGE}


def answers(request: Request) -> Reply:
    """A completion, as a stream where it is asked for."""
    if not request.body.get("stream"):
        return json_reply(WHOLE)
    deltas = ({"content": "we"}, {"content": "ll"})
    chunks = [{**WHOLE, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({**WHOLE, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return event_stream([*map(event, chunks), event("[DONE]")])


async def said(spec: WorkerSpec, environ: Mapping[str, str], secrets: Mapping[str, str] | None = None) -> list[str]:
    """What the worker answers whole, whole again over a kept connection, and as a stream."""
    file = pool(spec)
    workers = pooled_workers(file, secrets or {}, b"depth", ways=Ways(environ))
    one = call(spec, file)
    whole_only = WorkerCall(spec, {**one.body, "tools": []}, 5.0, "r", "s", revision=one.revision)
    try:
        replies = [(await workers.complete(each)).body["choices"][0] for each in (one, whole_only)]
        chunks: list[Any] = [chunk async for chunk in workers.stream(one)]
        texts = [choice["delta"].get("content") or "" for chunk in map(_plain, chunks) for choice in chunk["choices"]]
        return [*(choice["message"]["content"] for choice in replies), "".join(texts)]
    finally:
        await workers.close()


def _plain(chunk: Any) -> Any:
    if isinstance(chunk, dict):
        return chunk
    return {"choices": [{"delta": {"content": choice.delta.content}} for choice in chunk.choices]}


async def problem(spec: WorkerSpec, environ: Mapping[str, str] | None = None) -> UpstreamError:
    """Why the worker is not reached."""
    with pytest.raises(UpstreamError) as caught:
        await said(spec, environ or {})
    return caught.value


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


# ---------------------------------------------------------------- proxies


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"])
async def test_a_worker_over_tls_is_reached_through_the_proxy_of_the_environment(
    variable: str, authority: Authority
) -> None:
    async with Server(answers, tls=authority.serves("worker.test")) as server, Proxy() as proxy:
        spec = worker(url=f"https://worker.test:{server.port}/v1")
        environ = {variable: proxy.url, "SSL_CERT_FILE": str(authority.ca_file)}
        assert await said(spec, environ) == ["well"] * 3
        assert set(proxy.asked) == {f"CONNECT worker.test:{server.port}"}
        assert len(proxy.asked) < 3  # connections are kept


async def test_a_worker_without_tls_is_asked_for_by_its_whole_url() -> None:
    async with Server(answers) as server, Proxy() as proxy:
        spec = worker(url=f"http://worker.test:{server.port}/v1")
        assert await said(spec, {"HTTP_PROXY": proxy.url.removeprefix("http://")}) == ["well"] * 3
        assert f"POST http://worker.test:{server.port}/v1/chat/completions" in proxy.asked


@pytest.mark.parametrize("without", ["*", "127.0.0.1", "127.0.0.0/8", "10.0.0.0/8,127.0.0.1:{port}", "other.test"])
async def test_this_machine_and_what_no_proxy_lists_are_reached_directly(without: str) -> None:
    async with Server(answers) as server, Proxy() as proxy:
        spec = worker(url=f"{server.url}/v1")
        environ = {"HTTP_PROXY": proxy.url, "NO_PROXY": without.format(port=server.port)}
        assert await said(spec, environ) == ["well"] * 3
        assert proxy.asked == []


async def test_a_workers_own_proxy_counts_before_the_environment_and_direct_is_none(authority: Authority) -> None:
    async with Server(answers) as server, Proxy() as theirs, Proxy() as ours:
        url = f"http://worker.test:{server.port}/v1"
        assert await said(worker(url=url, proxy=ours.url), {"HTTP_PROXY": theirs.url}) == ["well"] * 3
        assert (len(ours.asked) > 0, theirs.asked) == (True, [])
        here = worker(url=f"{server.url}/v1", proxy="direct")
        assert await said(here, {"HTTP_PROXY": theirs.url}) == ["well"] * 3
        assert theirs.asked == []


@pytest.mark.parametrize("secure", [True, False])
async def test_a_proxy_gets_its_user_and_password_and_the_worker_does_not(authority: Authority, secure: bool) -> None:
    tls = authority.serves("worker.test") if secure else None
    async with Server(answers, tls=tls) as server, Proxy("staff:p@ss") as proxy:
        url = f"http{'s' if secure else ''}://worker.test:{server.port}/v1"
        spec = worker(url=url, proxy="env:COMPANY_PROXY", ca_file=str(authority.ca_file))
        secret = proxy.url.replace("//", "//staff:p%40ss@")
        assert await said(spec, {}, {"w proxy": secret}) == ["well"] * 3
        assert "proxy-authorization" not in server.requests[0].headers
        assert Ways({"HTTP_PROXY": secret, "HTTPS_PROXY": secret}).of(url).why.startswith(f"by {proxy.url} (HTTP")


async def test_a_proxy_that_refuses_is_named_as_the_cause(authority: Authority) -> None:
    async with Server(answers, tls=authority.serves("worker.test")) as server, Proxy("staff:pass") as proxy:
        for scheme, words in (("https", "its proxy answered 407"), ("http", "its proxy asks for a user")):
            error = await problem(worker(url=f"{scheme}://worker.test:{server.port}/v1", proxy=proxy.url))
            assert words.split(" ", 1)[1] in error.message
            assert not error.retryable
    closed = worker(url="https://worker.test/v1", proxy="http://127.0.0.1:1")
    error = await problem(closed)
    assert "its proxy does not answer" in error.message
    assert (error.dispatched, error.retryable) == (False, True)


async def test_a_proxy_that_hangs_ends_at_the_calls_time() -> None:
    async def hang(request: Request) -> Reply:
        await asyncio.sleep(60)
        return Reply()

    async with Server(hang) as silent:
        spec = worker(url="http://worker.test/v1", proxy=silent.url)
        workers = pooled_workers(pool(spec), {}, b"depth")
        with pytest.raises(UpstreamError, match="did not answer in time"):
            await workers.complete(call(spec, pool(spec), timeout_s=0.2))
        await workers.close()


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1080", "http://", "http://h:port"])
def test_a_proxy_that_cannot_be_used_stops_the_start_and_shows_no_password(proxy: str) -> None:
    spec = worker(url="https://worker.test/v1")
    with pytest.raises(ConfigError, match="ALL_PROXY: ") as caught:
        pooled_workers(pool(spec), {}, b"depth", ways=Ways({"ALL_PROXY": proxy.replace("//", "//me:hidden@")}))
    assert "hidden" not in caught.value.message
    pooled_workers(pool(worker(url="http://127.0.0.1:9/v1")), {}, b"depth", ways=Ways({"ALL_PROXY": proxy}))


# ---------------------------------------------------------------- certificates


async def test_a_server_of_another_authority_is_reached_only_with_that_authority(authority: Authority) -> None:
    async with Server(answers, tls=authority.serves("127.0.0.1")) as server:
        url = f"{server.url}/v1"
        for variable in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
            assert await said(worker(url=url), {variable: str(authority.ca_file)}) == ["well"] * 3
        assert await said(worker(url=url, ca_file=str(authority.ca_file)), {}) == ["well"] * 3
        assert "securely (TLS)" in (await problem(worker(url=url))).message


async def test_a_certificate_is_shown_to_a_server_that_asks_for_one(authority: Authority) -> None:
    certificate, key = authority.issue("baton")
    both = certificate.with_name("both.pem")
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    async with Server(answers, tls=authority.serves("127.0.0.1", asks_client=True)) as server:
        known: dict[str, Any] = {"url": f"{server.url}/v1", "ca_file": str(authority.ca_file)}
        assert await said(worker(**known, client_cert=str(certificate), client_key=str(key)), {}) == ["well"] * 3
        assert await said(worker(**known, client_cert=str(both)), {}) == ["well"] * 3
        assert (await problem(worker(**known))).retryable  # without one, it hangs up in the handshake or behind it


async def test_a_name_that_is_not_in_the_certificate_is_refused(authority: Authority) -> None:
    async with Server(answers, tls=authority.serves("other.test")) as server:
        error = await problem(worker(url=f"{server.url}/v1"), {"SSL_CERT_FILE": str(authority.ca_file)})
        assert "securely (TLS)" in error.message


def test_files_that_are_not_there_or_no_certificates_are_named(tmp_path: Path) -> None:
    (tmp_path / "text.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"SSL_CERT_FILE: /nowhere\.pem cannot be used: No such file"):
        Ways({"SSL_CERT_FILE": "/nowhere.pem"})
    for field in ("ca_file", "client_cert"):
        fields: dict[str, Any] = {field: str(tmp_path / "text.pem")}
        spec = worker(url="https://worker.test/v1", **fields)
        with pytest.raises(ConfigError, match="cannot be used"):
            pooled_workers(pool(spec), {}, b"depth")


# ---------------------------------------------------------------- the loop that serves


def test_proxies_and_certificates_work_on_the_loop_that_serves(authority: Authority) -> None:
    """uvloop, under which TLS inside a tunnel is another implementation."""

    async def both() -> tuple[list[str], list[str]]:
        async with Server(answers, tls=authority.serves("worker.test", "127.0.0.1")) as server, Proxy() as proxy:
            environ = {"HTTPS_PROXY": proxy.url, "SSL_CERT_FILE": str(authority.ca_file)}
            far = await said(worker(url=f"https://worker.test:{server.port}/v1"), environ)
            near = await said(worker(url=f"{server.url}/v1"), environ)
            return far, near

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(both()) == (["well"] * 3, ["well"] * 3)


# ---------------------------------------------------------------- others that call out


async def test_engines_conductors_and_tools_take_the_same_ways(authority: Authority) -> None:
    def serve(request: Request) -> Reply:
        if request.path.endswith("/models"):
            return json_reply({"data": [{"id": "m", "owned_by": "vllm"}]})
        return json_reply({"content": "told"})

    async with Server(serve, tls=authority.serves("far.test")) as server, Proxy() as proxy:
        ways = Ways({"HTTPS_PROXY": proxy.url, "SSL_CERT_FILE": str(authority.ca_file)})
        base = f"https://far.test:{server.port}"
        api = EngineApi(base, client=http_client(ways=ways))
        assert (await api.send("GET", "/v1/models")).status == 200
        await api.close()
        conductor = HttpConductor(f"{base}/v1", "m", client=http_client(ways=ways))
        assert (await conductor.describe())["id"] == "m"
        await conductor.close()
        price = {"call_usd": "0"}
        tool = WorkerSpec.model_validate({"name": "t", "handle": "tt", "kind": "tool", "url": base, "price": price})
        workers = pooled_workers(pool(tool), {}, b"depth", ways=ways)
        reply = await workers.complete(WorkerCall(tool, {"messages": []}, 5.0, "r", "s"))
        assert reply.body["choices"][0]["message"]["content"] == "told"
        await workers.close()
        assert proxy.asked.count(f"CONNECT far.test:{server.port}") == 3


async def test_the_first_connection_that_stands_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a name with several addresses, of which the first does not answer."""
    loop = asyncio.get_running_loop()
    resolve = loop.getaddrinfo
    async with Server(answers) as server:
        live = await resolve("127.0.0.1", server.port, type=1)
        dead = await resolve("192.0.2.1", server.port, type=1)  # of a network that is nowhere

        async def both(host: Any, port: Any, **more: Any) -> Any:
            return [*dead, *live] if host == "double.test" else await resolve(host, port, **more)

        monkeypatch.setattr(loop, "getaddrinfo", both)
        assert await said(worker(url=f"http://double.test:{server.port}/v1"), {}) == ["well"] * 3


def test_the_way_is_told_without_a_password() -> None:
    ways = Ways({"HTTPS_PROXY": "http://me:hidden@proxy.test:3128", "NO_PROXY": ".inside.test"})
    assert ways.of("https://api.test/v1").why == "by http://proxy.test:3128 (HTTPS_PROXY)"
    assert ways.of("https://llm.inside.test/v1").why == "direct"
    assert ways.of("http://api.test/v1").is_plain
    assert ways.of("https://api.test/v1").proxy == yarl.URL("http://proxy.test:3128")
    assert isinstance(ways.tls, ssl.SSLContext)
    assert json.dumps(ways.of("https://api.test/v1").why).count("hidden") == 0
