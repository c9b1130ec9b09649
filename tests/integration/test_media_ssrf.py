"""A client chooses what is fetched, so every way of pointing the gateway at its own network is tried here."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from gateway.adapters.upstream.media import WebMedia, is_public, resolve_by_system
from gateway.errors import BadRequest
from tests.contract.test_media import PNG, Files, Names, files, part, web
from tests.integration.test_api import served
from tests.kit import Kit, ask
from tests.security.report import measured

LISTED = "files.example"
# Every one of these would reach loopback, a private network, a metadata service or another scheme somewhere.
FORMS = [
    "https://127.0.0.1/", "https://127.1/", "https://127.0.1/", "https://2130706433/", "https://0x7f000001/",
    "https://0x7f.0.0.1/", "https://0x7f.1/", "https://0177.0.0.1/", "https://017700000001/", "https://0/",
    "https://0.0.0.0/", "https://00000000177.0.0.1/", "https://127.0.0.1./", "https://127.127.127.127/",
    "https://[::1]/", "https://[::]/", "https://[0:0:0:0:0:0:0:1]/", "https://[::ffff:127.0.0.1]/",
    "https://[::ffff:7f00:1]/", "https://[::127.0.0.1]/", "https://[64:ff9b::7f00:1]/", "https://[2002:7f00:1::]/",
    "https://[fe80::1%25eth0]/", "https://[fc00::1]/", "https://[fd00:ec2::254]/", "https://[ff02::1]/",
    "https://169.254.169.254/latest/meta-data/", "https://0xa9fea9fe/", "https://2852039166/", "https://0251.0376.0251.0376/",
    "https://metadata.google.internal/", "https://metadata/", "https://10.0.0.1/", "https://172.16.0.1/",
    "https://192.168.0.1/", "https://100.64.0.1/", "https://198.18.0.1/", "https://localhost/", "https://LOCALHOST/",
    "https://localhost.localdomain/", "https://ip6-localhost/", "https://127.0.0.1.nip.io/", "https://localtest.me/",
    f"https://{LISTED}@127.0.0.1/", f"https://{LISTED}:pw@127.0.0.1/", f"https://127.0.0.1@{LISTED}/", f"https://@{LISTED}/",
    f"https://{LISTED}%40127.0.0.1/", f"https://{LISTED}\\@127.0.0.1/", f"https://127.0.0.1\\@{LISTED}/",
    f"https://127.0.0.1\\.{LISTED}/", f"https:\\\\{LISTED}\\", f"https:/{LISTED}/a.png", f"https:{LISTED}/a.png",
    f"https:///{LISTED}/a.png", f"https://{LISTED}.evil.example/", f"https://evil{LISTED}/", f"https://evil.example/{LISTED}",
    f"https://evil.example?{LISTED}", f"https://evil.example#{LISTED}", f"https://evil.example#@{LISTED}/",
    f"https://{LISTED}./a.png", f"https://.{LISTED}/", f"https://{LISTED}:0/", f"https://{LISTED}:22/",
    f"https://{LISTED}:443443/", f"https://{LISTED}:/", f"https://{LISTED}:+443/", f"https://{LISTED}:４４３/",
    f"https://{LISTED}\t/", f"https://{LISTED}\r\nhost: evil/", f"https://{LISTED}/\r\nx: y", f" https://{LISTED}/",
    f"https://{LISTED}\x00.evil.example/", "https://ﬁles.example/", "https://ⓕiles.example/", "https://files。example/",
    "https://①②⑦.⓪.⓪.①/", f"HTTPS://{LISTED}:8443/", f"https://{LISTED.upper()}:8443/", f"https://xn--{LISTED}/",
    f"https://{LISTED}/" + "a" * 9000, "https://", "https:", "https://?", "https://#",
]  # fmt: skip
OTHER_SCHEMES = [
    f"http://{LISTED}/a.png", "ftp://127.0.0.1/", "file:///etc/passwd", "gopher://127.0.0.1:6379/_INFO",
    "dict://127.0.0.1/",
    "//127.0.0.1/", "javascript:alert(1)", "blob:https://a", "unix:///var/run/docker.sock", "jar:https://a!/b",
    "/etc/passwd",
]  # fmt: skip


@pytest.mark.parametrize("url", FORMS)
async def test_no_form_of_an_address_gets_past_the_list_of_hosts(url: str) -> None:
    names = Names(["127.0.0.1"])
    media = WebMedia([LISTED], resolve=names, admits=lambda address: True)
    with pytest.raises(BadRequest) as refused:
        media.check([part(url)])
    assert refused.value.code == "media_host_not_allowed"
    with pytest.raises(BadRequest):
        await media.fetch(part(url))
    assert names.asked == []  # not even its name was looked up


async def test_over_the_api_none_of_them_is_fetched_and_nothing_is_spent() -> None:
    assert len(FORMS) + len(OTHER_SCHEMES) >= 60
    measured("S2", f"{len(FORMS) + len(OTHER_SCHEMES)} forms of addresses and schemes")
    kit = Kit()
    names = Names(["127.0.0.1"])
    kit.completer._media = WebMedia([LISTED], resolve=names)
    async with served(kit) as gateway:
        for url in FORMS + OTHER_SCHEMES:
            content = [{"type": "image_url", "image_url": {"url": url}}]
            body = ask() | {"messages": [{"role": "user", "content": content}]}
            error = (await gateway.http.post("/v1/chat/completions", json=body)).json()["error"]
            assert error["param"] == "messages[0].content[0].image_url.url", url
            assert error["code"] in ("media_host_not_allowed", "invalid_value"), url
    assert names.asked == []
    assert kit.workers.calls == []
    assert kit.journal.events == []


async def test_without_a_list_nothing_is_fetched_and_the_setting_is_named() -> None:
    with pytest.raises(BadRequest, match="BATON_MEDIA_HOSTS"):
        WebMedia().check([part("https://upload.wikimedia.org/a.png")])


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.31.0.1", "192.168.1.1", "169.254.169.254",  # noqa: S104
        "100.64.0.1",
        "192.0.0.1", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "240.0.0.1",
        "255.255.255.255",
        "::", "::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::", "2001:0:7f00:1::", "fe80::1", "fe80::1%eth0", "fc00::1",
        "fd00:ec2::254", "ff02::1", "2001:db8::1", "not an address", "",
    ],
)  # fmt: skip
def test_addresses_of_inside_are_never_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"]
)
def test_public_ones_are(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["::1"], ["10.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["169.254.169.254"], []]
)
async def test_a_listed_name_that_leads_inside_is_refused_without_a_connection(addresses: list[str]) -> None:
    async with files() as site:
        media = web(site, Names(addresses), admits=is_public)
        with pytest.raises(BadRequest, match="no public address") as refused:
            await media.fetch(part(f"http://files.example:{site.port}/a.png"))
        assert refused.value.code == "media_host_not_allowed"
        assert site.connections == 0


async def test_a_name_is_asked_once_and_its_second_answer_never_counts() -> None:
    """DNS rebinding: public when it is looked at, inside when it would be connected to."""
    async with files() as site:
        names = Names(["127.0.0.1"], ["10.0.0.1"])
        media = web(site, names)
        assert (await media.fetch(part(f"http://files.example:{site.port}/a.png"))).data == PNG
        assert names.asked == ["files.example"]
        assert f"host: files.example:{site.port}" in site.requests[0].lower()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_never_followed(status: int) -> None:
    async with files() as site, files() as inside:
        head = f"HTTP/1.1 {status} Moved\r\nlocation: http://127.0.0.1:{inside.port}/a.png\r\ncontent-length: 0\r\n\r\n"
        site.raw["/a.png"] = head.encode()
        with pytest.raises(BadRequest, match="never follows a redirect") as refused:
            await web(site).fetch(part(f"http://files.example:{site.port}/a.png"))
        assert refused.value.code == "invalid_image_url"
        assert inside.connections == 0


async def test_a_site_that_hangs_is_left_in_time() -> None:
    async with files() as site:
        with pytest.raises(BadRequest, match="did not answer within"):
            await web(site, timeout_s=0.1).fetch(part(f"http://files.example:{site.port}/hangs"))


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\n\r\n" + PNG + b"\x00" * 100_000,
        b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: 99999999999\r\n\r\n" + PNG + b"\x00" * 100_000,
        b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-encoding: gzip\r\ncontent-length: 9\r\n\r\n123456789",
        b"not http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: 5000\r\n\r\n" + PNG,
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 50_000 + b"\r\n",
    ],
)
async def test_nothing_that_a_site_sends_is_believed(raw: bytes) -> None:
    async with files() as site:
        site.raw["/a.png"] = raw
        with pytest.raises(BadRequest) as refused:
            await web(site, bytes_max=50_000).fetch(part(f"http://files.example:{site.port}/a.png"))
        assert refused.value.code in ("media_too_large", "invalid_image_url")


async def test_a_site_that_refuses_the_connection_is_named() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        gone = Files({})
        gone.port = closed.getsockname()[1]
        with pytest.raises(BadRequest, match="could not be read"):
            await web(gone).fetch(part(f"http://files.example:{gone.port}/a.png"))


async def test_the_system_knows_the_addresses_of_loopback() -> None:
    assert set(await resolve_by_system("localhost", 443)) & {"127.0.0.1", "::1"}
    with pytest.raises(BadRequest, match="no public address"):
        await WebMedia(["localhost"]).fetch(part("https://localhost/a.png"))


@pytest.mark.parametrize(("name", "works"), [("files.example", True), ("other.example", False)])
async def test_the_certificate_must_be_the_names_although_the_address_is_pinned(
    name: str, works: bool, tmp_path: Path
) -> None:
    tool = shutil.which("openssl")
    assert tool, "this test makes a certificate with openssl"
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [tool, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", f"subjectAltName=DNS:{name}", "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(certificate, key)
    site = Files({"/a.png": ("image/png", PNG)})
    server = await asyncio.start_server(site.answer, "127.0.0.1", 0, ssl=ours)
    site.port = server.sockets[0].getsockname()[1]
    media = web(site, scheme="https", tls=ssl.create_default_context(cafile=str(certificate)))
    try:
        fetching = media.fetch(part(f"https://files.example:{site.port}/a.png"))
        if works:
            assert (await fetching).data == PNG
        else:
            with pytest.raises(BadRequest, match="could not be read"):
                await fetching
            assert site.requests == []
    finally:
        server.close()
