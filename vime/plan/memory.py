"""How much memory each rank and each engine GPU takes, and for what, before anything is started.

Weights, gradients and optimizer state are counted exactly. Activations are those that Megatron-core's own layers keep
for the backward pass; Transformer Engine's fused ones keep less, so that a plan errs on the safe side.
"""

from __future__ import annotations

from vime.config import Config, Shape, Training
from vime.config.section import Frozen
from vime.errors import UserError
from vime.models.shape import shape_of
from vime.plan.parameters import Parameters, count, of_stage, stage_layers

GB = 1e9
TIGHT = 0.9
"""Share of the memory above which a plan warns."""
_BYTES = {"float32": 4, "bfloat16": 2}
_GRADIENT = 4
_MOMENTS = 8
_MASTER = {"float32": 0, "bfloat16": 4}
"""A float32 model is its own master copy."""
_LOGIT_CHUNKS = 2.1
"""Chunks of float32 logits that exist at once, measured with entropies on (benchmarks/logprob_memory.py)."""


class _Gigabytes(Frozen):
    @property
    def total(self) -> float:
        """The sum."""
        return float(sum(value for value in self.model_dump().values() if isinstance(value, float)))


class TrainerMemory(_Gigabytes):
    """GB of the fullest trainer rank."""

    stage: int
    """Its pipeline stage."""
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """Kept for the backward passes of the microbatches in flight, the logits of one chunk included."""
    frozen: float
    """Weights of a reference policy."""
    critic: float
    """Parameters, gradients and optimizer of a critic."""


class EngineMemory(_Gigabytes):
    """GB of one GPU of an engine."""

    parameters: float
    kv_cache: float
    """What is left of rollout.memory_fraction; on a CPU rollout.kv_cache_gb."""
    kv_tokens: int
    """Tokens that the cache of a whole engine holds."""


def trainer_memory(config: Config, shape: Shape) -> TrainerMemory:
    """Memory of the trainer rank that takes most. A teacher does not count: its shape is not known here."""
    stages = config.training.pipeline_parallel
    return max((_of_stage(config, shape, stage) for stage in range(stages)), key=lambda memory: memory.total)


def _of_stage(config: Config, shape: Shape, stage: int) -> TrainerMemory:
    training = config.training
    counted = of_stage(shape, stage, training.pipeline_parallel, training.virtual_stages)
    held = _held(counted, training)
    weight, state = _BYTES[training.dtype], _MASTER[training.dtype] + _MOMENTS
    shards = _shards(training)
    parameters = sum(held) * weight / GB
    gradients = sum(held) * _GRADIENT / GB
    optimizer = sum(one * state / shard for one, shard in zip(held, shards, strict=True)) / GB
    return TrainerMemory(
        stage=stage,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activation_bytes(config, shape, stage) / GB,
        frozen=parameters * int(config.algorithm.needs_reference),
        critic=(parameters + gradients + optimizer) * int(config.algorithm.name == "ppo"),
    )


def _held(parameters: Parameters, training: Training) -> tuple[float, float]:
    """Parameters on one rank: all but the experts, and the experts."""
    return (
        parameters.split / training.tensor_parallel + parameters.whole,
        parameters.experts / training.expert_parallel / training.expert_tensor_parallel,
    )


def _shards(training: Training) -> tuple[int, int]:
    """Ranks that share the optimizer state of the same parameters: all but the experts, and the experts."""
    if not training.distributed_optimizer:
        return 1, 1
    stage = training.ranks // training.pipeline_parallel
    return stage // training.tensor_parallel, stage // (training.expert_parallel * training.expert_tensor_parallel)


def activation_bytes(config: Config, shape: Shape, stage: int) -> float:
    """Bytes of activations on a rank of the stage when most microbatches are in flight, each of the largest size."""
    training = config.training
    tokens, width = training.max_tokens_per_microbatch, _BYTES[training.dtype]
    layers = stage_layers(shape, stage, training.pipeline_parallel, training.virtual_stages)
    whole = [_layer_elements(shape, training, layer) for layer in layers]
    if training.recompute == "full":
        # The input of each layer, and while one is computed again all of its own.
        kept, again = len(layers) * shape.hidden / _sequence_shards(training), max(whole)
    elif training.recompute == "selective":
        # Core attention keeps four times the queries; to compute it again, its queries and keys are needed.
        queries, groups = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        again = 4 * queries / training.tensor_parallel
        kept = sum(whole) - len(layers) * (3 * queries - groups) / training.tensor_parallel
    else:
        kept, again = sum(whole), 0.0
    end = 0.0
    if stage == training.pipeline_parallel - 1:
        # The final norm and what meets the output layer, then the logits of a chunk in float32.
        end = tokens * width * shape.hidden * (2 / _sequence_shards(training) + 1)
        chunk = min(training.logprob_chunk_tokens, tokens)
        end += _LOGIT_CHUNKS * chunk * shape.vocabulary / training.tensor_parallel * 4
    # What is computed again comes when the backward pass has left the output layer.
    return tokens * width * kept * _in_flight(training, stage) + max(tokens * width * again, end)


def _sequence_shards(training: Training) -> int:
    """Ranks that share the tokens between tensor-parallel regions."""
    return training.tensor_parallel if training.sequence_parallel else 1


def _layer_elements(shape: Shape, training: Training, layer: int) -> float:
    """Values that a layer keeps for each token of a rank.

    Two norms keep what they read and what they gave, the residual stream is kept twice; attention keeps what was
    projected, normalised, rotated and attended; a gated feed-forward layer keeps five times its width, an expert six.
    """
    queries, groups = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows = 6 * shape.hidden / _sequence_shards(training)
    attention = 3 * queries + 2 * groups + 4 * shape.head_dim
    if shape.qk_norm:
        attention += 4 * queries + groups  # what was normalised, and what came of it
    if not shape.has_experts(layer):
        return rows + (attention + 5 * shape.ffn) / training.tensor_parallel
    # Tokens are divided over tensor-parallel ranks before each goes to its experts, and share those of the engine's
    # choice evenly over ranks, on average.
    routed = shape.top_k * (6 * shape.expert_ffn + shape.hidden) + 2 * shape.experts
    shared = 5 * shape.shared_expert_ffn
    return rows + (attention + shared + routed) / training.tensor_parallel


def _in_flight(training: Training, stage: int) -> float:
    """Microbatches whose activations a stage keeps at once, in the one-forward-one-backward schedules."""
    stages, virtual = training.pipeline_parallel, training.virtual_stages
    if virtual == 1:
        return stages - stage
    # Narayanan et al. 2021, arXiv:2104.04473: warm-up of the interleaved schedule, in pieces of a stage.
    return (2 * (stages - stage - 1) + (virtual - 1) * stages + 1) / virtual


def engine_memory(config: Config, shape: Shape) -> EngineMemory:
    """Memory of one GPU of an engine; on a CPU of its process."""
    rollout, node = config.rollout, config.cluster.node
    width = _BYTES[rollout.dtype]
    parameters = count(shape) * width / rollout.tensor_parallel / GB
    if config.cluster.device == "cpu":
        cache = rollout.kv_cache_gb * (1 << 30) / GB
    else:
        cache = rollout.memory_fraction * (node.gpu_memory_gb or 0.0) - parameters
    # An engine wider than there are key-value heads holds each of them more than once.
    heads = max(1, shape.kv_heads // rollout.tensor_parallel)
    per_token = 2 * shape.layers * heads * shape.head_dim * width
    return EngineMemory(parameters=parameters, kv_cache=cache, kv_tokens=max(0, int(cache * GB / per_token)))


def memory_of(config: Config) -> tuple[TrainerMemory, EngineMemory | None]:
    """Both plans; None where there are no engines."""
    shape = shape_of(config.model)
    return trainer_memory(config, shape), engine_memory(config, shape) if config.rollout.engines else None


def checkpoint_gb(config: Config) -> float:
    """A whole checkpoint: weights and optimizer state of each parameter once."""
    each = _BYTES[config.training.dtype] + _MASTER[config.training.dtype] + _MOMENTS
    return count(shape_of(config.model)) * each * (1 + int(config.algorithm.name == "ppo")) / GB


def memory_warnings(config: Config) -> list[str]:
    """What fits tightly. Raises UserError for what cannot fit. Knows only GPUs."""
    node = config.cluster.node
    if node.gpu_memory_gb is None or config.cluster.device != "cuda":
        return []
    trainer, engine = memory_of(config)
    memory, gpu = node.gpu_memory_gb, node.gpu or "GPU"
    warnings = []
    what = f"training takes about {trainer.total:.0f} GB of each trainer GPU ({parts_text(trainer)})"
    if trainer.total > memory:
        raise UserError(f"{what}, and {gpu} has {memory:g} GB: {_remedy(config, trainer)}")
    if trainer.total > TIGHT * memory:
        warnings.append(f"{what}, of {memory:g} GB: little is left for the fragments between them")
    if engine is None:
        return warnings
    share = config.rollout.memory_fraction * memory
    what = f"weights take about {engine.parameters:.0f} GB of each engine GPU"
    wider = f"raise rollout.tensor_parallel={config.rollout.tensor_parallel}"
    if engine.parameters > share:
        raise UserError(
            f"{what}, and rollout.memory_fraction={config.rollout.memory_fraction} of {gpu} is {share:.0f} GB: {wider}"
        )
    context = config.rollout.context or shape_of(config.model).context
    if engine.kv_tokens < context:
        raise UserError(
            f"{what} (an engine may use {share:.0f} GB), which leaves a key-value cache of {engine.kv_tokens} tokens"
            f" for sequences of {context} (rollout.context): {wider}"
        )
    if engine.parameters > 0.85 * share:
        warnings.append(f"{what} (an engine may use {share:.0f} GB): little is left for the key-value cache")
    return warnings


def parts_text(memory: _Gigabytes) -> str:
    """`parameters 7.6, gradients 15.3, ...` in GB, without what is nothing."""
    values = {name: value for name, value in memory.model_dump().items() if isinstance(value, float) and value > 0}
    return ", ".join(f"{name.replace('_', ' ')} {value:.{1 if value >= 0.1 else 4}f}" for name, value in values.items())


def _remedy(config: Config, memory: TrainerMemory) -> str:
    training = config.training
    if memory.activations > 0.5 * memory.total and training.recompute != "full":
        return (
            f"set training.recompute=full, or lower training.max_tokens_per_microbatch="
            f"{training.max_tokens_per_microbatch}"
        )
    return (
        f"raise training.ranks={training.ranks}, or divide the model further (tensor_parallel, pipeline_parallel,"
        " expert_parallel)"
    )
