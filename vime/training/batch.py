"""A rank's share of one training step, as packs with what each trained token is weighed by."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from vime.algorithms.aggregation import sample_token_weights
from vime.buffer.manifest import Manifest
from vime.buffer.reader import BufferReader
from vime.config import Config
from vime.training import parallel
from vime.training.balance import Microbatches, divide_into_packs
from vime.training.pack import Pack, PackLayout, pack
from vime.training.replay import Replay, replayed_tokens

T = TypeVar("T")


@dataclass(frozen=True)
class Microbatch:
    """One pack and, for each of its labelled tokens, which are those that are trained, [labelled tokens] on the device:

    samples: positions in the manifest of the pack's samples, in order. owners: int64, that of the token's sample.
    loss_weights: float32, the token's weight in the loss of the minibatch, by `algorithm.aggregation`.
    metric_weights: float32, the token's share of all trained tokens, by which metrics are means over tokens; they sum
    to 1 over all ranks and microbatches of a minibatch. stale: bool, sampled by another version than the one that is
    trained, which may be true of some of a response's tokens.
    """

    pack: Pack
    samples: tuple[int, ...]
    owners: Tensor
    loss_weights: Tensor
    metric_weights: Tensor
    stale: Tensor
    replayed: int = 0
    """Trained tokens that are predicted by replayed routes."""

    @property
    def mask(self) -> Tensor:
        """Bool [labelled tokens], true: what a loss takes for a mask."""
        return torch.ones_like(self.stale)


@dataclass(frozen=True)
class Batch:
    """A rank's share of a step.

    step: its number. microbatches: of all minibatches, one minibatch after the other, each with as many. tokens,
    trained_tokens: of the whole batch, over all ranks. rewards, response_tokens: float32 [N] and groups: int64 [N] of
    its samples, on the CPU, the same on every rank.
    """

    step: int
    microbatches: tuple[Microbatch, ...]
    minibatches: tuple[int, ...]
    """Number of microbatches of each."""
    untrained: tuple[int, ...]
    """The minibatches without a token to train on, of which no update is made."""
    tokens: int
    trained_tokens: int
    rewards: Tensor
    groups: Tensor
    response_tokens: Tensor

    def by_minibatch(self, items: Sequence[T]) -> list[Sequence[T]]:
        """Items, one a microbatch, of each minibatch that has something to train on."""
        ends = list(itertools.accumulate(self.minibatches))
        divided = [items[end - count : end] for end, count in zip(ends, self.minibatches, strict=True)]
        return [items for number, items in enumerate(divided) if number not in self.untrained]


def load(manifest: Manifest, reader: BufferReader, config: Config, version: int, replay: Replay | None = None) -> Batch:
    """Read this rank's samples of a batch and pack them. `version`: of the policy that is about to be trained.

    replay: with it the packs carry the routes of this rank's layers; without it no routes are read.
    Every rank computes the same division from the manifest alone, and then touches only its own samples.
    Raises ValueError when no token of the batch is trained, or a sample exceeds the microbatch limit.
    """
    entries = manifest.samples
    trained = sum(entry.masked_in for entry in entries)
    if trained == 0:
        raise ValueError(f"the batch of step {manifest.step} has no token to train on")
    layout = parallel.pack_layout()
    chosen = _consecutive(len(entries), config.algorithm.minibatches)
    mine = [_mine(positions, manifest, config, layout) for positions in chosen]
    largest = max(layout.size([entries[i].tokens for i in content]) for division in mine for content in division)
    size = largest if config.training.virtual_stages > 1 else None
    minibatches = [
        _minibatch(positions, division, manifest, reader, config, version, layout, size, replay)
        for positions, division in zip(chosen, mine, strict=True)
    ]
    return Batch(
        manifest.step,
        tuple(microbatch for microbatches in minibatches for microbatch in microbatches),
        minibatches=tuple(len(microbatches) for microbatches in minibatches),
        untrained=tuple(
            number for number, positions in enumerate(chosen) if not any(entries[i].masked_in for i in positions)
        ),
        tokens=sum(entry.tokens for entry in entries),
        trained_tokens=trained,
        rewards=torch.tensor([entry.reward for entry in entries], dtype=torch.float32),
        groups=torch.tensor([entry.group for entry in entries]),
        response_tokens=torch.tensor([entry.response_tokens for entry in entries], dtype=torch.float32),
    )


def _consecutive(count: int, ranges: int) -> list[range]:
    """0 to count - 1 in so many ranges as equal as possible."""
    edges = [count * i // ranges for i in range(ranges + 1)]
    return [range(start, end) for start, end in itertools.pairwise(edges)]


def _mine(chosen: range, manifest: Manifest, config: Config, layout: PackLayout) -> Microbatches:
    """Positions of this rank's samples among the chosen ones, a list a microbatch."""
    lengths = [manifest.samples[i].tokens for i in chosen]
    divided = divide_into_packs(lengths, config.training.data_parallel, config.training, layout)
    return [[chosen[i] for i in microbatch] for microbatch in divided[parallel.data_rank()]]


def _minibatch(
    chosen: range,
    mine: Microbatches,
    manifest: Manifest,
    reader: BufferReader,
    config: Config,
    version: int,
    layout: PackLayout,
    size: int | None,
    replay: Replay | None,
) -> list[Microbatch]:
    """This rank's microbatches of the samples at the chosen positions, weighed as if they were the whole batch.

    size: of every pack, or None for as small as each can be.
    """
    wanted = [i for positions in mine for i in positions]
    read = reader.samples(manifest, wanted, replay.places if replay is not None else ())
    samples = dict(zip(wanted, read, strict=True))
    trained = torch.tensor([manifest.samples[i].masked_in for i in chosen])
    longest = config.rollout.max_response_tokens
    loss_weights = sample_token_weights(config.algorithm.aggregation, trained, longest)
    metric_weights = sample_token_weights("token_mean", trained, longest)
    microbatches = []
    for positions in mine:
        packed = pack([samples[i] for i in positions], layout, size)
        if replay is not None:
            packed = replace(packed, routes=replay.pack([samples[i] for i in positions], packed))
        device = packed.sample.device
        owners = torch.tensor(positions, dtype=torch.int64)[packed.sample.cpu()]
        in_minibatch = owners - chosen.start
        microbatches.append(
            Microbatch(
                pack=packed,
                samples=tuple(positions),
                owners=owners.to(device),
                loss_weights=loss_weights[in_minibatch].to(device),
                metric_weights=metric_weights[in_minibatch].to(device),
                stale=packed.versions != version,
                replayed=sum(replayed_tokens(samples[i]) for i in positions) if replay else 0,
            )
        )
    return microbatches
