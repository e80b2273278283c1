"""Routing replay (R3): the trainer sends each token through the experts that the engine chose for it.

An engine and a trainer that compute in different number formats, or by different kernels, choose different experts
where two have nearly equal scores, and the token's logprob then differs by far more than rounding explains. Therefore
the engine's choice stands. The weights of the chosen experts are the trainer's own scores; gradients flow through them.

Megatron-core's `RouterReplay` gives a router its choices from outside: those set last in a forward pass, and in the
order in which they were set when a layer is computed again for its gradient. Every pipeline schedule takes a chunk's
backward passes in the order of its forward passes, so that order is right with several microbatches in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vime.buffer.sample import Sample
from vime.models.routing import Routing
from vime.training.pack import Pack

FREE = -1
"""In place of expert ids: the router chooses by itself."""


class Choices(RouterReplay):
    """The choices of one router, int [tokens, top-k]; rows of FREE are the router's own."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """scores [tokens, experts] -> values and indices [tokens, top-k]. Megatron's router calls it by this name."""
        assert default_compute_topk is not None
        own_values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.router_replay_action == RouterReplayAction.REPLAY_FORWARD:
            chosen = self.target_topk_idx
        elif self.router_replay_action == RouterReplayAction.REPLAY_BACKWARD:
            chosen = self.replay_backward_list.pop(0)
        else:
            return own_values, own
        assert chosen is not None
        if chosen.shape != own.shape:
            raise RuntimeError(f"routes of {list(chosen.shape)} for a router that chooses {list(own.shape)}")
        indices = torch.where(chosen < 0, own, chosen.to(own.dtype))
        return scores.gather(1, indices), indices


class ChunkReplay:
    """The routers of one model chunk. rows: where each one's choices are in a pack's routes."""

    def __init__(self, choices: Sequence[Choices], rows: Sequence[int], config: TransformerConfig) -> None:
        self._choices = choices
        self._rows = rows
        self._sequence_parallel = config.sequence_parallel
        modules = config.recompute_modules if config.recompute_granularity == "selective" else None
        self._computed_again = config.recompute_granularity == "full" or "moe" in (modules or ())

    @contextmanager
    def replaying(self, routes: Tensor | None) -> Iterator[None]:
        """A forward pass by the routes of its pack, int [layers, tokens, top-k]; without any it is free.

        They are on the device while the pass lasts, and until its gradient where its layers are computed again for it.
        """
        if routes is None:
            yield
            return
        again = self._computed_again and torch.is_grad_enabled()
        here = routes.to(torch.cuda.current_device())
        for choices, row in zip(self._choices, self._rows, strict=True):
            choices.set_target_indices(self._own_tokens(here[row]))
            if not again:
                choices.replay_backward_list.pop()
            choices.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield
        for choices in self._choices:
            choices.target_topk_idx = None
            if choices.replay_backward_list:  # what comes next is a gradient, or another pass, which sets its own
                choices.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            else:
                choices.clear_router_replay_action()

    def finish(self) -> None:
        """After the backward passes: each kept route must have been used. Raises RuntimeError when one was not."""
        for choices in self._choices:
            left = len(choices.replay_backward_list)
            choices.clear_indices()
            choices.clear_router_replay_action()
            if left:
                raise RuntimeError(f"layers were not computed again with the routes of {left} microbatches")

    def _own_tokens(self, routes: Tensor) -> Tensor:
        """Of [tokens, top-k] what this rank's routers see: its share of the tokens under sequence parallelism."""
        if not self._sequence_parallel:
            return routes
        size = parallel_state.get_tensor_model_parallel_world_size()
        return routes.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]


class Replay:
    """What a rank replays of its policy's chunks.

    places: which layers' routes it needs, by their place among the layers with experts, in rising order.
    """

    def __init__(self, chunks: Sequence[Any], routing: Routing) -> None:
        """Bind to the routers of the policy's chunks, and of no other model's.

        Raises RuntimeError when the chunks do not have one replayable router for each of their layers with experts.
        """
        self.routing = routing
        held = [tuple(layer.layer_number - 1 for layer in chunk.decoder.layers) for chunk in chunks]
        self.places = tuple(sorted(place for layers in held for place in routing.places(layers)))
        RouterReplay.clear_global_router_replay_instances()
        self._chunks = []
        for chunk, layers in zip(chunks, held, strict=True):
            routers = {module.layer_number - 1: module for module in chunk.modules() if isinstance(module, TopKRouter)}
            wanted = [routing.moe_layers[place] for place in routing.places(layers)]
            if sorted(routers) != wanted or chunk.config.moe_router_fusion:
                fused = " behind a fused kernel" if chunk.config.moe_router_fusion else ""
                raise RuntimeError(f"layers {wanted} should have a router to replay; {sorted(routers)} have one{fused}")
            choices = []
            for layer in wanted:
                routers[layer].router_replay = Choices()
                choices.append(routers[layer].router_replay)
            rows = [self.places.index(place) for place in routing.places(layers)]
            chunk.replay = ChunkReplay(choices, rows, chunk.config)
            self._chunks.append(chunk.replay)
        bound = len(RouterReplay.global_router_replay_instances)
        if bound != len(self.places):
            raise RuntimeError(f"{bound} routers are replayed, the policy has {len(self.places)} here")

    def pack(self, samples: Sequence[Sample], pack: Pack) -> Tensor:
        """Choices for the tokens of a pack of these samples, which were read with the routes of `places`."""
        return pack_routes(samples, pack, len(self.places), self.routing)

    def finish(self) -> None:
        """After an update: no routes are kept beyond it."""
        for chunk in self._chunks:
            chunk.finish()


def pack_routes(samples: Sequence[Sample], pack: Pack, layers: int, routing: Routing) -> Tensor:
    """Choices for the tokens of a pack of these samples: int [layers, local tokens, top-k], in the host's memory.

    FREE where no route is known, and at each sequence's last token and padding, of which nothing is predicted.
    """
    dtype = np.int16 if routing.experts <= 1 << 15 else np.int32
    routes = np.full((layers, pack.size, routing.top_k), FREE, dtype)
    for sample, start in zip(samples, pack.starts, strict=True):
        ids, first = sample.routed_experts, sample.first_route
        if ids is not None:
            routes[:, start + first : start + ids.shape[1]] = ids[:, first:]
    if pack.rows is not None:
        routes = routes[:, pack.rows.cpu().numpy()]
    return torch.from_numpy(routes)


def replayed_tokens(sample: Sample) -> int:
    """Trained tokens of a sample that are predicted at a position with routes."""
    if sample.routed_experts is None:
        return 0
    return int(np.count_nonzero(np.flatnonzero(sample.loss_mask) + sample.prompt_length - 1 >= sample.first_route))
