"""What asks the run's servers passes by the proxy of the environment, which must not see the token."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from tests.rollout.serving import serving
from vime.rollout.engine.server import READY_PATH, Server
from vime.run.http_client import BadResponse, Client, RequestRefused, RetryingClient, Unavailable
from vime.run.network import without_proxy


@dataclass
class PlayedProxy:
    """Notes what it is asked to pass on, and answers 200 itself."""

    listener: socket.socket
    seen: list[bytes] = field(default_factory=list)

    def serve(self) -> None:
        """Until the listener is closed."""
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                self.seen.append(connection.recv(65536))
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedProxy]:
    """A proxy that the environment names for everything."""
    played = PlayedProxy(socket.create_server(("127.0.0.1", 0)))
    thread = threading.Thread(target=played.serve, daemon=True)
    thread.start()
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{played.listener.getsockname()[1]}")
    yield played
    played.listener.shutdown(socket.SHUT_RDWR)
    played.listener.close()
    thread.join(5)


async def tokens(request: web.Request) -> web.Response:
    return web.json_response({"token": request.headers.get("Authorization")})


def test_clients_pass_a_proxy_by(proxy: PlayedProxy) -> None:
    async def run() -> None:
        async with serving({"/x": tokens}, {"/x": tokens}) as url:
            async with RetryingClient({"Authorization": "Bearer t"}, 5, 5) as client:
                assert (await client.ask(f"{url}/x", {}))[1] == {"token": "Bearer t"}
            answer = await asyncio.to_thread(Client().ask, "GET", f"{url}/x", "t", 5)
            assert answer == {"token": "Bearer t"}
            assert proxy.seen == []
            async with RetryingClient({}, 5, 5, trust_env=True) as client:
                await client.ask(f"{url}/x", {})
            assert len(proxy.seen) == 1, "a client that is told to uses it"

    asyncio.run(run())


def test_readiness_of_an_engine_passes_a_proxy_by(proxy: PlayedProxy, tmp_path: Path) -> None:
    async def run() -> None:
        async with serving({}, {READY_PATH: tokens}) as url:
            process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            with process:
                assert await asyncio.to_thread(Server(process, url, "secret", tmp_path).wait_ready, 10, lambda: False)

    asyncio.run(run())
    assert proxy.seen == []


def test_an_environment_without_proxies() -> None:
    environ = {"http_proxy": "a", "HTTPS_PROXY": "b", "ALL_PROXY": "c", "no_proxy": "d", "PATH": "e"}
    assert without_proxy(environ) == {"PATH": "e"}


def test_one_try_says_how_it_went() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=int(request.query["status"]), text=request.query["text"])

    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(1)
        return web.Response()

    async def run() -> None:
        async with serving({}, {"/x": answer, "/slow": slow}) as url:
            client = Client()

            def ask(status: int, text: str) -> object:
                return client.ask("GET", f"{url}/x", "t", 5, params={"status": str(status), "text": text})

            assert await asyncio.to_thread(ask, 200, "") is None
            assert await asyncio.to_thread(ask, 200, "[1]") == [1]
            for status, kind in ((400, RequestRefused), (404, RequestRefused), (429, Unavailable), (503, Unavailable)):
                with pytest.raises(kind, match=f"{status}: why") as caught:
                    await asyncio.to_thread(ask, status, "why")
                assert (caught.value.status, caught.value.text) == (status, "why")
            with pytest.raises(BadResponse):
                await asyncio.to_thread(ask, 200, "{")
            with pytest.raises(TimeoutError):
                await asyncio.to_thread(client.ask, "GET", f"{url}/slow", "t", 0.1)
        with pytest.raises(Unavailable) as gone:
            await asyncio.to_thread(ask, 200, "")
        assert gone.value.status is None

    asyncio.run(run())
