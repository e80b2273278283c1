"""Policy weights <-> Hugging Face tensors: each rank reads its parts; export streams one tensor at a time to rank 0."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from vime.errors import UserError
from vime.models.family import Architecture
from vime.models.hf_folder import HfReader
from vime.models.weight import Weight
from vime.training.broadcast import broadcast_json
from vime.training.model import HAVE_TRANSFORMER_ENGINE, Policy

# Transformer Engine keeps these norms inside the linear layer that follows them.
_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def stage_weights(model: Policy) -> list[Weight]:
    """This stage's weights in order. A tied output layer is the embedding and is not listed again."""
    architecture = model.architecture
    weights = [architecture.embedding] if model.pre_process else []
    for local, layer in enumerate(model.decoder.layers):
        weights += architecture.layer_weights(layer.layer_number - 1, local)
    if model.post_process:
        weights.append(architecture.final_norm)
        if architecture.output is not None:
            weights.append(architecture.output)
    return weights


def _parameters(model: Policy) -> dict[str, torch.nn.Parameter]:
    parameters = dict(model.named_parameters())
    if HAVE_TRANSFORMER_ENGINE:
        for plain, fused in _FUSED_NORMS.items():
            for name in [name for name in parameters if name.endswith(fused)]:
                parameters[name.removesuffix(fused) + plain] = parameters.pop(name)
    return parameters


@torch.no_grad()
def load(model: Policy, reader: HfReader) -> None:
    """Fill the model from a Hugging Face folder. Raises UserError naming a missing, misshapen or left-over tensor."""
    rank, size = _tensor_place()
    parameters = _parameters(model)
    weights = stage_weights(model)
    if model.post_process and not model.pre_process and model.architecture.tied:
        # The last stage keeps its own copy of a tied embedding; Megatron sums the two copies' gradients.
        shared = model.architecture.embedding
        weights.append(Weight("output_layer.weight", shared.hf, shared.axis))
    for weight in weights:
        parts = [_padded_part(reader, name, weight, rank, size, model.architecture) for name in weight.hf]
        local = weight.join(parts)
        parameter = parameters.pop(weight.megatron)
        if local.shape != parameter.shape:
            raise UserError(
                f"{reader.folder}: {', '.join(weight.hf)} give shape {tuple(local.shape)} where the config asks for"
                f" {tuple(parameter.shape)}"
            )
        parameter.copy_(local.to(parameter.dtype))
    assert not parameters, f"parameters without a Hugging Face counterpart: {sorted(parameters)}"
    unknown = reader.names - _all_names(model.architecture)
    if unknown:
        listing = ", ".join(sorted(unknown)[:3])
        raise UserError(f"{reader.folder} has tensors that {model.architecture.model_type} does not use: {listing}")


def _all_names(architecture: Architecture) -> set[str]:
    edges = [architecture.embedding, architecture.final_norm, *([architecture.output] if architecture.output else [])]
    names = {name for weight in edges for name in weight.hf}
    for layer in range(architecture.layers):
        names |= {name for weight in architecture.layer_weights(layer, layer) for name in weight.hf}
    # some exports of tied models repeat the embedding under the output layer's name
    return names | ({"lm_head.weight"} if architecture.tied else set())


def _padded_part(
    reader: HfReader, name: str, weight: Weight, rank: int, size: int, architecture: Architecture
) -> Tensor:
    """A rank's part. The rows of embedding and output layer need not divide: zero rows fill up the last part."""
    if name not in _vocabulary_names(architecture) or architecture.vocabulary % size == 0:
        return reader.part(name, weight.axis, rank, size)
    share = -(-architecture.vocabulary // size)
    rows = reader.rows(name, rank * share, min((rank + 1) * share, architecture.vocabulary))
    return torch.cat([rows, rows.new_zeros(share - rows.shape[0], rows.shape[1])])


def _vocabulary_names(architecture: Architecture) -> set[str]:
    return {*architecture.embedding.hf, *(architecture.output.hf if architecture.output else ())}


@torch.no_grad()
def export(model: Policy, dtype: torch.dtype) -> Iterator[tuple[str, Tensor | None]]:
    """Stream the model as Hugging Face (name, tensor), in the order of the layers; tensors on rank 0, None elsewhere.

    A collective over the first model replica: each of its ranks must run it to the end, in step. At any moment a rank
    holds one gathered parameter.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    parameters = _parameters(model)
    first = dist.get_rank() == 0
    for turn in range(stages):
        weights = iter(stage_weights(model)) if turn == stage else None
        for entry in _listing(model, turn):
            full: list[Tensor] | None = None
            if weights is not None:
                weight = next(weights)
                full = _gather(weight, parameters[weight.megatron].detach().to(dtype), model.architecture)
            for i, (name, shape) in enumerate(entry):
                tensor = full[i] if full is not None else None
                if turn > 0 and parallel_state.get_tensor_model_parallel_rank() == 0:
                    tensor = _to_first_stage(tensor, shape, dtype, turn, stage, pipeline)
                yield name, tensor if first else None


def shapes(model: Policy) -> list[tuple[str, tuple[int, ...]]]:
    """Names and full shapes of what `export` yields, in its order. A collective over the first model replica."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return [item for turn in range(stages) for entry in _listing(model, turn) for item in entry]


def _listing(model: Policy, turn: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Names and full shapes of the Hugging Face tensors of each weight of stage `turn`, on every stage."""
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    mine = parallel_state.get_pipeline_model_parallel_rank() == turn
    parameters = _parameters(model)
    listing = [_shape_of(w, parameters[w.megatron], model) for w in stage_weights(model)] if mine else None
    if pipeline.size() > 1:
        listing = broadcast_json(listing, src=dist.get_global_rank(pipeline, turn), group=pipeline)
    assert listing is not None
    return [[(name, tuple(shape)) for name, shape in entry] for entry in listing]


def _shape_of(weight: Weight, parameter: Tensor, model: Policy) -> list[tuple[str, tuple[int, ...]]]:
    _, size = _tensor_place()
    shapes = []
    for name, part in zip(weight.hf, weight.split(parameter.detach()), strict=True):
        shape = list(part.shape)
        if weight.axis is not None:
            shape[weight.axis] *= size
        if name in _vocabulary_names(model.architecture):
            shape[0] = model.architecture.vocabulary
        shapes.append((name, tuple(shape)))
    return shapes


def _gather(weight: Weight, local: Tensor, architecture: Architecture) -> list[Tensor] | None:
    """Full Hugging Face tensors on tensor-parallel rank 0, None on the others."""
    rank, size = _tensor_place()
    full = []
    for name, part in zip(weight.hf, weight.split(local), strict=True):
        part = part.contiguous()
        if weight.axis is not None and size > 1:
            group = parallel_state.get_tensor_model_parallel_group()
            parts = [torch.empty_like(part) for _ in range(size)] if rank == 0 else None
            dist.gather(part, parts, dst=dist.get_global_rank(group, 0), group=group)
            if parts is None:
                continue
            part = torch.cat(parts, dim=weight.axis)
        if name in _vocabulary_names(architecture):
            part = part[: architecture.vocabulary]
        full.append(part)
    return full if rank == 0 else None


def _to_first_stage(
    tensor: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    turn: int,
    stage: int,
    pipeline: dist.ProcessGroup,
) -> Tensor | None:
    """Send a tensor of stage `turn` to stage 0; other stages have nothing to do."""
    if stage == turn:
        assert tensor is not None
        dist.send(tensor.contiguous(), dst=dist.get_global_rank(pipeline, 0), group=pipeline)
    elif stage == 0:
        tensor = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
        dist.recv(tensor, src=dist.get_global_rank(pipeline, turn), group=pipeline)
    return tensor


def _tensor_place() -> tuple[int, int]:
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
