"""How much of a GPU's memory a published model takes, before activations and caches: enough to see what cannot fit."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config import Config, Shape
from vime.errors import UserError

GB = 1e9
TIGHT = 0.85
"""Share of the memory above which a plan warns."""
_BYTES = {"float32": 4, "bfloat16": 2}
_GRADIENT = 4
_OPTIMIZER = 12
"""Master weight and Adam's two moments, in float32."""


@dataclass(frozen=True)
class Parameters:
    """Parameters of a model, by how parallelism divides them."""

    experts: int
    """In the experts, all layers together."""
    layers: int
    """In the rest of the layers."""
    edges: int
    """In embedding and output layer."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.experts + self.layers + self.edges


def count(shape: Shape) -> Parameters:
    """Parameters of a model of this shape, norms and biases left out."""
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    moe_layers = shape.layers - shape.dense_layers if shape.experts else 0
    dense = 3 * shape.hidden * shape.ffn * (shape.layers - moe_layers)
    beside = moe_layers * shape.hidden * (3 * shape.shared_expert_ffn + shape.experts)
    return Parameters(
        experts=moe_layers * shape.experts * 3 * shape.hidden * shape.expert_ffn,
        layers=shape.layers * attention + dense + beside,
        edges=shape.vocabulary * shape.hidden * (1 if shape.tied_embeddings else 2),
    )


def trainer_gb(config: Config, shape: Shape) -> float:
    """GB of weights, gradients and optimizer state on the fullest trainer rank.

    A critic is a second model in training, a reference policy one of weights alone, both of the policy's shape.
    A teacher does not count: its shape is not known here.
    """
    training, parameters = config.training, count(shape)
    stage = training.ranks // training.pipeline_parallel
    # A stage at an end of the pipeline holds the embedding or the output layer, a single one both.
    edges = parameters.edges / (1 if training.pipeline_parallel == 1 or shape.tied_embeddings else 2)
    common = (
        parameters.layers / training.pipeline_parallel / training.tensor_parallel + edges / training.tensor_parallel
    )
    experts = parameters.experts / training.pipeline_parallel / training.expert_parallel
    sharded = training.distributed_optimizer
    copies = (stage // training.tensor_parallel, stage // training.expert_parallel)
    weight = _BYTES[training.dtype]
    trained, frozen = (2 if config.algorithm.name == "ppo" else 1), int(config.algorithm.needs_reference)
    return (
        sum(
            held * (trained * (weight + _GRADIENT + _OPTIMIZER / (replicas if sharded else 1)) + frozen * weight)
            for held, replicas in zip((common, experts), copies, strict=True)
        )
        / GB
    )


def engine_gb(config: Config, shape: Shape) -> float:
    """GB of weights on one GPU of an engine."""
    return count(shape).total * _BYTES[config.rollout.dtype] / config.rollout.tensor_parallel / GB


def memory_warnings(config: Config) -> list[str]:
    """What fits tightly. Raises UserError for what cannot fit. Knows only models with a `model.shape`."""
    shape, node = config.model.shape, config.cluster.node
    if shape is None or node.gpu_memory_gb is None or config.cluster.device != "cuda":
        return []
    memory, gpu = node.gpu_memory_gb, node.gpu or "GPU"
    wanted = trainer_gb(config, shape)
    what = f"weights, gradients and optimizer state take about {wanted:.0f} GB of each trainer GPU"
    if wanted > memory:
        raise UserError(
            f"{what}, and {gpu} has {memory:g} GB: raise training.ranks={config.training.ranks}, or divide the model"
            " further (tensor_parallel, pipeline_parallel, expert_parallel)"
        )
    warnings = [f"{what} ({memory:g} GB): little is left for activations"] if wanted > TIGHT * memory else []
    if config.rollout.engines == 0:
        return warnings
    weights, share = engine_gb(config, shape), config.rollout.memory_fraction * memory
    what = f"weights take about {weights:.0f} GB of each engine GPU"
    if weights > share:
        raise UserError(
            f"{what}, and rollout.memory_fraction={config.rollout.memory_fraction} of {gpu} is {share:.0f} GB: raise"
            f" rollout.tensor_parallel={config.rollout.tensor_parallel}"
        )
    if weights > TIGHT * share:
        warnings.append(f"{what} (an engine may use {share:.0f} GB): little is left for the key-value cache")
    return warnings
