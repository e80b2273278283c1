"""The router role with the real vllm-router, in front of a server that plays the engine and notes what it is asked."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import psutil
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.conftest import STARTUP, end_role, stack_config, start_role
from tests.rollout.flood import send_body
from vime.buffer.control import Control, EngineAddress
from vime.config.compose import dump_resolved
from vime.rollout.engine.auth import ENGINE_HEADER
from vime.run.directory import RunDir
from vime.run.role import Role
from vime.run.tokens import engine_token, generation_token, router_token


@dataclass
class PlayedEngine:
    """Answers as healthy, and to completions with what it was asked."""

    asked: list[tuple[str, str]] = field(default_factory=list)
    healthy: bool = True

    async def answer(self, request: Request) -> JSONResponse:
        if request.url.path == "/health":
            return JSONResponse({}, status_code=200 if self.healthy else 503)
        self.asked.append((request.url.path, request.headers.get("Authorization", "")))
        return JSONResponse({"asked": await request.json()}, headers={ENGINE_HEADER: "10.0.0.7:8003"})


@dataclass
class Routed:
    engine: PlayedEngine
    proxy: socket.socket
    """What http_proxy names for the role."""
    role: Role
    run_dir: RunDir
    url: str
    pid: int

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {router_token(self.role.token)}"}


@pytest.fixture
def routed(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Routed]:
    """Its parameter: another module than the role's own to start."""
    engine = PlayedEngine()
    app = Starlette(routes=[Route("/{path:path}", engine.answer, methods=["GET", "POST"])])
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    run_dir = RunDir.create(tmp_path, "run", "test")
    run_dir.config.write_text(dump_resolved(stack_config(tmp_path)))
    token = secrets.token_hex(16)
    control, port = Control.serve("127.0.0.1", 1, token)
    role = Role(run_dir.path, "127.0.0.1", port, "router", 1, token, 0, 1, "127.0.0.1", tmp_path)
    engine_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    proxy = socket.create_server(("127.0.0.1", 0))
    with monkeypatch.context() as patch:
        patch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        process = start_role(role, getattr(request, "param", "vime.rollout.router.router"))
    try:
        control.publish_engine(EngineAddress(index=0, url=engine_url, world_size=1, incarnation=0))
        yield Routed(engine, proxy, role, run_dir, control.router(STARTUP), process.pid)
    finally:
        end_role(process)
        proxy.close()
        server.should_exit = True
        thread.join(10)


def test_completions_reach_the_engine_whole_and_with_the_lesser_token(routed: Routed) -> None:
    body = {"model": "policy", "prompt": [1, 2], "n": 2, "seed": 2**61, "logprobs": 0, "return_token_ids": True}
    answer = httpx.post(routed.url + "/v1/completions", json=body, headers=routed.headers, timeout=30)
    asked = answer.json()["asked"]
    assert {key: asked[key] for key in body} == body
    assert answer.headers[ENGINE_HEADER] == "10.0.0.7:8003"  # which engine it was is not lost on the way
    assert routed.engine.asked == [("/v1/completions", f"Bearer {generation_token(routed.role.token)}")]
    for wrong in ({}, {"Authorization": f"Bearer {engine_token(routed.role.token, 0)}"}):
        assert httpx.post(routed.url + "/v1/completions", json=body, headers=wrong).status_code == 401
    assert httpx.post(routed.url + "/pause", headers=routed.headers).status_code == 404
    assert len(routed.engine.asked) == 1
    token = f"Authorization: Bearer {router_token(routed.role.token)}\r\n"
    for path, headers, refused in (
        ("/v1/completions", "", 401),
        ("/v1/completions", token, 413),
        ("/health", "", 200),
        ("/v1/completions", "Expect: 100-continue\r\n", 401),
    ):
        status, sent = send_body(routed.url, path, headers)
        assert status == refused
        assert sent < 16 << 20, "what fits into the buffers of the connection"
    # Neither the requests nor vllm-router's questions for health went to the proxy of the environment.
    routed.proxy.setblocking(False)
    with pytest.raises(BlockingIOError):
        routed.proxy.accept()


def test_an_engine_that_is_not_healthy_gets_no_requests(routed: Routed) -> None:
    body = {"model": "policy", "prompt": [1, 2]}
    routed.engine.healthy = False
    deadline = time.monotonic() + 15
    while httpx.post(routed.url + "/v1/completions", json=body, headers=routed.headers).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    before = len(routed.engine.asked)
    answer = httpx.post(routed.url + "/v1/completions", json=body, headers=routed.headers)
    assert (answer.status_code, len(routed.engine.asked)) == (503, before)
    routed.engine.healthy = True
    while httpx.post(routed.url + "/v1/completions", json=body, headers=routed.headers).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def backend_urls(pid: int) -> list[str]:
    """Where the vllm-router below the role listens."""
    (child,) = psutil.Process(pid).children()
    return [f"http://127.0.0.1:{c.laddr.port}" for c in child.net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def test_nobody_but_the_proxy_reaches_the_router(routed: Routed) -> None:
    """vllm-router asks nobody who they are: any user of the node could add an engine to it."""
    urls = backend_urls(routed.pid)
    assert len(urls) == 2
    for url in urls:
        with pytest.raises(httpx.ConnectTimeout):
            httpx.post(f"{url}/add_worker", params={"url": "http://127.0.0.1:9"}, timeout=0.5)
    body = {"model": "policy", "prompt": [1, 2]}
    assert httpx.post(routed.url + "/v1/completions", json=body, headers=routed.headers).status_code == 200


@pytest.mark.parametrize("routed", ["tests.rollout.router.unlocked"], indirect=True)
def test_an_engine_added_from_outside_ends_the_role(routed: Routed) -> None:
    """Where the kernel cannot lock the router's port; what the stranger could learn or answer must not count."""
    stranger = socket.create_server(("127.0.0.1", 0))
    worker = f"http://127.0.0.1:{stranger.getsockname()[1]}"
    body = {"url": worker}

    def add(url: str) -> None:
        try:
            httpx.post(f"{url}/add_worker", params=body, timeout=1)
        except httpx.HTTPError:
            pass  # it waits for the stranger's health

    def be_healthy() -> None:
        while True:
            try:
                connection, _ = stranger.accept()
            except OSError:
                return
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            connection.close()

    threading.Thread(target=be_healthy, daemon=True).start()
    for url in backend_urls(routed.pid):
        add(url)
    process = psutil.Process(routed.pid)
    try:
        gone = process.wait(timeout=30)
    finally:
        stranger.close()
    assert gone in (1, None)
    log = routed.run_dir.log("router", 0, 1).read_text()
    assert f"the router's engines were changed from outside: ['{worker}']" in log


def test_the_end_of_vllm_router_is_the_end_of_the_role(routed: Routed) -> None:
    (child,) = psutil.Process(routed.pid).children()
    child.kill()
    psutil.wait_procs([psutil.Process(routed.pid)], timeout=10)
    assert "vllm-router ended with -9" in routed.run_dir.log("router", 0, 1).read_text()


def test_without_its_engine_it_stops_when_asked(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, "run", "test")
    run_dir.config.write_text(dump_resolved(stack_config(tmp_path)))
    control, port = Control.serve("127.0.0.1", 1, "t")
    role = Role(run_dir.path, "127.0.0.1", port, "router", 1, "t", 0, 1, "127.0.0.1", tmp_path)
    process = start_role(replace(role), "vime.rollout.router.router")
    while not run_dir.events.exists():
        time.sleep(0.05)
        assert process.poll() is None
    assert end_role(process) == 0
    assert control.try_get("router") is None
