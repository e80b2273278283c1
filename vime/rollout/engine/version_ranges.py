"""Which policy version sampled which token: an ASGI middleware that adds it to the answers of /v1/completions.

A request that runs while weights are updated (`/pause?mode=keep`) goes on with the new ones. Between the pause and
`/resume` nothing is sampled, so the number of tokens that each running request has when `/resume` comes in is where its
new range begins. Nothing is streamed for it: the ranges travel in the answer, under VERSIONS.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from vime.rollout.engine.auth import App, AsgiMessage, Receive, Scope, Send

VERSIONS = "policy_versions"
"""{"start": version at the request's start, "ranges": {choice index: [[first token, version], ...]}}, with ranges for
the choices that an update came upon."""
COMPLETIONS, RESUME = "/v1/completions", "/resume"
HEADER = b"x-request-id"


@dataclass
class _Running:
    """A request under way: the version at its start, and ranges by choice where an update came in between."""

    start: int
    ranges: dict[int, list[list[int]]] = field(default_factory=dict)


class VersionRanges:
    """Counts versions from the label that the last weight update gave; the initial weights are version 0."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.version = 0
        self.started = 0
        self.running: dict[str, _Running] = {}
        """By vLLM's name of the request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            if scope["path"] == RESUME:
                await self._mark(scope["app"].state.engine_client)
            elif scope["path"] == COMPLETIONS:
                await self._complete(scope, receive, send)
                return
        await self.app(scope, receive, send)

    async def _mark(self, engine: Any) -> None:
        """The engine is paused and about to go on, maybe with new weights: begin a range in everything that runs."""
        label = await engine.get_weight_version()
        self.version = int(label) if label.isdecimal() else 0
        for state in list(engine.output_processor.request_states.values()):
            running = self.running.get(state.external_req_id)
            if running is None or state.detokenizer is None:
                continue
            ranges = running.ranges.setdefault(state.request_index, [[0, running.start]])
            tokens = state.detokenizer.num_output_tokens()
            if ranges[-1][0] == tokens:
                ranges[-1][1] = self.version
            elif ranges[-1][1] != self.version:
                ranges.append([tokens, self.version])

    async def _complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started += 1
        name = f"vime-{self.started}"
        headers = [(key, value) for key, value in scope["headers"] if key != HEADER]
        scope = {**scope, "headers": [*headers, (HEADER, name.encode())]}
        key = f"cmpl-{name}-0"  # what vLLM calls the first prompt of a request; vime asks one prompt a request
        running = self.running[key] = _Running(self.version)
        try:
            await self.app(scope, receive, _Stamp(running, send))
        finally:
            del self.running[key]


class _Stamp:
    """Passes an answer on; one that is a JSON object gets the versions."""

    def __init__(self, running: _Running, send: Send) -> None:
        self.running = running
        self.send = send
        self.head: AsgiMessage | None = None
        self.body = b""

    async def __call__(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            kind = dict(message["headers"]).get(b"content-type", b"")
            if kind.startswith(b"application/json"):
                self.head = message  # its length is known only once the body is
                return
        if self.head is None:
            await self.send(message)
            return
        self.body += message.get("body", b"")
        if not message.get("more_body"):
            await self._finish(self.head)

    async def _finish(self, head: AsgiMessage) -> None:
        body = self.body.rstrip()
        if body.endswith(b"}"):
            added = {VERSIONS: {"start": self.running.start, "ranges": self.running.ranges}}
            body = body[:-1] + b"," + json.dumps(added, separators=(",", ":")).encode()[1:]
        headers = [(key, value) for key, value in head["headers"] if key != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self.send({**head, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})
