"""Hugging Face tensors -> policy weights: each rank reads the slices that it holds, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state
from torch import Tensor

from vime.errors import UserError
from vime.models.decoder import OUTPUT
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
    return architecture.shape.experts // parallel_state.get_expert_model_parallel_world_size()


def expert_rank() -> int:
    """This rank's place among the expert-parallel ranks."""
    return int(parallel_state.get_expert_model_parallel_rank())


def is_held(weight: Weight, architecture: Architecture) -> bool:
    """Whether this rank holds (a slice of) the weight: an expert's is on one expert-parallel rank."""
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
    """Names of the tensors with a row for each token, of which the last rank's slice may be short."""
    return {*architecture.embedding.hf, *(architecture.output or OUTPUT).hf}


def hf_shapes(weight: Weight, parameter: Tensor, architecture: Architecture) -> list[tuple[int, ...]]:
    """Shapes of the whole Hugging Face tensors of a weight, from this rank's parameter."""
    _, size = tensor_place(weight)
    shapes = []
    for name, local in zip(weight.hf, weight.split(parameter.detach()), strict=True):
        shape = list(local.shape)
        if weight.axis is not None:
            shape[weight.axis] *= size
        if name in vocabulary_names(architecture):
            shape[0] = architecture.shape.vocabulary
        shapes.append(tuple(shape))
    return shapes


@torch.no_grad()
def load(chunks: Sequence[Policy], reader: HfReader) -> None:
    """Fill the model from a Hugging Face folder.

    Raises UserError naming a missing, misshapen or left-over tensor, and an output layer that is not the embedding
    where the configuration ties them.
    """
    for chunk in chunks:
        _load_chunk(chunk, reader)
    architecture = chunks[0].architecture
    unknown = {name for name in reader.names if not name.startswith(architecture.kept_aside or ("\0",))}
    unknown.difference_update(_all_names(architecture))
    if unknown:
        listing = ", ".join(sorted(unknown)[:3])
        raise UserError(f"{reader.folder} has tensors that {architecture.shape.family} does not use: {listing}")


def _load_chunk(chunk: Policy, reader: HfReader) -> None:
    architecture = chunk.architecture
    parameters = parameters_of(chunk)
    weights = [weight for weight in chunk_weights(chunk) if is_held(weight, architecture)]
    if chunk.post_process and not chunk.pre_process and architecture.output is None:
        # The last stage keeps its own copy of a tied embedding; Megatron sums the two copies' gradients.
        shared = architecture.embedding
        weights.append(Weight("output_layer.weight", shared.hf, shared.axis))
    for weight in weights:
        parameter = parameters.pop(weight.megatron)
        for name, wanted in zip(weight.hf, hf_shapes(weight, parameter, architecture), strict=True):
            if (found := reader.shape(name)) != wanted:
                raise UserError(f"{reader.folder}: {name} has shape {found}, and config.json asks for {wanted}")
        slices = [_padded_slice(reader, name, weight, architecture) for name in weight.hf]
        if weight.hf == architecture.embedding.hf and architecture.output is None:
            _check_tied(reader, weight, slices[0], architecture)
        parameter.copy_(weight.join(slices).to(parameter.dtype))
    assert not parameters, f"parameters without a Hugging Face counterpart: {sorted(parameters)}"


def _check_tied(reader: HfReader, embedding: Weight, rows: Tensor, architecture: Architecture) -> None:
    """Some exports of tied models repeat the embedding under the output layer's name.

    Where it differs, transformers would not tie it and vLLM would drop it: each side would compute another model.
    """
    (name,), (output,) = embedding.hf, OUTPUT.hf
    if output not in reader.names:
        return
    same = reader.shape(output) == reader.shape(name)
    if not same or not torch.equal(_padded_slice(reader, output, embedding, architecture).to(rows.dtype), rows):
        raise UserError(
            f"{reader.folder}: config.json has tie_word_embeddings=true, but {output} differs from {name}: set"
            f" tie_word_embeddings=false to use both, or remove {output}"
        )


def _all_names(architecture: Architecture) -> Iterator[str]:
    edges = [architecture.embedding, architecture.final_norm, *([architecture.output] if architecture.output else [])]
    for weight in edges:
        yield from weight.hf
    for layer in range(architecture.shape.layers):
        for weight in architecture.layer_weights(layer, layer):
            yield from weight.hf
    if architecture.output is None:
        yield from OUTPUT.hf


def _padded_slice(reader: HfReader, name: str, weight: Weight, architecture: Architecture) -> Tensor:
    """A rank's slice. The rows of embedding and output layer need not divide: zero rows fill up the last slice."""
    rank, size = tensor_place(weight)
    vocabulary = architecture.shape.vocabulary
    if name not in vocabulary_names(architecture) or vocabulary % size == 0:
        return reader.slice(name, weight.axis, rank, size)
    share = -(-vocabulary // size)
    rows = reader.rows(name, rank * share, min((rank + 1) * share, vocabulary))
    return torch.cat([rows, rows.new_zeros(share - rows.shape[0], rows.shape[1])])
