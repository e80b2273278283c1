"""Which layers of a model choose experts, and among how many: what routes of its tokens look like."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vime.config import Config
from vime.errors import UserError
from vime.models.family import Architecture, architecture


@dataclass(frozen=True)
class Routing:
    """The routers of a mixture-of-experts model.

    layers: transformer layers. moe_layers: those with experts, by their index from 0, in order. experts: of each such
    layer. top_k: experts that a token uses.
    """

    layers: int
    moe_layers: tuple[int, ...]
    experts: int
    top_k: int

    def places(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Where these layers' routes are among those of `moe_layers`; layers without experts are left out."""
        own = set(layers)
        return tuple(place for place, layer in enumerate(self.moe_layers) if layer in own)


def routing(model: Architecture) -> Routing | None:
    """The routers of a model, None when it is dense."""
    shape = model.shape
    if not shape.experts:
        return None
    moe_layers = tuple(layer for layer in range(shape.layers) if shape.has_experts(layer))
    return Routing(shape.layers, moe_layers, shape.experts, shape.top_k)


def replayed_routing(config: Config, folder: Path) -> Routing | None:
    """The routers whose choices a run replays; None when it does not. Raises UserError for a dense model."""
    if not config.algorithm.routing_replay:
        return None
    found = routing(architecture(folder))
    if found is None:
        raise UserError(f"algorithm.routing_replay=true needs a mixture-of-experts model, and {folder} is dense")
    return found


def join_routes(earlier: NDArray[np.integer[Any]], later: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
    """Routes of a sequence that took two requests, of which the second had the first's tokens in its prompt.

    earlier: [layers, n, top-k] of the first n + 1 tokens. later: [layers, m, top-k] of all m + 1, m >= n. Each position
    keeps the routes of the request that sampled the token after it: those of the earlier one, then the rest of the
    later one. Raises ValueError when the later request is shorter or of another model.
    """
    if earlier.shape[::2] != later.shape[::2] or earlier.shape[1] > later.shape[1]:
        raise ValueError(f"routes {list(later.shape)} do not continue routes {list(earlier.shape)}")
    return np.concatenate([earlier, later[:, earlier.shape[1] :]], axis=1)
