"""Which layers of a model choose experts, and among how many: what routes of its tokens look like."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vime.models.family import Architecture


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


def routing(architecture: Architecture) -> Routing | None:
    """The routers of a model, None when it is dense. Read from what Megatron builds it by."""
    transformer = architecture.transformer
    experts = transformer.get("num_moe_experts")
    if not experts:
        return None
    pattern = transformer.get("moe_layer_freq", 1)
    has_experts = pattern if isinstance(pattern, list) else [i % pattern == 0 for i in range(architecture.layers)]
    moe_layers = tuple(i for i, one in enumerate(has_experts) if one)
    return Routing(architecture.layers, moe_layers, int(experts), int(transformer["moe_router_topk"]))


def join_routes(earlier: NDArray[np.integer], later: NDArray[np.integer]) -> NDArray[np.integer]:  # type: ignore[type-arg]
    """Routes of a sequence that was generated in two requests, of which the second had the first's tokens as its prompt.

    earlier: [layers, n, top-k] of the first n + 1 tokens. later: [layers, m, top-k] of all m + 1, m >= n. Each position
    keeps the routes of the request that sampled the token after it: those of the earlier one, then the rest of the
    later one. Raises ValueError when the later request is shorter or of another model.
    """
    if earlier.shape[::2] != later.shape[::2] or earlier.shape[1] > later.shape[1]:
        raise ValueError(f"routes {list(later.shape)} do not continue routes {list(earlier.shape)}")
    return np.concatenate([earlier, later[:, earlier.shape[1] :]], axis=1)
