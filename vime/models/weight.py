"""How one Megatron parameter corresponds to Hugging Face tensors.

A tensor-parallel rank holds a slice of each Hugging Face tensor: an equal share along one axis, or all of it. `join`
builds the rank's Megatron parameter from those slices and `split` is its inverse, so the same few lines serve loading
(each rank reads only its slices) and export (they are gathered along the axis). Both are exact: they only move values.
An expert's weights are whole on the expert-parallel rank that has it, or divided over its expert-tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def _same(slices: Sequence[Tensor]) -> Tensor:
    (only,) = slices
    return only


def _alone(local: Tensor) -> list[Tensor]:
    return [local]


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter.

    megatron: parameter name inside its model chunk, with the layer's index local to the chunk. Experts are called
        `mlp.experts.<index among all>.`, whatever module holds them.
    hf: names of the Hugging Face tensors it is made of.
    axis: axis along which each of those is divided over tensor-parallel ranks; None when every rank holds all of it.
    join: the rank's slices of the `hf` tensors, in order -> its Megatron tensor.
    split: the inverse of join.
    expert: the expert that it belongs to, by its index among all of the layer, or None.
    float32: whether it stays float32 whatever the rest of the model is.
    """

    megatron: str
    hf: tuple[str, ...]
    axis: int | None = None
    join: Callable[[Sequence[Tensor]], Tensor] = _same
    split: Callable[[Tensor], list[Tensor]] = _alone
    expert: int | None = None
    float32: bool = False


def join_rows(slices: Sequence[Tensor]) -> Tensor:
    """Slices below each other: [a, h], [b, h] -> [a + b, h]."""
    import torch

    return torch.cat(list(slices), dim=0)


def split_halves(local: Tensor) -> list[Tensor]:
    """The inverse of `join_rows` for two equal halves (gate and up projection)."""
    return list(local.chunk(2, dim=0))


def join_qkv(head_dim: int, queries_per_group: int) -> Callable[[Sequence[Tensor]], Tensor]:
    """Query, key and value rows -> Megatron's order: group by group, its queries, then its key, then its value.

    Slices are [groups * queries_per_group * head_dim, ...] and twice [groups * head_dim, ...]; biases too.
    """

    def join(slices: Sequence[Tensor]) -> Tensor:
        import torch

        query, key, value = slices
        rest = query.shape[1:]
        groups = key.shape[0] // head_dim
        stacked = torch.cat(
            [
                query.reshape(groups, queries_per_group * head_dim, *rest),
                key.reshape(groups, head_dim, *rest),
                value.reshape(groups, head_dim, *rest),
            ],
            dim=1,
        )
        return stacked.reshape(-1, *rest)

    return join


def split_qkv(head_dim: int, queries_per_group: int) -> Callable[[Tensor], list[Tensor]]:
    """The inverse of `join_qkv`."""

    def split(local: Tensor) -> list[Tensor]:
        rest = local.shape[1:]
        grouped = local.reshape(-1, (queries_per_group + 2) * head_dim, *rest)
        query_key_value = grouped.split([queries_per_group * head_dim, head_dim, head_dim], dim=1)
        return [rows.reshape(-1, *rest) for rows in query_key_value]

    return split
