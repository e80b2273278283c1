"""Hugging Face tensors -> policy weights: each rank reads the parts that it holds, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state
from torch import Tensor

from vime.errors import UserError
from vime.models.family import Architecture
from vime.models.hf_folder import HfReader
from vime.models.weight import Weight
from vime.training.model import HAVE_TRANSFORMER_ENGINE, Policy

# Transformer Engine keeps these norms inside the linear layer that follows them; not before experts.
_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
# One module an expert, or Transformer Engine's grouped one.
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(\w+)\.weight$|mlp\.experts\.(\w+)\.weight(\d+)$")


def chunk_weights(chunk: Policy) -> list[Weight]:
    """The weights of one model chunk in order, those of all experts of its layers among them.

    A tied output layer is the embedding and is not listed again.
    """
    architecture = chunk.architecture
    weights = [architecture.embedding] if chunk.pre_process else []
    for local, layer in enumerate(chunk.decoder.layers):
        weights += architecture.layer_weights(layer.layer_number - 1, local)
    if chunk.post_process:
        weights.append(architecture.final_norm)
        if architecture.output is not None:
            weights.append(architecture.output)
    return weights


def parameters_of(chunk: Policy) -> dict[str, Tensor]:
    """This rank's parameters of a chunk by the names that `Weight.megatron` uses, and the routers' selection biases."""
    parameters: dict[str, Tensor] = dict(chunk.named_parameters())
    parameters |= {name: buffer for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias")}
    if HAVE_TRANSFORMER_ENGINE:
        for plain, fused in _FUSED_NORMS.items():
            for name in [name for name in parameters if name.endswith(fused)]:
                parameters[name.removesuffix(fused) + plain] = parameters.pop(name)
    first = expert_rank() * local_experts(chunk.architecture)

    def renamed(match: re.Match[str]) -> str:
        alone, linear, grouped_linear, grouped = match.groups()
        return f"mlp.experts.{first + int(alone or grouped or 0)}.{linear or grouped_linear}.weight"

    return {_EXPERT.sub(renamed, name): parameter for name, parameter in parameters.items()}


def local_experts(architecture: Architecture) -> int:
    """Experts of one layer on one expert-parallel rank."""
    return architecture.experts // parallel_state.get_expert_model_parallel_world_size()


def expert_rank() -> int:
    """This rank's place among the expert-parallel ranks."""
    return int(parallel_state.get_expert_model_parallel_rank())


def is_held(weight: Weight, architecture: Architecture) -> bool:
    """Whether this rank holds (a part of) the weight: an expert's is on one expert-parallel rank."""
    return weight.expert is None or weight.expert // local_experts(architecture) == expert_rank()


def tensor_place(weight: Weight) -> tuple[int, int]:
    """This rank's place among those that divide the weight, and their number."""
    if weight.expert is not None:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def vocabulary_names(architecture: Architecture) -> set[str]:
    """Names of the tensors with a row for each word, of which the last rank's part may be short."""
    return {*architecture.embedding.hf, *(architecture.output.hf if architecture.output else ())}


@torch.no_grad()
def load(chunks: Sequence[Policy], reader: HfReader) -> None:
    """Fill the model from a Hugging Face folder. Raises UserError naming a missing, misshapen or left-over tensor."""
    for chunk in chunks:
        _load_chunk(chunk, reader)
    architecture = chunks[0].architecture
    unknown = {name for name in reader.names if not name.startswith(architecture.kept_aside or ("\0",))}
    unknown.difference_update(_all_names(architecture))
    if unknown:
        listing = ", ".join(sorted(unknown)[:3])
        raise UserError(f"{reader.folder} has tensors that {architecture.model_type} does not use: {listing}")


def _load_chunk(chunk: Policy, reader: HfReader) -> None:
    architecture = chunk.architecture
    parameters = parameters_of(chunk)
    weights = [weight for weight in chunk_weights(chunk) if is_held(weight, architecture)]
    if chunk.post_process and not chunk.pre_process and architecture.tied:
        # The last stage keeps its own copy of a tied embedding; Megatron sums the two copies' gradients.
        shared = architecture.embedding
        weights.append(Weight("output_layer.weight", shared.hf, shared.axis))
    for weight in weights:
        local = weight.join([_padded_part(reader, name, weight, architecture) for name in weight.hf])
        parameter = parameters.pop(weight.megatron)
        if local.shape != parameter.shape:
            raise UserError(
                f"{reader.folder}: {', '.join(weight.hf)} give shape {tuple(local.shape)} where the config asks for"
                f" {tuple(parameter.shape)}"
            )
        parameter.copy_(local.to(parameter.dtype))
    assert not parameters, f"parameters without a Hugging Face counterpart: {sorted(parameters)}"


def _all_names(architecture: Architecture) -> Iterator[str]:
    edges = [architecture.embedding, architecture.final_norm, *([architecture.output] if architecture.output else [])]
    for weight in edges:
        yield from weight.hf
    for layer in range(architecture.layers):
        for weight in architecture.layer_weights(layer, layer):
            yield from weight.hf
    if architecture.tied:
        yield "lm_head.weight"  # some exports of tied models repeat the embedding under the output layer's name


def _padded_part(reader: HfReader, name: str, weight: Weight, architecture: Architecture) -> Tensor:
    """A rank's part. The rows of embedding and output layer need not divide: zero rows fill up the last part."""
    rank, size = tensor_place(weight)
    if name not in vocabulary_names(architecture) or architecture.vocabulary % size == 0:
        return reader.part(name, weight.axis, rank, size)
    share = -(-architecture.vocabulary // size)
    rows = reader.rows(name, rank * share, min((rank + 1) * share, architecture.vocabulary))
    return torch.cat([rows, rows.new_zeros(share - rows.shape[0], rows.shape[1])])
