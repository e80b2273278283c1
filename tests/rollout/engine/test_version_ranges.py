"""The middleware that labels tokens, around a played vLLM: what the real one does is in test_versions."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from vime.rollout.engine.version_ranges import VERSIONS, VersionRanges


class PlayedEngine:
    """Requests that wait for `go`; each has choices that have so many tokens."""

    def __init__(self) -> None:
        self.label = "default"
        self.go = asyncio.Event()
        self.states: dict[str, SimpleNamespace] = {}
        self.output_processor = SimpleNamespace(request_states=self.states)

    async def get_weight_version(self) -> str:
        return self.label

    async def complete(self, request: Request) -> Response:
        name = f"cmpl-{request.headers['x-request-id']}-0"
        body = await request.json()
        for index, tokens in enumerate(body["tokens"]):
            detokenizer = SimpleNamespace(num_output_tokens=lambda key=f"{index}_{name}": self.states[key].tokens)
            self.states[f"{index}_{name}"] = SimpleNamespace(
                external_req_id=name, request_index=index, detokenizer=detokenizer, tokens=tokens
            )
        if body.get("wait", True):
            await self.go.wait()
        for index in range(len(body["tokens"])):
            self.states.pop(f"{index}_{name}", None)
        if body.get("stream"):
            return StreamingResponse(iter([b"data: {}\n\n"]), media_type="text/event-stream")
        if body.get("refuse"):
            return JSONResponse({"error": "no"}, status_code=400)
        return JSONResponse({"choices": [{"text": 'é "finish_reason": '}]})

    async def resume(self, request: Request) -> Response:
        return JSONResponse({})

    def application(self) -> Starlette:
        application = Starlette(
            routes=[
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/resume", self.resume, methods=["POST"]),
            ]
        )
        application.add_middleware(VersionRanges)
        application.state.engine_client = self
        return application


def test_ranges_begin_where_an_update_came() -> None:
    async def run() -> None:
        engine = PlayedEngine()
        transport = httpx.ASGITransport(engine.application())
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:

            async def ask(**body: Any) -> Any:
                return (await client.post("/v1/completions", json=body)).json()

            async def update(version: int) -> None:
                engine.label = str(version)
                await client.post("/resume")

            untouched = await ask(tokens=[3], wait=False)
            assert untouched == {"choices": [{"text": 'é "finish_reason": '}], VERSIONS: {"start": 0, "ranges": {}}}
            first = asyncio.create_task(ask(tokens=[5, 0, 7]))
            await asyncio.sleep(0.01)
            key = next(iter(engine.states)).partition("_")[2]
            await update(4)
            await update(4)  # resumed twice with the same weights
            second = asyncio.create_task(ask(tokens=[1]))
            await asyncio.sleep(0.01)
            engine.states[f"0_{key}"].tokens = 9
            del engine.states[f"2_{key}"]  # it has ended; its siblings go on
            await update(5)
            await update(6)  # nothing was sampled in between
            engine.go.set()
            assert (await first)[VERSIONS] == {
                "start": 0,
                "ranges": {"0": [[0, 0], [5, 4], [9, 6]], "1": [[0, 6]], "2": [[0, 0], [7, 4]]},
            }
            assert (await second)[VERSIONS] == {"start": 4, "ranges": {"0": [[0, 4], [1, 6]]}}
            assert (await ask(tokens=[2], wait=False))[VERSIONS] == {"start": 6, "ranges": {}}

    asyncio.run(run())


def test_what_is_no_json_object_passes_unchanged() -> None:
    async def run() -> None:
        engine = PlayedEngine()
        transport = httpx.ASGITransport(engine.application())
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            body = {"tokens": [1], "wait": False}
            assert (await client.post("/v1/completions", json=body | {"stream": True})).content == b"data: {}\n\n"
            refused = await client.post("/v1/completions", json=body | {"refuse": True})
            assert (refused.status_code, refused.json()) == (400, {"error": "no"})

    asyncio.run(run())
