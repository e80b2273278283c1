"""Which role runs on which node, device and rank. Pure functions: the plan of a configuration never changes.

The roles of a run sit in components (`trainer`, `rollout`): the parts that a scheduler places apart. On a local cluster
both components are the same single node.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from vime.config import Config
from vime.errors import UserError
from vime.model_shape import ModelShape

RoleName = Literal["supervisor", "trainer", "engine", "router", "generator"]
ComponentName = Literal["trainer", "rollout"]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Process(_Frozen):
    """One process of a role."""

    rank: int
    """Rank within the role, from 0."""
    node: str
    """A name in the component's nodes."""
    devices: tuple[int, ...] = ()
    """GPU indices on that node; empty on a CPU."""


class RolePlan(_Frozen):
    """A role: where its processes are and what they run."""

    name: RoleName
    component: ComponentName
    module: str
    """`python -m module` is the process."""
    processes: tuple[Process, ...]


class Component(_Frozen):
    """Nodes that a scheduler places together."""

    name: ComponentName
    nodes: tuple[str, ...]


class Plan(_Frozen):
    """Everything that runs, and where."""

    recipe: str
    cluster: str
    layout: Literal["local"]
    components: tuple[Component, ...]
    roles: tuple[RolePlan, ...]
    data_parallel: int
    """Model replicas of the trainer."""
    samples_per_step: int
    """Prompts times responses to each."""

    def role(self, name: RoleName) -> RolePlan | None:
        """The role of that name, or None when this run has none (an sft run has no engine and no router)."""
        return next((role for role in self.roles if role.name == name), None)


def make_plan(config: Config) -> Plan:
    """Place the roles of `config`. Raises UserError for a cluster that no layout exists for."""
    if config.cluster.scheduler != "local":
        raise UserError(
            f"cluster {config.cluster.name}: cluster.scheduler={config.cluster.scheduler} has no layout; use local"
        )
    node = config.cluster.host
    on_gpu = config.cluster.device == "cuda"
    ranks, width = config.training.ranks, config.rollout.tensor_parallel
    trainers = tuple(Process(rank=rank, node=node, devices=(rank,) if on_gpu else ()) for rank in range(ranks))
    engines = tuple(
        Process(rank=index, node=node, devices=_gpus(ranks + index * width, width) if on_gpu else ())
        for index in range(config.rollout.engines)
    )
    one = (Process(rank=0, node=node),)
    generator = "vime.rollout.demonstrations" if config.algorithm.name == "sft" else "vime.rollout.generator"
    roles = [
        RolePlan(name="supervisor", component="trainer", module="vime.launch.supervisor", processes=one),
        RolePlan(name="trainer", component="trainer", module="vime.training.main", processes=trainers),
    ]
    if engines:
        roles.append(RolePlan(name="engine", component="rollout", module="vime.rollout.engine", processes=engines))
        roles.append(RolePlan(name="router", component="rollout", module="vime.rollout.router", processes=one))
    roles.append(RolePlan(name="generator", component="rollout", module=generator, processes=one))
    return Plan(
        recipe=config.recipe,
        cluster=config.cluster.name,
        layout="local",
        components=(Component(name="trainer", nodes=(node,)), Component(name="rollout", nodes=(node,))),
        roles=tuple(roles),
        data_parallel=config.training.data_parallel,
        samples_per_step=config.rollout.prompts_per_step * config.rollout.samples_per_prompt,
    )


def _gpus(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def check_sizes(config: Config, shape: ModelShape) -> None:
    """Refuse sizes that cannot work together, before anything starts. Raises UserError with the numbers."""
    for check in (_check_batch, _check_split, _check_lengths):
        check(config, shape)


def _check_batch(config: Config, shape: ModelShape) -> None:
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
    if config.data.source == "reasoning_gym" and config.data.size < prompts:
        raise UserError(f"rollout.prompts_per_step={prompts} prompts are more than data.size={config.data.size} holds")


def _check_split(config: Config, shape: ModelShape) -> None:
    for name, width in (
        ("training.tensor_parallel", config.training.tensor_parallel),
        ("rollout.tensor_parallel", config.rollout.tensor_parallel if config.rollout.engines else 1),
    ):
        for what, size in (("attention heads", shape.heads), ("key-value heads", shape.kv_heads)):
            if size % width:
                raise UserError(
                    f"{name}={width} does not divide the model's {size} {what}; use {_divisor(size, width)}"
                )
    stages = config.training.pipeline_parallel
    if shape.layers % stages:
        right = _divisor(shape.layers, stages)
        raise UserError(
            f"training.pipeline_parallel={stages} does not divide the model's {shape.layers} layers; use {right}"
        )


def _divisor(size: int, near: int) -> int:
    return max(width for width in range(1, min(size, near) + 1) if size % width == 0)


def _check_lengths(config: Config, shape: ModelShape) -> None:
    context = config.rollout.context or shape.context
    if context > shape.context:
        raise UserError(f"rollout.context={context} is more than the model's own limit of {shape.context} tokens")
    limit = config.training.max_tokens_per_microbatch
    if context > limit:
        raise UserError(
            f"a sequence of up to {context} tokens (rollout.context) does not fit into"
            f" training.max_tokens_per_microbatch={limit}"
        )
