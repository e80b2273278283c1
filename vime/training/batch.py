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
    """One pack and, for each of its labelled tokens, [labelled tokens] on the device:

    samples: positions in the manifest of the pack's samples, in order. owners: int64, that of the token's sample.
    weights: float32, the token's weight in the loss of the global batch, by `algorithm.aggregation`.
    shares: float32, the token's share of all trained tokens, by which metrics are means over tokens; they sum to 1 over
    all ranks and microbatches. stale: bool, sampled by another version than the one that is trained, which may be true
    of a part of a response.
    """

    pack: Pack
    samples: tuple[int, ...]
    owners: Tensor
    weights: Tensor
    shares: Tensor
    stale: Tensor
    replayed: int = 0
    """Trained tokens that are predicted by replayed routes."""


@dataclass(frozen=True)
class Batch:
    """A rank's share of a step.

    microbatches: of all minibatches, one minibatch after the other, each with as many. tokens, trained_tokens: of the
    whole batch, over all ranks. rewards, sample_weights, response_tokens: float32 [N] and groups: int64 [N] of its
    samples, on the CPU, the same on every rank.
    """

    microbatches: tuple[Microbatch, ...]
    minibatches: tuple[int, ...]
    """Number of microbatches of each."""
    tokens: int
    trained_tokens: int
    rewards: Tensor
    groups: Tensor
    sample_weights: Tensor
    response_tokens: Tensor

    def parts(self, items: Sequence[T]) -> list[Sequence[T]]:
        """Items, one a microbatch, by minibatch."""
        ends = list(itertools.accumulate(self.minibatches))
        return [items[end - count : end] for end, count in zip(ends, self.minibatches, strict=True)]


def load(manifest: Manifest, reader: BufferReader, config: Config, version: int, replay: Replay | None = None) -> Batch:
    """Read this rank's samples of a batch and pack them. `version`: of the policy that is about to be trained.

    replay: with it the packs carry the routes of this rank's layers; without it no routes are read.
    Every rank computes the same division from the manifest alone, and then touches only its own samples.
    Raises ValueError when no token of the batch is trained, or a sample exceeds the microbatch limit.
    """
    entries = manifest.samples
    trained = sum(entry.masked_in for entry in entries if entry.weight > 0)
    if trained == 0:
        raise ValueError(f"the batch of step {manifest.step} has no token to train on")
    layout = parallel.pack_layout()
    parts = _consecutive(len(entries), config.algorithm.minibatches)
    mine = [_mine(part, manifest, config, layout) for part in parts]
    largest = max(layout.size([entries[i].tokens for i in content]) for division in mine for content in division)
    size = largest if config.training.virtual_stages > 1 else None
    minibatches = [
        _minibatch(part, division, manifest, reader, config, version, layout, size, replay)
        for part, division in zip(parts, mine, strict=True)
    ]
    return Batch(
        tuple(microbatch for microbatches in minibatches for microbatch in microbatches),
        minibatches=tuple(len(microbatches) for microbatches in minibatches),
        tokens=sum(entry.tokens for entry in entries),
        trained_tokens=trained,
        rewards=torch.tensor([entry.reward for entry in entries], dtype=torch.float32),
        groups=torch.tensor([entry.group for entry in entries]),
        sample_weights=torch.tensor([entry.weight for entry in entries], dtype=torch.float32),
        response_tokens=torch.tensor([entry.response_tokens for entry in entries], dtype=torch.float32),
    )


def _consecutive(count: int, parts: int) -> list[range]:
    """0 to count - 1 in `parts` parts as equal as possible."""
    edges = [count * i // parts for i in range(parts + 1)]
    return [range(start, end) for start, end in itertools.pairwise(edges)]


def _mine(chosen: range, manifest: Manifest, config: Config, layout: PackLayout) -> Microbatches:
    """Positions of this rank's samples among the chosen ones, a list a microbatch."""
    lengths = [manifest.samples[i].tokens for i in chosen]
    divided = divide_into_packs(lengths, config.training.data_parallel, config.training, layout)
    return [[chosen[i] for i in part] for part in divided[parallel.data_rank()]]


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
    entries = manifest.samples
    wanted = [i for part in mine for i in part]
    read = reader.samples(manifest, wanted, replay.places if replay is not None else ())
    samples = dict(zip(wanted, read, strict=True))
    # Of samples outside the minibatch neither weight nor share is read.
    counted = torch.tensor([entry.weight if i in chosen else 0.0 for i, entry in enumerate(entries)])
    masked_in = torch.tensor([entry.masked_in for entry in entries])
    longest = config.rollout.max_response_tokens
    weights = sample_token_weights(config.algorithm.aggregation, counted, masked_in, longest)
    shares = sample_token_weights("token_mean", counted, masked_in, longest)
    microbatches = []
    for part in mine:
        packed = pack([samples[i] for i in part], layout, size)
        if replay is not None:
            packed = replace(packed, routes=replay.pack([samples[i] for i in part], packed))
        device = packed.sample.device
        owners = torch.tensor(part, dtype=torch.int64)[packed.sample.cpu()]
        microbatches.append(
            Microbatch(
                pack=packed,
                samples=tuple(part),
                owners=owners.to(device),
                weights=weights[owners].to(device),
                shares=shares[owners].to(device),
                stale=packed.versions != version,
                replayed=sum(replayed_tokens(samples[i]) for i in part if entries[i].weight > 0) if replay else 0,
            )
        )
    return microbatches
