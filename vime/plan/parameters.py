"""How many parameters a model has, and on which pipeline stage and by which parallelism they are divided."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config import Shape


@dataclass(frozen=True)
class Parameters:
    """Parameters by how parallelism divides them.

    split: over tensor-parallel ranks. whole: on each of those (norms, routers). experts: over expert-parallel and
    expert-tensor-parallel ranks.
    """

    split: int = 0
    whole: int = 0
    experts: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.split + other.split, self.whole + other.whole, self.experts + other.experts)

    @property
    def total(self) -> int:
        """All of them."""
        return self.split + self.whole + self.experts


def of_layer(shape: Shape, layer: int) -> Parameters:
    """A layer, counted from 0."""
    queries, groups = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    split = 2 * shape.hidden * (queries + groups)
    whole = 2 * shape.hidden
    if shape.qkv_bias:
        split += queries + 2 * groups
    if shape.qk_norm:
        whole += 2 * shape.head_dim
    if not shape.has_experts(layer):
        return Parameters(split + 3 * shape.hidden * shape.ffn, whole)
    return Parameters(
        split=split + 3 * shape.hidden * shape.shared_expert_ffn,
        whole=whole + shape.experts * shape.hidden,
        experts=shape.experts * 3 * shape.hidden * shape.expert_ffn,
    )


def of_stage(shape: Shape, stage: int, stages: int, virtual: int = 1) -> Parameters:
    """A pipeline stage with its end: the embedding on the first, final norm and output layer on the last."""
    total = Parameters()
    for layer in stage_layers(shape, stage, stages, virtual):
        total += of_layer(shape, layer)
    embedding = Parameters(split=shape.vocabulary * shape.hidden)
    if stage == 0:
        total += embedding
    if stage == stages - 1:
        total += Parameters(whole=shape.hidden)
        # A last stage of its own has a copy of a tied embedding.
        if not shape.tied_embeddings or stages > 1:
            total += embedding
    return total


def stage_layers(shape: Shape, stage: int, stages: int, virtual: int = 1) -> list[int]:
    """Layers of a pipeline stage: `virtual` runs of them, each stage's turn after turn."""
    run = shape.layers // stages // virtual
    return [turn * run * stages + stage * run + place for turn in range(virtual) for place in range(run)]


def count(shape: Shape) -> int:
    """Parameters of the whole model, each once."""
    return of_stage(shape, 0, 1).total
