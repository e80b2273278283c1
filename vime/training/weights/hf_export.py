"""Policy weights -> Hugging Face tensors, gathered a parameter at a time.

Two ways out: streamed to rank 0, for the engines, or each to the rank that owns it, for files that several ranks write.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from vime.models.hf_folder import HfReader, HfWriter, copy_sidecars, join_shards, torch_dtype
from vime.models.weight import Weight
from vime.training import parallel
from vime.training.collectives import broadcast_json
from vime.training.hf_import import (
    chunk_weights,
    expert_rank,
    hf_shapes,
    local_experts,
    parameters_of,
    tensor_place,
    vocabulary_names,
)
from vime.training.learner import Learner
from vime.training.model import Policy


@dataclass(frozen=True)
class Meta:
    """What a Hugging Face tensor will be. shape: of the whole tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Unit:
    """What is gathered at once: one weight, or the weights in one place of every expert-parallel rank."""

    chunk: int
    weights: tuple[Weight, ...]

    @property
    def mine(self) -> Weight:
        """The weight of which this rank holds a slice."""
        return self.weights[expert_rank()] if self.weights[0].expert is not None else self.weights[0]


class Exporter:
    """The model as Hugging Face tensors. Making one, and using it, are collectives over the leading ranks."""

    def __init__(self, chunks: Sequence[Policy], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._architecture = chunks[0].architecture
        self._parameters = [parameters_of(chunk) for chunk in chunks]
        self._units = [unit for index, chunk in enumerate(chunks) for unit in _units(index, chunk)]
        pipeline = parallel.pipeline_group()
        mine = [[_to_json(meta) for meta in self._meta(unit)] for unit in self._units]
        self._listing: list[list[list[Meta]]] = []
        """What each stage yields, unit by unit."""
        for stage in range(pipeline.size()):
            listing = mine
            if pipeline.size() > 1:
                listing = broadcast_json(mine, src=dist.get_global_rank(pipeline, stage), group=pipeline)
            self._listing.append([[_from_json(meta) for meta in unit] for unit in listing])

    @property
    def metadata(self) -> list[Meta]:
        """What iteration yields, in its order."""
        return [meta for stage in self._listing for unit in stage for meta in unit]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor | None]]:
        """Stream (name, tensor) in the order of the stages: tensors on rank 0, None elsewhere.

        Each leading rank must run it to the end, in step. At any moment a rank holds one gathered unit.
        """
        pipeline = parallel.pipeline_group()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        first = dist.get_rank() == 0
        for turn, listing in enumerate(self._listing):
            for index, metas in enumerate(listing):
                full: list[Tensor] | None = None
                if turn == stage:
                    full = self._to_stage_head(self._units[index])
                for place, meta in enumerate(metas):
                    tensor = full[place] if full is not None else None
                    if turn > 0 and parallel.place_in_stage() == 0:
                        if stage == turn:
                            assert tensor is not None
                            dist.send(tensor.contiguous(), dst=dist.get_global_rank(pipeline, 0), group=pipeline)
                        elif stage == 0:
                            tensor = torch.empty(meta.shape, dtype=meta.dtype, device=torch.cuda.current_device())
                            dist.recv(tensor, src=dist.get_global_rank(pipeline, turn), group=pipeline)
                    yield meta.name, tensor if first else None

    @torch.no_grad()
    def owned(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of what this rank owns of the model: its stage's weights, or its experts.

        The first rank of a stage owns all but the experts, the first of each expert's tensor-parallel ranks that
        expert. The tensors of all owners together are the model.
        """
        for unit in self._units:
            weight = unit.mine
            whole = self._whole(weight, self._parameters[unit.chunk][weight.megatron])
            if whole is not None:
                yield from zip(weight.hf, whole, strict=True)

    def _meta(self, unit: _Unit) -> list[Meta]:
        weight = unit.mine
        shapes = hf_shapes(weight, self._parameters[unit.chunk][weight.megatron], self._architecture)
        dtype = torch.float32 if weight.float32 else self._dtype
        # The experts of a layer have one shape.
        return [Meta(name, dtype, shape) for held in unit.weights for name, shape in zip(held.hf, shapes, strict=True)]

    def _whole(self, weight: Weight, parameter: Tensor) -> list[Tensor] | None:
        """Full Hugging Face tensors of a weight on the rank that owns it, None on the others."""
        rank, size = tensor_place(weight)
        expert = weight.expert is not None
        block = size * (parallel_state.get_expert_model_parallel_world_size() if expert else 1)
        if parallel.place_in_stage() >= block:
            return None  # a copy
        local = parameter.detach().to(torch.float32 if weight.float32 else self._dtype)
        if size == 1:
            return [self._cut(name, tensor) for name, tensor in zip(weight.hf, weight.split(local), strict=True)]
        group = (
            parallel_state.get_expert_tensor_parallel_group()
            if expert
            else parallel_state.get_tensor_model_parallel_group()
        )
        full = []
        for name, tensor in zip(weight.hf, weight.split(local), strict=True):
            tensor = tensor.contiguous()
            if weight.axis is not None:
                slices = [torch.empty_like(tensor) for _ in range(size)] if rank == 0 else None
                dist.gather(tensor, slices, dst=dist.get_global_rank(group, 0), group=group)
                if slices is None:
                    continue
                tensor = torch.cat(slices, dim=weight.axis)
            full.append(self._cut(name, tensor))
        return full if rank == 0 else None

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        """Without the rows that only fill up the last rank's slice of the vocabulary."""
        return tensor[: self._architecture.shape.vocabulary] if name in vocabulary_names(self._architecture) else tensor

    def _to_stage_head(self, unit: _Unit) -> list[Tensor] | None:
        """Full tensors of a unit on the first rank of the stage, None on its others."""
        weight = unit.mine
        whole = self._whole(weight, self._parameters[unit.chunk][weight.megatron])
        if weight.expert is None or len(unit.weights) == 1 or whole is None:
            return whole
        group = parallel_state.get_expert_model_parallel_group()
        gathered: list[list[Tensor]] = [[] for _ in unit.weights]
        for tensor in whole:
            tensor = tensor.contiguous()
            of_ranks = [torch.empty_like(tensor) for _ in unit.weights] if expert_rank() == 0 else None
            dist.gather(tensor, of_ranks, dst=dist.get_global_rank(group, 0), group=group)
            for tensors, one in zip(gathered, of_ranks or (), strict=False):
                tensors.append(one)
        return [tensor for tensors in gathered for tensor in tensors] if expert_rank() == 0 else None


def export(chunks: Sequence[Policy], dtype: torch.dtype) -> Iterator[tuple[str, Tensor | None]]:
    """`Exporter`'s stream, once."""
    yield from Exporter(chunks, dtype)


def _units(index: int, chunk: Policy) -> Iterator[_Unit]:
    """The units of a chunk: equal on every rank of a stage."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    each = local_experts(chunk.architecture) if chunk.architecture.shape.experts else 0
    experts: list[Weight] = []
    for weight in [*chunk_weights(chunk), None]:
        if weight is not None and weight.expert is not None:
            experts.append(weight)
            continue
        if experts:  # of one layer, one expert after the other
            per_expert = len(experts) // (ranks * each)
            for place in range(each * per_expert):
                yield _Unit(index, tuple(experts[rank * each * per_expert + place] for rank in range(ranks)))
            experts = []
        if weight is not None:
            yield _Unit(index, (weight,))


def _to_json(meta: Meta) -> list[object]:
    return [meta.name, str(meta.dtype).removeprefix("torch."), list(meta.shape)]


def _from_json(meta: list[object]) -> Meta:
    name, dtype, shape = meta
    assert isinstance(name, str)
    assert isinstance(dtype, str)
    assert isinstance(shape, list)
    return Meta(name, getattr(torch, dtype), tuple(shape))


def export_folder(learner: Learner, origin: Path, target: Path, dtype: str) -> None:
    """Write the policy to `target`, which appears whole or not at all. A collective over all trainer ranks.

    origin: the initial model's folder, from which configuration, tokenizer and the tensors that took no part in
    training are copied.
    """
    writing = target.with_name(f".{target.name}.tmp")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(writing, ignore_errors=True)
        copy_sidecars(origin, writing)
    dist.barrier()
    if parallel.is_leading():
        writer = HfWriter(writing, dist.get_rank())
        writer.write(Exporter(learner.policy, torch_dtype(dtype)).owned())
        if first:
            writer.write(_kept_aside(origin, learner.policy[0].architecture.kept_aside))
        writer.close()
    dist.barrier()
    if first:
        join_shards(writing, parallel.leading_ranks(learner.config.training), learner.config.buffer.file_timeout)
        shutil.rmtree(target, ignore_errors=True)
        writing.rename(target)
    dist.barrier()


def _kept_aside(origin: Path, prefixes: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    if not prefixes:
        return
    reader = HfReader(origin)
    for name in sorted(reader.names):
        if name.startswith(prefixes):
            yield name, reader.slice(name, None, 0, 1)
