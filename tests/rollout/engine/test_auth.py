"""The token and the gate, over real HTTP."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.rollout.flood import send_body
from vime.rollout.engine.auth import ENGINE_HEADER, RunTokenMiddleware
from vime.run.tokens import engine_token, generation_token

RUN = "the-run's-token"
TOKEN = engine_token(RUN, 0)
BEARER = {"Authorization": f"Bearer {TOKEN}"}


async def answer(request: Request) -> JSONResponse:
    return JSONResponse({"path": request.url.path}, status_code=int(request.query_params.get("status", "200")))


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, gated: bool) -> Iterator[str]:
    monkeypatch.setenv("VIME_ENGINE_TOKEN", TOKEN)
    monkeypatch.setenv("VIME_GENERATION_TOKEN", generation_token(RUN))
    monkeypatch.setenv("VIME_ENGINE_GATED", "1" if gated else "0")
    app: Any = RunTokenMiddleware(Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])]))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


def test_only_health_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, gated=False) as url:
        assert httpx.get(url + "/health").status_code == 200
        for path in (
            "/",
            "/v1/models",
            "/collective_rpc",
            "/health/",
            "/healthz",
            "//health",
            "/HEALTH",
            "/pause?mode=keep",
        ):
            assert httpx.get(url + path).status_code == 401, path
            assert httpx.get(url + path, headers=BEARER).status_code == 200, path


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN}n",
        TOKEN,
        f"bearer {TOKEN}",
        f"Bearer {RUN}",
        f"Bearer {engine_token(RUN, 1)}",
    ],
)
def test_a_wrong_token_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    with serving(monkeypatch, gated=False) as url:
        assert httpx.get(url + "/v1/models", headers={"Authorization": value}).status_code == 401
        twice = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", value)]
        assert httpx.get(url + "/v1/models", headers=twice).status_code == 401


@pytest.mark.parametrize("path", ["/v1/completions", "/update_weights", "/health"])
def test_a_body_without_the_token_is_refused_at_the_header(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    with serving(monkeypatch, gated=False) as url:
        status, sent = send_body(url, path)
        assert status == 401
        assert sent < 16 << 20, "what fits into the buffers of the connection"


def test_the_generation_token_opens_generation_only(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"Authorization": f"Bearer {generation_token(RUN)}"}
    with serving(monkeypatch, gated=False) as url:
        answer = httpx.post(url + "/v1/completions", headers=headers)
        assert answer.status_code == 200
        assert answer.headers[ENGINE_HEADER] == url.removeprefix("http://")
        for path in ("/pause", "/update_weights", "/collective_rpc", "/weight_info", "/v1"):
            assert httpx.post(url + path, headers=headers).status_code == 401, path


def test_a_gated_engine_serves_after_a_finished_update(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, gated=True) as url:
        assert httpx.get(url + "/health").status_code == 503
        assert httpx.post(url + "/v1/completions", headers=BEARER).status_code == 503
        assert httpx.post(url + "/v1/completions").status_code == 401
        for path in ("/weight_info", "/start_weight_update", "/update_weights", "/finish_weight_update?status=500"):
            httpx.post(url + path, headers=BEARER)
            assert httpx.get(url + "/health").status_code == 503, path
        assert httpx.post(url + "/finish_weight_update").status_code == 401
        assert httpx.get(url + "/health").status_code == 503
        assert httpx.post(url + "/finish_weight_update", headers=BEARER).status_code == 200
        assert httpx.get(url + "/health").status_code == 200
        assert httpx.post(url + "/v1/completions", headers=BEARER).status_code == 200


@pytest.mark.parametrize("name", ["VIME_ENGINE_TOKEN", "VIME_GENERATION_TOKEN"])
def test_no_token_no_server(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in ("VIME_ENGINE_TOKEN", "VIME_GENERATION_TOKEN"):
        monkeypatch.setenv(other, "secret")
    monkeypatch.delenv(name)
    with pytest.raises(RuntimeError, match=f"{name} is not set"):
        RunTokenMiddleware(Starlette())
