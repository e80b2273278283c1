"""Sizes that cannot work together, refused before anything starts."""

from __future__ import annotations

from vime.config import Config, Shape
from vime.config.compose import compose_warmup
from vime.errors import UserError
from vime.models.shape import shape_of


def check_model(config: Config) -> None:
    """Refuse a model that is not supported, and sizes that cannot work together, in a warm-up too. Raises UserError."""
    shape = shape_of(config.model)
    _check_sizes(config, shape)
    warmup = compose_warmup(config)
    if warmup is not None:
        try:
            _check_sizes(warmup, shape)  # it trains the same model
        except UserError as error:
            raise UserError(f"model.warmup={config.model.warmup}: {error}") from None


def _check_sizes(config: Config, shape: Shape) -> None:
    for check in (_check_batch, _check_split, _check_experts, _check_lengths):
        check(config, shape)


def _check_batch(config: Config, shape: Shape) -> None:
    rollout, training = config.rollout, config.training
    prompts, each = rollout.prompts_per_step, rollout.samples_per_prompt
    parts = training.data_parallel
    if prompts * each % parts:
        right = next(count for count in range(prompts, prompts + parts + 1) if count * each % parts == 0)
        raise UserError(
            f"rollout.prompts_per_step x rollout.samples_per_prompt = {prompts} x {each} = {prompts * each} samples do"
            f" not divide over the {parts} data-parallel ranks of training.ranks={training.ranks};"
            f" use rollout.prompts_per_step={right}"
        )
    minibatches = config.algorithm.minibatches
    if prompts * each % (parts * minibatches):
        raise UserError(
            f"algorithm.minibatches={minibatches}: a step's {prompts * each} samples do not divide over"
            f" {minibatches} minibatches x {parts} data-parallel ranks"
        )
    if config.data.source == "reasoning_gym" and config.data.size < prompts:
        raise UserError(f"rollout.prompts_per_step={prompts} prompts are more than data.size={config.data.size} holds")


def _check_split(config: Config, shape: Shape) -> None:
    engine = config.rollout.tensor_parallel if config.rollout.engines else 1
    widths = {"training.tensor_parallel": config.training.tensor_parallel, "rollout.tensor_parallel": engine}
    for name, width in widths.items():
        for what, size in (("attention heads", shape.heads), ("key-value heads", shape.kv_heads)):
            # An engine that is wider than there are key-value heads holds each of them equally often.
            repeated = name.startswith("rollout") and what == "key-value heads" and width % size == 0
            if size % width and not repeated:
                raise UserError(
                    f"{name}={width} does not divide the model's {size} {what}; use {_divisor(size, width)}"
                )
    stages, pieces = config.training.pipeline_parallel, config.training.virtual_stages
    if shape.layers % stages:
        right = _divisor(shape.layers, stages)
        raise UserError(
            f"training.pipeline_parallel={stages} does not divide the model's {shape.layers} layers; use {right}"
        )
    if shape.layers // stages % pieces:
        raise UserError(
            f"training.virtual_stages={pieces} does not divide the {shape.layers // stages} layers of a pipeline stage;"
            f" use {_divisor(shape.layers // stages, pieces)}"
        )


def _check_experts(config: Config, shape: Shape) -> None:
    training, width = config.training, config.training.expert_parallel
    if shape.experts == 0:
        if config.algorithm.routing_replay:
            raise UserError("algorithm.routing_replay=true replays the choice of experts, and the model has none")
        for name in ("expert_parallel", "expert_tensor_parallel"):
            if (size := getattr(training, name)) > 1:
                raise UserError(f"training.{name}={size}: the model has no experts; use 1")
        return
    if shape.experts % width:
        right = _divisor(shape.experts, width)
        raise UserError(
            f"training.expert_parallel={width} does not divide the model's {shape.experts} experts; use {right}"
        )
    if training.tensor_parallel > 1 and not training.sequence_parallel:
        raise UserError(
            f"training.sequence_parallel must be true: the model has experts and training.tensor_parallel="
            f"{training.tensor_parallel}"
        )
    if width == 1 and training.expert_tensor_parallel != training.tensor_parallel:
        # Megatron-core takes undivided experts for dense weights: their gradients would be summed over wrong ranks.
        raise UserError(
            f"training.expert_parallel=1 needs training.expert_tensor_parallel={training.tensor_parallel}, the"
            f" tensor_parallel of the rest (or divide the experts: expert_parallel="
            f"{_divisor(shape.experts, training.tensor_parallel)})"
        )


def _divisor(size: int, near: int) -> int:
    return max(width for width in range(1, min(size, near) + 1) if size % width == 0)


def _check_lengths(config: Config, shape: Shape) -> None:
    context = config.rollout.context or shape.context
    if context > shape.context:
        raise UserError(f"rollout.context={context} is more than the model's own limit of {shape.context} tokens")
    limit, parts = config.training.max_tokens_per_microbatch, config.training.context_parallel
    # A sequence is cut into two pieces for each context-parallel rank, all of one size.
    padded = -(-context // (2 * parts)) * 2 * parts if parts > 1 else context
    if padded > limit * parts:
        of_ranks = f" of {parts} context-parallel ranks" if parts > 1 else ""
        raise UserError(
            f"a sequence of up to {context} tokens (rollout.context) does not fit into"
            f" training.max_tokens_per_microbatch={limit}{of_ranks}"
        )
