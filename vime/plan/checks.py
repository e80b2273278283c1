"""Sizes that cannot work together, refused before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vime.config import Config, Shape
from vime.config.compose import compose_warmup
from vime.errors import UserError
from vime.models.family import read_shape
from vime.models.shape import shape_of


@dataclass(frozen=True)
class SizedModel:
    """One model of a run, as a message names it. `trained`: it has gradients; `served`: engines hold it too."""

    name: str
    shape: Shape
    trained: bool
    served: bool


def check_model(config: Config) -> None:
    """Refuse a model that is not supported, and sizes that cannot work together, in a warm-up too. Raises UserError.

    A critic, a reference and a teacher of their own are each held against their own shape: the trainer ranks divide all
    of them alike.
    """
    policy = SizedModel("the model", shape_of(config.model), trained=True, served=True)
    others = [
        SizedModel(f"the model of {key}", read_shape(folder), trained=key == "algorithm.critic.path", served=False)
        for key, folder in config.algorithm.folders.items()
        if (folder / "config.json").is_file()
    ]
    check_sizes(config, [policy, *others])
    warmup = compose_warmup(config)
    if warmup is not None:
        try:
            check_sizes(warmup, [policy])  # it trains the same model
        except UserError as error:
            raise UserError(f"model.warmup={config.model.warmup}: {error}") from None


def check_sizes(config: Config, models: Sequence[SizedModel]) -> None:
    """Refuse sizes that cannot work together, before anything starts; the policy comes first. Raises UserError."""
    _check_batch(config)
    for model in models:
        _check_split(config, model)
    _check_experts(config, models)
    for model in models:
        _check_lengths(config, model, models[0].shape)


def _check_batch(config: Config) -> None:
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


def _check_split(config: Config, model: SizedModel) -> None:
    shape = model.shape
    engine = config.rollout.tensor_parallel if config.rollout.engines and model.served else 1
    widths = {"training.tensor_parallel": config.training.tensor_parallel, "rollout.tensor_parallel": engine}
    for name, width in widths.items():
        for what, size in (("attention heads", shape.heads), ("key-value heads", shape.kv_heads)):
            # An engine that is wider than there are key-value heads holds each of them equally often.
            repeated = name.startswith("rollout") and what == "key-value heads" and width % size == 0
            if size % width and not repeated:
                raise UserError(
                    f"{name}={width} does not divide {model.name}'s {size} {what}; use {_divisor(size, width)}"
                )
    stages, pieces = config.training.pipeline_parallel, config.training.virtual_stages
    if shape.layers % stages:
        right = _divisor(shape.layers, stages)
        raise UserError(
            f"training.pipeline_parallel={stages} does not divide {model.name}'s {shape.layers} layers; use {right}"
        )
    if shape.layers // stages % pieces:
        raise UserError(
            f"training.virtual_stages={pieces} does not divide the {shape.layers // stages} layers of a pipeline stage;"
            f" use {_divisor(shape.layers // stages, pieces)}"
        )


def _check_experts(config: Config, models: Sequence[SizedModel]) -> None:
    training, width = config.training, config.training.expert_parallel
    sparse = [model for model in models if model.shape.experts]
    if config.algorithm.routing_replay and not models[0].shape.experts:
        raise UserError("algorithm.routing_replay=true replays the choice of experts, and the model has none")
    if not sparse:
        for name in ("expert_parallel", "expert_tensor_parallel"):
            if (size := getattr(training, name)) > 1:
                raise UserError(f"training.{name}={size}: the model has no experts; use 1")
    for model in sparse:
        experts = model.shape.experts
        if experts % width:
            raise UserError(
                f"training.expert_parallel={width} does not divide {model.name}'s {experts} experts; use"
                f" {_divisor(experts, width)}"
            )
        if training.tensor_parallel > 1 and not training.sequence_parallel:
            raise UserError(
                f"training.sequence_parallel must be true: {model.name} has experts and training.tensor_parallel="
                f"{training.tensor_parallel}"
            )
        if model.trained and width == 1 and training.expert_tensor_parallel != training.tensor_parallel:
            # Megatron-core takes undivided experts for dense weights: their gradients would be summed over wrong ranks.
            of = "" if model.served else f" for {model.name}"
            raise UserError(
                f"training.expert_parallel=1 needs training.expert_tensor_parallel={training.tensor_parallel}{of}, the"
                f" tensor_parallel of the rest (or divide the experts: expert_parallel="
                f"{_divisor(experts, training.tensor_parallel)})"
            )


def _divisor(size: int, near: int) -> int:
    return max(width for width in range(1, min(size, near) + 1) if size % width == 0)


def _check_lengths(config: Config, model: SizedModel, policy: Shape) -> None:
    context = config.rollout.context or policy.context
    if context > model.shape.context:
        raise UserError(
            f"rollout.context={context} is more than {model.name}'s own limit of {model.shape.context} tokens"
        )
    limit, parts = config.training.max_tokens_per_microbatch, config.training.context_parallel
    # A sequence is cut into two pieces for each context-parallel rank, all of one size.
    padded = -(-context // (2 * parts)) * 2 * parts if parts > 1 else context
    if padded > limit * parts:
        of_ranks = f" of {parts} context-parallel ranks" if parts > 1 else ""
        raise UserError(
            f"a sequence of up to {context} tokens (rollout.context) does not fit into"
            f" training.max_tokens_per_microbatch={limit}{of_ranks}"
        )
