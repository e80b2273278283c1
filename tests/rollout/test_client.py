"""The client against a server that misbehaves, and what is taken from an answer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web

from tests.rollout.serving import Handler, serving
from vime.errors import WaitTimeout
from vime.rollout.client import Completion, RolloutClient, Sampling, read_completions
from vime.run.http_client import BadResponse, RequestRefused

PROMPT = [1, 2, 3]


def choice(index: int, **changes: Any) -> dict[str, Any]:
    good = {
        "index": index,
        "token_ids": [5, 6],
        "logprobs": {"token_logprobs": [-0.5, -1.5]},
        "prompt_token_ids": PROMPT,
        "finish_reason": "stop",
    }
    return good | changes


def answer_of(*choices: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"choices": list(choices), "policy_versions": {"start": 4, "ranges": {}}} | changes


def test_choices_are_taken_by_their_index() -> None:
    first, second = read_completions(answer_of(choice(1, finish_reason="length"), choice(0)), PROMPT, 2)
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")
    assert first.token_ids.tolist() == [5, 6]
    assert first.logprobs.tolist() == [-0.5, -1.5]
    assert first.versions.tolist() == second.versions.tolist() == [[0, 4]]


def test_versions_of_a_response_that_an_update_came_upon() -> None:
    versions = {"start": 4, "ranges": {"1": [[0, 4], [1, 5]], "0": [[0, 5], [2, 6]]}}
    first, second = read_completions(answer_of(choice(0), choice(1), policy_versions=versions), PROMPT, 2)
    assert first.versions.tolist() == [[0, 5]], "an update after its last token sampled none of it"
    assert second.versions.tolist() == [[0, 4], [1, 5]]


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (None, "does not say which policy version"),
        ({"start": None, "ranges": {}}, "policy versions"),
        ({"start": 1, "ranges": {"0": [[1, 2]]}}, "from 0 on"),
        ({"start": 1, "ranges": {"0": [[0, 2], [0, 3]]}}, "from 0 on"),
        ({"start": 1, "ranges": {"0": []}}, "from 0 on"),
        ({"start": 1, "ranges": {"0": [["x", 2]]}}, "not rows of numbers"),
    ],
)
def test_versions_that_do_not_read_are_a_bad_response(versions: Any, message: str) -> None:
    with pytest.raises(BadResponse, match=message):
        read_completions(answer_of(choice(0), policy_versions=versions), PROMPT, 1)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "no choices, 2 were asked for"),
        (answer_of(choice(0)), "1 choices, 2 were asked for"),
        (answer_of(choice(0), choice(0)), "choices are numbered"),
        (answer_of(choice(0), choice(1, finish_reason="abort")), "finish_reason is 'abort'"),
        (answer_of(choice(0), choice(1, finish_reason=None)), "finish_reason is None"),
        (answer_of(choice(0), choice(1, prompt_token_ids=[1])), "another prompt"),
        (answer_of(choice(0), choice(1, token_ids=None)), "no token ids or no logprobs"),
        (answer_of(choice(0), choice(1, logprobs=None)), "no token ids or no logprobs"),
        (answer_of(choice(0), choice(1, token_ids=[5])), "1 token ids and 2 logprobs"),
        (
            answer_of(choice(0), choice(1, logprobs={"token_logprobs": [-1.0, float("nan")]})),
            "token 1 is not finite",
        ),
        (answer_of(choice(0), choice(1, logprobs={"token_logprobs": [None, -1.0]})), "not"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_says_why(answer: dict[str, Any], message: str) -> None:
    with pytest.raises(BadResponse, match=message):
        read_completions(answer, PROMPT, 2)


def ask(handler: Handler, patience: float) -> list[Completion]:
    async def run() -> list[Completion]:
        async with (
            serving({"/v1/completions": handler}) as url,
            RolloutClient(url, "token", request_timeout=1.0, patience=patience) as client,
        ):
            return await client.complete(PROMPT, 1, 8, Sampling(1.0, 1.0, (9,)), seed=7)

    return asyncio.run(run())


def test_a_server_that_comes_back_is_asked_again() -> None:
    bodies: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer token"
        bodies.append(await request.json())
        if len(bodies) < 3:
            return web.json_response({"error": "restarting"}, status=503)
        return web.json_response(answer_of(choice(0)))

    (completion,) = ask(handler, patience=30)
    assert completion.token_ids.tolist() == [5, 6]
    assert bodies[0] == bodies[2]
    sent = {
        key: bodies[0][key] for key in ("prompt", "n", "max_tokens", "logprobs", "return_token_ids", "seed", "top_p")
    }
    assert sent == {
        "prompt": PROMPT, "n": 1, "max_tokens": 8, "logprobs": 0, "return_token_ids": True, "seed": 7, "top_p": 1.0
    }  # fmt: skip


def test_patience_ends_with_the_reason() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"error": "no engine is healthy"}, status=503)

    begun = time.monotonic()
    with pytest.raises(WaitTimeout, match=r"attempts for an answer of .*: status 503: .*no engine is healthy"):
        ask(handler, patience=1.0)
    assert time.monotonic() - begun < 3


def test_a_request_that_hangs_is_ended() -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(3)
        return web.Response()

    with pytest.raises(WaitTimeout, match="TimeoutError"):
        ask(handler, patience=0.5)


def test_a_refusal_is_not_repeated() -> None:
    calls = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        return web.json_response({"error": "max_tokens is too large"}, status=400)

    with pytest.raises(RequestRefused, match=r"400: .*max_tokens is too large"):
        ask(handler, patience=30)
    assert calls == 1


def test_an_answer_that_is_no_json_is_a_bad_response() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=b"<html>")

    with pytest.raises(BadResponse, match="not JSON"):
        ask(handler, patience=1)
