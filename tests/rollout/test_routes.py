"""Routed experts out of an engine's answer: what is there survives, what is not is found at the first response."""

from __future__ import annotations

import asyncio
import base64
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from tests.rollout.serving import serving
from vime.models.routing import Routing, join_routes
from vime.rollout.client import Completion, RolloutClient, Sampling, read_completions
from vime.rollout.routes import BadRoutes, Routes, decode_routes, routes_of_turns
from vime.run.http_client import BadResponse

PROMPT = [1, 2, 3]
ROUTING = Routing(layers=3, moe_layers=(1, 2), experts=8, top_k=2)


def encode(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return base64.b64encode(file.getvalue()).decode()


def engine_routes(tokens: int, routing: Routing = ROUTING, seed: int = 0, dtype: str = "u1") -> np.ndarray[Any, Any]:
    """What an engine says of `tokens` tokens: distinct experts in each layer that has them, zeros in the others."""
    rng = np.random.default_rng(seed)
    drawn = rng.permuted(np.tile(np.arange(routing.experts), (tokens - 1, routing.layers, 1)), axis=2)
    ids = drawn[..., : routing.top_k].astype(dtype)
    ids[:, [layer for layer in range(routing.layers) if layer not in routing.moe_layers]] = 0
    return ids


def choice(index: int = 0, **changes: Any) -> dict[str, Any]:
    good = {
        "index": index,
        "token_ids": [5, 6],
        "logprobs": {"token_logprobs": [-0.5, -1.5]},
        "prompt_token_ids": PROMPT,
        "finish_reason": "stop",
        "routed_experts": encode(engine_routes(5, seed=index)),
    }
    return good | changes


@pytest.mark.parametrize("moe_layers", [(0, 1, 2, 3), (1, 2, 3), (0, 2), (3,)])
@pytest.mark.parametrize(("experts", "top_k", "dtype"), [(8, 2, "u1"), (256, 8, "u1"), (512, 8, "u2"), (300, 3, "u2")])
def test_layers_come_first_and_dense_ones_are_left_out(
    moe_layers: tuple[int, ...], experts: int, top_k: int, dtype: str
) -> None:
    routing = Routing(4, moe_layers, experts, top_k)
    said = engine_routes(40, routing, dtype=dtype)
    routes = decode_routes(encode(said), 40, routing)
    assert routes.ids.dtype == np.dtype(dtype)
    assert routes.ids.shape == (len(moe_layers), 39, top_k)
    for place, layer in enumerate(moe_layers):
        assert (routes.ids[place] == said[:, layer]).all()
    assert routes.first == 0


@pytest.mark.parametrize("held", ["u1", "u2", "i4", "i8"])
def test_the_type_follows_the_expert_count_not_the_answer(held: str) -> None:
    said = engine_routes(9, Routing(1, (0,), 256, 2), dtype=held)
    assert decode_routes(encode(said), 9, Routing(1, (0,), 256, 2)).ids.dtype == np.uint8
    assert decode_routes(encode(said), 9, Routing(1, (0,), 257, 2)).ids.dtype == np.uint16


def test_case_14_every_id_survives_and_one_beyond_is_refused() -> None:
    for experts in (128, 256, 512):
        routing = Routing(1, (0,), experts, 1)
        ids = np.array([i for i in (0, 127, 128, 255, 256, 511) if i < experts], "u2").reshape(-1, 1, 1)
        assert (decode_routes(encode(ids), len(ids) + 1, routing).ids[0, :, 0] == ids[:, 0, 0]).all()
        with pytest.raises(BadRoutes, match=f"expert id {experts} is out of range for {experts} experts"):
            decode_routes(encode(np.where(ids == experts - 1, experts, ids)), len(ids) + 1, routing)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no routed experts"),
        (3, "no routed experts"),
        ("", "not an array"),
        ("####", "not an array"),
        (base64.b64encode(b"\x93NUMPY").decode(), "not an array"),
        (encode(engine_routes(5))[:80], "not an array"),
        (encode(engine_routes(5))[:-8], "not an array"),
        (encode(np.array([{"an": "object"}], dtype=object)), r"are object\[1\], expected integers \[4, 3, 2\]"),
        (encode(engine_routes(5).astype("f4")), r"are float32\[4, 3, 2\]"),
        (encode(np.asfortranarray(engine_routes(5))), "expected integers"),
        (encode(engine_routes(4)), r"are uint8\[3, 3, 2\], expected integers \[4, 3, 2\]"),
        (encode(engine_routes(6)), r"are uint8\[5, 3, 2\]"),
        (encode(engine_routes(5)[:, :2]), r"are uint8\[4, 2, 2\]"),
        (encode(engine_routes(5)[..., :1]), r"are uint8\[4, 3, 1\]"),
        (encode(engine_routes(5).astype("i2") - 1), "expert id -1 is out of range for 8 experts"),
    ],
)
def test_what_is_not_the_tokens_routes_is_refused(text: Any, message: str) -> None:
    with pytest.raises(BadRoutes, match=message):
        decode_routes(text, 5, ROUTING)


def test_a_start_without_routes_is_declared_and_a_hole_is_refused() -> None:
    said = engine_routes(9)
    said[:3] = 0
    assert decode_routes(encode(said), 9, ROUTING).first == 3
    said[:] = 0
    assert decode_routes(encode(said), 9, ROUTING).first == 8
    said = engine_routes(9)
    said[5] = 0
    with pytest.raises(BadRoutes, match="position 5 has no routes"):
        decode_routes(encode(said), 9, ROUTING)


def test_case_13_a_resumed_sequence_has_each_position_once() -> None:
    """Segments (P + a), then (P + a + b), each with routes of its whole sequence."""
    first = decode_routes(encode(engine_routes(7, seed=1)), 7, ROUTING).ids
    second = decode_routes(encode(engine_routes(12, seed=2)), 12, ROUTING).ids
    joined = join_routes(first, second)
    assert joined.shape == (2, 11, 2)
    assert (joined[:, :6] == first).all()
    assert (joined[:, 6:] == second[:, 6:]).all()
    assert (join_routes(second, second) == second).all()
    for other in (second[:, :5], second[:1], second[..., :1]):
        with pytest.raises(ValueError, match="do not continue"):
            join_routes(first, other)


def answer_of(*choices: dict[str, Any]) -> dict[str, Any]:
    return {"choices": list(choices), "policy_versions": {"start": 0, "ranges": {}}}


def test_routes_are_those_of_their_own_choice() -> None:
    first, second = read_completions(answer_of(choice(1), choice(0)), PROMPT, 2, ROUTING)
    for index, completion in enumerate((first, second)):
        assert completion.routes is not None
        assert (completion.routes.ids[0] == engine_routes(5, seed=index)[:, 1]).all()
    assert read_completions(answer_of(choice()), PROMPT, 1)[0].routes is None


def test_case_12_an_aborted_response_without_tokens_needs_no_routes() -> None:
    aborted = choice(token_ids=[], logprobs={"token_logprobs": []}, finish_reason="abort", routed_experts=None)
    with pytest.raises(BadResponse, match="finish_reason is 'abort'"):  # tried again, like any that was aborted
        read_completions(answer_of(aborted), PROMPT, 1, ROUTING)
    for reason in ("stop", "length"):
        with pytest.raises(BadRoutes, match="no routed experts"):
            read_completions(answer_of(choice(finish_reason=reason, routed_experts=None)), PROMPT, 1, ROUTING)


@pytest.mark.parametrize("good", [0, 1])
def test_case_11_the_first_response_without_routes_ends_it_and_names_the_engine(good: int) -> None:
    asked = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        answer = choice() if asked <= good else choice(routed_experts=None)
        return web.json_response(answer_of(answer), headers={"X-Vime-Engine": "10.0.0.7:8003"})

    async def run() -> list[Completion]:
        completions: list[Completion] = []
        async with (
            serving({"/v1/completions": handler}) as url,
            RolloutClient(url, "token", 5.0, patience=5.0, routing=ROUTING) as client,
        ):
            for _ in range(good):
                completions += await client.complete(PROMPT, 1, 8, Sampling(1.0, 1.0, (9,)), seed=7)
            with pytest.raises(BadRoutes, match=r"the engine at 10\.0\.0\.7:8003 .* has no routed experts"):
                await client.complete(PROMPT, 1, 8, Sampling(1.0, 1.0, (9,)), seed=7)
        return completions

    assert len(asyncio.run(run())) == good
    assert asked == good + 1


def test_places_of_layers() -> None:
    routing = replace(ROUTING, layers=6, moe_layers=(2, 3, 5))
    assert routing.places((0, 1, 2)) == (0,)
    assert routing.places((3, 4, 5)) == (1, 2)
    assert routing.places((0, 1)) == ()


def test_turns_are_joined_without_counting_a_position_twice() -> None:
    """Case 13: segments (P + a), then (P + a + tool + b), each with the routes of the whole sequence."""
    rng = np.random.default_rng(0)
    first, second = (rng.integers(0, 8, (2, rows, 2)).astype(np.uint8) for rows in (9, 20))
    joined = routes_of_turns([Routes(first, 3), Routes(second, 9)])
    assert joined is not None
    assert joined.first == 3, "where the coverage starts is declared"
    assert joined.ids.shape == (2, 20, 2)
    assert (joined.ids[:, :9] == first).all()
    assert (joined.ids[:, 9:] == second[:, 9:]).all()
    assert routes_of_turns([None, None]) is None
    with pytest.raises(ValueError, match="begin at 10, those before it end at 9"):
        routes_of_turns([Routes(first, 0), Routes(second, 10)])
