"""Keys: with one set, everything but `/health` is closed, whatever the path looks like.

Without one, names that web pages could come by are closed.
"""

from __future__ import annotations

import asyncio
import socket

import pytest

from support.servers import MODEL, serving
from tvr import demo
from tvr.serve.gate import Gate

KEYS = ("right-key", "other-key")


@pytest.fixture(scope="module")
def running():
    with serving(demo.path(), api_keys=KEYS) as running:
        yield running


@pytest.fixture(scope="module")
def keyless():
    with serving(demo.path()) as running:
        yield running


ROUTES = [
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/"),
    ("GET", "/no-such-route"),
    ("OPTIONS", "/v1/models"),
]

TRICKS = [
    *("//v1/models", "/v1/models/", "/V1/MODELS", "/v1//models", "/./v1/models", "/health/"),
    *("/health/../v1/models", "/health/v1/models", "//health", "/Health", "/health%2f", "/healthz"),
    *("/health;/v1/models", "/%2e/health", "/v1/models?/health", "/v1/models#/health"),
    *("http://x/v1/models", "/v1/models%00/health", "/%76%31/models", "*"),
]


def test_health_is_open_and_has_no_body_where_none_is_asked_for(running):
    """Balancers of load ask by HEAD, and got 405."""
    whole, head = running.get("/health"), running.ask("HEAD", "/health")
    assert whole.status == head.status == 200
    assert whole.json == {"status": "ok"}
    assert head.body == b""
    assert head.headers["content-length"] == whole.headers["content-length"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_but_health_asks_for_a_key(running, method, path):
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        reply = running.ask(method, path, headers=headers)
        assert reply.status == 401
        assert reply.error["code"] == "invalid_api_key"
        assert reply.headers["www-authenticate"].startswith("Basic" if path == "/" else "Bearer")
    for key in KEYS:
        assert running.ask(method, path, headers={"Authorization": f"Bearer {key}"}).status != 401


def test_health_is_open(running):
    assert running.get("/health").status == 200
    assert running.get("/health", headers={"Authorization": "Bearer wrong"}).status == 200


@pytest.mark.parametrize("path", TRICKS)
def test_no_spelling_of_a_path_is_a_way_around(running, path):
    with socket.create_connection(running.address, timeout=30) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert sock.recv(65536).startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 400 "))


@pytest.mark.parametrize(
    "value",
    [
        *(
            "right-key",
            "Bearer",
            "Bearer ",
            "Basic right-key",
            "Bearer right-key x",
            "Bearer right",
        ),
        *("Bearer right-key2", "bearer  RIGHT-KEY", "Bearerright-key", "Bearer r\u00ecght-key"),
    ],
)
def test_what_is_no_key_opens_nothing(running, value):
    assert running.get("/v1/models", headers={"Authorization": value}).status == 401


def test_two_keys_at_once_open_nothing(running):
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    both = b"Authorization: Bearer wrong\r\nAuthorization: Bearer right-key\r\n\r\n"
    with socket.create_connection(running.address, timeout=30) as sock:
        sock.sendall(head + both)
        assert sock.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_openais_client_sends_its_key(running):
    import openai

    with running.openai(api_key="right-key") as client:
        assert client.models.list().data[0].id == MODEL
        assert client.completions.create(model=MODEL, prompt="O", max_tokens=1).choices
    with running.openai(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_body_is_not_read_without_a_key(running):
    """Nor does it count for anything."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000000\r\n\r\n"
    with socket.create_connection(running.address, timeout=30) as sock:
        sock.sendall(head)
        assert sock.recv(65536).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    "host", ["evil.test", "evil.test:80", "localhost.evil.test", "x", ":8000", ""]
)
def test_without_a_key_a_web_page_gets_in_by_no_name_of_its_own(keyless, host):
    """Its owner may let it point to 127.0.0.1, and then it is of the server's own origin."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    for reply in (
        keyless.post("/v1/completions", body, headers={"Host": host}),
        keyless.get("/metrics", headers={"Host": host}),
        keyless.get("/", headers={"Host": host}),
    ):
        assert (reply.status, reply.error["code"]) == (403, "foreign_host")
    assert keyless.get("/health", headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8000", "a.localhost:1", "127.0.0.1", "[::1]:8000", "10.0.0.1:80"],
)
def test_without_a_key_this_machines_names_and_addresses_are_served(keyless, host):
    assert keyless.get("/v1/models", headers={"Host": host}).status == 200


def test_with_a_key_any_host_is_served(running):
    headers = {"Host": "chat.example.org", "Authorization": "Bearer right-key"}
    assert running.get("/v1/models", headers=headers).status == 200


def test_a_server_for_other_machines_is_served_by_any_name():
    async def app(scope, receive, send):
        passed.append(scope["path"])

    passed = []
    scope = {"type": "http", "path": "/v1/models", "headers": [(b"host", b"server.example.org")]}
    asyncio.run(Gate(app, (), is_local=False)(scope, None, None))
    assert passed == ["/v1/models"]
