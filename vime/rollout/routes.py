"""Routed experts as an engine answers them -> as samples carry them."""

from __future__ import annotations

import binascii
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pybase64
from numpy.lib import format as npy
from numpy.typing import NDArray

from vime.buffer.chunk import route_dtype
from vime.models.routing import Routing, join_routes


class BadRoutes(Exception):
    """An engine's routes are missing, or not those of its tokens. It would go on so: nothing could be replayed."""


@dataclass(frozen=True, eq=False)
class Routes:
    """The experts of one sequence.

    ids: [layers with experts, tokens - 1, top-k] in the narrowest type. first: the first position whose ids the engine
    chose; those before it were never routed by this engine, as far as it says.
    """

    ids: NDArray[np.integer[Any]]
    first: int


def decode_routes(text: Any, tokens: int, routing: Routing) -> Routes:
    """An answer's `routed_experts` of a sequence of `tokens` prompt and response tokens.

    text: base64 of a .npy, integers [tokens - 1, all layers, top-k], zeros in layers without experts.
    Raises BadRoutes saying what is wrong: absent, not an array, another shape, ids out of range, holes.
    """
    if not isinstance(text, str):
        raise BadRoutes("the response has no routed experts")
    array = _read_npy(text, (tokens - 1, routing.layers, routing.top_k))
    if array.size:
        lowest, highest = int(array.min()), int(array.max())
        if lowest < 0 or highest >= routing.experts:
            wrong = lowest if lowest < 0 else highest
            raise BadRoutes(f"expert id {wrong} is out of range for {routing.experts} experts")
    return Routes(_layers_first(array, routing), _first_routed(array, routing))


def routes_of_turns(turns: Sequence[Routes | None]) -> Routes | None:
    """The routes of a sequence that was sampled in several turns, each answered with those of all tokens until then.

    None without routes. Raises ValueError when a turn leaves a hole behind the one before.
    """
    joined: Routes | None = None
    for turn in turns:
        if turn is None:
            return None
        if joined is None:
            joined = turn
        elif turn.first > joined.ids.shape[1]:
            raise ValueError(f"a turn's routes begin at {turn.first}, those before it end at {joined.ids.shape[1]}")
        else:
            joined = Routes(join_routes(joined.ids, turn.ids), joined.first)
    return joined


def _read_npy(text: str, wanted: tuple[int, ...]) -> NDArray[Any]:
    """The integers of a .npy in base64, as a view of its bytes.

    numpy's own loader would copy them piece by piece, and can unpickle, which nothing here does.
    """
    try:
        data = pybase64.b64decode(text)
        file = io.BytesIO(data)
        if npy.read_magic(file) != (1, 0):
            raise ValueError("it is not of .npy version 1")
        shape, fortran_order, dtype = npy.read_array_header_1_0(file)
        if dtype.kind not in "iu" or fortran_order or shape != wanted:
            raise BadRoutes(f"routed experts are {dtype}{list(shape)}, expected integers {list(wanted)}")
        return np.frombuffer(data, dtype, int(np.prod(shape)), file.tell()).reshape(shape)
    except (ValueError, binascii.Error) as error:
        raise BadRoutes(f"routed experts are not an array: {error}") from error


def _layers_first(array: NDArray[Any], routing: Routing) -> NDArray[np.integer[Any]]:
    """[positions, all layers, top-k] -> [layers with experts, positions, top-k]."""
    ids = np.ascontiguousarray(array, route_dtype(routing.experts))
    first, last = routing.moe_layers[0], routing.moe_layers[-1]
    follow = len(routing.moe_layers) == last + 1 - first
    wanted = ids[:, first : last + 1] if follow else ids[:, routing.moe_layers]
    width = routing.top_k * ids.itemsize
    if width not in (1, 2, 4, 8):
        return np.ascontiguousarray(wanted.transpose(1, 0, 2))
    # The ids of a position fit into one word; moving words is several times faster than moving them one by one.
    words = wanted.view(f"u{width}")[:, :, 0]
    return np.ascontiguousarray(words.T).view(ids.dtype).reshape(len(routing.moe_layers), len(array), routing.top_k)


def _first_routed(array: NDArray[Any], routing: Routing) -> int:
    """Where the routes begin. A position that an engine did not route is all zeros, which no choice of experts is."""
    if routing.top_k == 1 or not len(array):
        return 0  # expert 0 alone is a choice
    routed: NDArray[np.bool_] = np.logical_or(*array[:, routing.moe_layers[0], :2].T)
    first = int(np.argmax(routed)) if routed.any() else len(array)
    if not routed[first:].all():
        raise BadRoutes(f"position {first + int(np.argmin(routed[first:]))} has no routes, though earlier ones have")
    return first
