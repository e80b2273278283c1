"""From the metrics of microbatches to those of a step, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from vime.algorithms.aggregation import weighted_sum
from vime.algorithms.metrics import Metric, Reduction
from vime.training.collectives import broadcast_json, max_over_ranks, sum_over_ranks

Layout = tuple[tuple[str, Reduction], ...]
"""Names and reductions, in the order of the numbers."""


@dataclass(frozen=True)
class MicrobatchMetrics:
    """A microbatch's metrics as numbers that wait for those of the other microbatches and ranks, without gradient.

    added: float32, a metric's sum, or for a mean its weighted sum and the weight of its tokens. largest: float32, its
    maximum, or its minimum with the sign changed.
    """

    layout: Layout
    added: Tensor
    largest: Tensor


def reduced(metrics: Mapping[str, Metric], metric_weights: Tensor) -> MicrobatchMetrics:
    """Reduce the values of a microbatch's tokens. metric_weights: float32 [T], each token's share of its minibatch."""
    added, largest = [], []
    for metric in metrics.values():
        values = metric.values.detach().float()
        where = torch.ones_like(metric_weights, dtype=torch.bool) if metric.where is None else metric.where
        match metric.reduction:
            case "mean":
                counted = torch.where(where, metric_weights, torch.zeros_like(metric_weights))
                weights = counted if metric.weights is None else metric.weights * where
                added += [weighted_sum(values, weights), counted.sum()]
            case "sum":
                added.append(torch.where(where, values, torch.zeros_like(values)).sum())
            case "max" | "min":
                signed = values if metric.reduction == "max" else -values
                nothing = torch.full((1,), -math.inf, device=values.device)
                largest.append(torch.cat([nothing, torch.where(where, signed, nothing)]).max())
    none = metric_weights[:0]
    return MicrobatchMetrics(
        tuple((name, metric.reduction) for name, metric in metrics.items()),
        torch.stack(added) if added else none,
        torch.stack(largest) if largest else none,
    )


def over_ranks(mine: Sequence[MicrobatchMetrics]) -> dict[str, float]:
    """The metrics of all microbatches of all ranks, with one reduction for sums and one for extremes.

    A collective over all trainer ranks. mine: of every microbatch on the last pipeline stage, none on the others.
    Raises ValueError when microbatches do not have the same metrics.
    """
    # The last rank is of the last stage in every layout; earlier stages do not know the names.
    layout: Layout = tuple(
        (name, reduction)
        for name, reduction in broadcast_json(mine[0].layout if mine else (), src=dist.get_world_size() - 1)
    )
    if any(one.layout != layout for one in mine):
        raise ValueError("the loss must give the same metrics, by the same reductions, for every microbatch")
    means = sum(reduction == "mean" for _, reduction in layout)
    extremes = sum(reduction in ("max", "min") for _, reduction in layout)
    added = torch.zeros(len(layout) - extremes + means, dtype=torch.float64)
    largest = torch.full((extremes,), -math.inf, dtype=torch.float64)
    if mine:
        added = torch.stack([one.added for one in mine]).double().sum(0)
        largest = torch.stack([one.largest for one in mine]).double().amax(0)
    sums = iter(sum_over_ranks(added).tolist())
    peaks = iter(max_over_ranks(largest).tolist() if extremes else ())
    result = {}
    for name, reduction in layout:
        if reduction == "mean":
            total, weight = next(sums), next(sums)
            if weight > 0:
                result[name] = total / weight
        elif reduction == "sum":
            result[name] = next(sums)
        elif (peak := next(peaks)) > -math.inf:
            result[name] = peak if reduction == "max" else -peak
    return result
