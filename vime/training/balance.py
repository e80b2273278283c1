"""Which rank trains which sample in which microbatch. Pure functions of the samples' lengths, equal on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from vime.config import Training
from vime.training.pack import PackLayout

Microbatches = list[list[int]]
"""Indices of samples, a list a microbatch."""


def divide(lengths: Sequence[int], ranks: int, limit: int, multiple: int = 1) -> list[Microbatches]:
    """Divide samples over data-parallel ranks, balanced by tokens, each rank with the same number of microbatches.

    lengths: tokens of each sample. limit: most tokens of one microbatch. multiple: of which the number of microbatches
    must be one.
    Returns the microbatches of each rank. A microbatch may be empty when a rank has fewer samples than others have
    microbatches: the rank still takes part in the step's collectives.
    Raises ValueError when a sample is longer than `limit`.
    """
    for i, length in enumerate(lengths):
        if length > limit:
            raise ValueError(f"sample {i} has {length} tokens, more than training.max_tokens_per_microbatch={limit}")
    of_ranks = _balance(range(len(lengths)), lengths, ranks)
    count = max(1, *(len(_first_fit(share, lengths, limit)) for share in of_ranks))
    count = -(-count // multiple) * multiple
    return [_into(share, lengths, limit, count) for share in of_ranks]


def _longest_first(indices: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(indices, key=lambda i: (-lengths[i], i))


def _balance(indices: Sequence[int], lengths: Sequence[int], bins: int) -> list[list[int]]:
    """Longest first, each into the bin with the fewest tokens: within 4/3 of the best possible largest bin."""
    heap = [(0, bin_) for bin_ in range(bins)]
    contents: list[list[int]] = [[] for _ in range(bins)]
    for i in _longest_first(indices, lengths):
        tokens, bin_ = heapq.heappop(heap)
        contents[bin_].append(i)
        heapq.heappush(heap, (tokens + lengths[i], bin_))
    return [sorted(content) for content in contents]


def _first_fit(indices: Sequence[int], lengths: Sequence[int], limit: int) -> Microbatches:
    """Longest first, each into the first microbatch with room: few microbatches, unevenly filled."""
    bins: list[tuple[int, list[int]]] = []
    for i in _longest_first(indices, lengths):
        for k, (tokens, content) in enumerate(bins):
            if tokens + lengths[i] <= limit:
                bins[k] = (tokens + lengths[i], [*content, i])
                break
        else:
            bins.append((lengths[i], [i]))
    return [sorted(content) for _, content in bins]


def _into(indices: Sequence[int], lengths: Sequence[int], limit: int, count: int) -> Microbatches:
    """Exactly `count` microbatches: evenly filled where that fits, else as first-fit leaves them."""
    even = _balance(indices, lengths, count)
    if all(sum(lengths[i] for i in content) <= limit for content in even):
        return even
    tight = _first_fit(indices, lengths, limit)
    return tight + [[] for _ in range(count - len(tight))]


def divide_into_packs(lengths: Sequence[int], ranks: int, training: Training, layout: PackLayout) -> list[Microbatches]:
    """`divide` for packs of these sizes on this layout: what one rank takes of a pack is within the limit.

    Raises ValueError when a sample is too long for a pack.
    """
    return divide(
        [layout.padded(length) for length in lengths],
        ranks,
        training.max_tokens_per_microbatch * training.context_parallel,
        # The interleaved schedule takes microbatches in turns of one for each stage.
        multiple=training.pipeline_parallel if training.virtual_stages > 1 else 1,
    )
