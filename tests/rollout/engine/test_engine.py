"""The engine and the router as they really are: ids, logprobs, tokens, seeds."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest

from tests.conftest import EngineStack
from tests.rollout.reference import logprobs
from vime.rollout.client import Completion, RolloutClient, Sampling
from vime.rollout.limits import read_limits
from vime.run.http_client import RequestRefused
from vime.run.tokens import engine_token, router_token

pytestmark = pytest.mark.slow

PROMPT = [257, 49, 43, 50, 258]


def complete(
    stack: EngineStack, samples: int, temperature: float, seed: int | None, url: str | None = None
) -> list[Completion]:
    async def ask() -> list[Completion]:
        limits = read_limits(stack.config.rollout, stack.model)
        sampling = Sampling(temperature, 1.0, limits.stop_token_ids)
        direct = url == stack.engine_url
        token = engine_token(stack.role.token, 0) if direct else router_token(stack.role.token)
        async with RolloutClient(url or stack.router_url, token, 120, patience=60) as client:
            return await client.complete(PROMPT, samples, 12, sampling, seed)

    return asyncio.run(ask())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_scaled_distribution(engine_stack: EngineStack, temperature: float) -> None:
    """Case 8, on a real model."""
    for completion in complete(engine_stack, 4, temperature, seed=11):
        expected = logprobs(engine_stack.model, PROMPT, completion.token_ids, temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)


def test_seeds_repeat_and_differ(engine_stack: EngineStack) -> None:
    """Case 7: the samples of a group differ from each other, and a seed gives the same group again."""
    first, again, other = (complete(engine_stack, 4, 1.0, seed) for seed in (5, 5, 6000))
    ids = [[tuple(c.token_ids.tolist()) for c in group] for group in (first, again, other)]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 4
    # A response of the end token alone may well come twice; longer ones of a random model do not.
    assert not {response for response in ids[0] if len(response) > 3} & set(ids[2])


def test_direct_and_routed_answers_are_equal(engine_stack: EngineStack) -> None:
    routed, direct = (
        complete(engine_stack, 2, 1.0, 9, url) for url in (engine_stack.router_url, engine_stack.engine_url)
    )
    for a, b in zip(routed, direct, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_a_refused_request_says_why(engine_stack: EngineStack) -> None:
    async def ask() -> None:
        async with RolloutClient(
            engine_stack.router_url, router_token(engine_stack.role.token), 60, patience=5
        ) as client:
            await client.complete(PROMPT, 1, 100_000, Sampling(1.0, 1.0, (259,)), None)

    with pytest.raises(RequestRefused, match="400"):
        asyncio.run(ask())


def test_every_engine_route_but_health_needs_the_token(engine_stack: EngineStack) -> None:
    schema = httpx.get(engine_stack.engine_url + "/openapi.json", headers=engine_stack.headers).json()
    routes = [(method, path) for path, methods in schema["paths"].items() for method in methods]
    assert ("post", "/collective_rpc") in routes
    assert ("post", "/update_weights") in routes
    routes += [("get", path) for path in ("/metrics", "/openapi.json", "/docs", "/nothing", "//health", "/health/")]
    answers = {
        (method, path): httpx.request(
            method, engine_stack.engine_url + path.replace("{", "").replace("}", "")
        ).status_code
        for method, path in routes
    }
    assert answers.pop(("get", "/health")) == 200
    assert set(answers.values()) == {401}, {route: code for route, code in answers.items() if code != 401}
    wrong = httpx.get(engine_stack.engine_url + "/weight_info", headers={"Authorization": "Bearer wrong"})
    assert wrong.status_code == 401


def test_every_router_route_but_health_needs_the_token(engine_stack: EngineStack) -> None:
    url = engine_stack.router_url
    assert httpx.get(url + "/health").status_code == 200
    # vllm-router's own routes, and engine routes that it would pass on with its key.
    for path in (
        "list_workers",
        "workers",
        "add_worker",
        "metrics",
        "get_loads",
        "pause",
        "collective_rpc",
        "v1/models",
    ):
        for method in ("GET", "POST", "DELETE"):
            assert httpx.request(method, f"{url}/{path}").status_code == 401, (method, path)
            assert httpx.request(method, f"{url}/{path}", headers=engine_stack.router_headers).status_code == 404, (
                method,
                path,
            )
    body = {"model": "policy", "prompt": PROMPT, "max_tokens": 1}
    assert httpx.post(url + "/v1/completions", json=body).status_code == 401
    assert httpx.post(url + "/v1/completions", json=body, headers=engine_stack.router_headers).status_code == 200
