"""How many nodes a component takes on a cluster, and how its ranks or engines fill them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vime.config import Config
from vime.errors import UserError
from vime.topology import Group, rank_groups


@dataclass(frozen=True)
class Fit:
    """A component in numbers."""

    name: Literal["trainer", "rollout"]
    nodes: int
    tasks_per_node: int
    """Ranks, or engines (parts of one that spans nodes), of a full node."""
    width: int
    """Slots of one such task."""
    span: int
    """Nodes of one engine; 1 for ranks."""
    tasks: int
    """Ranks, or engines."""
    groups: tuple[Group, ...]
    """What should stay inside an NVLink domain."""

    @property
    def slots_used(self) -> int:
        """Slots taken on all nodes together."""
        return self.tasks * self.span * self.width

    def __str__(self) -> str:
        return f"the {self.name} component"


def fit_trainer(config: Config) -> Fit:
    """The trainer's nodes: as many ranks on each. Raises UserError when they cannot be dealt out evenly."""
    training, slots = config.training, config.cluster.node.places
    ranks = training.ranks
    nodes = config.launch.trainer_nodes or next(n for n in range(-(-ranks // slots), ranks + 1) if ranks % n == 0)
    right = ", ".join(str(n) for n in range(-(-ranks // slots), ranks + 1) if ranks % n == 0)
    if ranks % nodes:
        raise UserError(
            f"training.ranks={ranks} do not divide over launch.trainer_nodes={nodes}; with {slots} slots a node,"
            f" use one of {right} nodes"
        )
    if ranks // nodes > slots:
        raise UserError(
            f"training.ranks={ranks} on launch.trainer_nodes={nodes} are {ranks // nodes} ranks a node, more than the"
            f" {slots} slots of a node of {config.cluster.name}; use one of {right} nodes"
        )
    per_node = ranks // nodes
    groups = [
        group
        for name, width in (
            ("tensor_parallel", training.tensor_parallel),
            ("expert_parallel", training.expert_parallel),
        )
        if width > 1
        for group in rank_groups(ranks, width, per_node, f"training.{name}={width}")
    ]
    return Fit("trainer", nodes, per_node, 1, 1, ranks, tuple(groups))


def fit_rollout(config: Config) -> Fit:
    """The engines' nodes: whole engines on a node, or whole nodes for an engine. Raises UserError for neither."""
    engines, width, slots = config.rollout.engines, config.rollout.tensor_parallel, config.cluster.node.places
    asked = config.launch.rollout_nodes
    if width > slots:
        if width % slots:
            raise UserError(
                f"rollout.tensor_parallel={width} is neither within a node of {slots} slots nor a multiple of it;"
                f" use {width // slots * slots} or {-(-width // slots) * slots}"
            )
        span = config.engine_parts
        if asked not in (None, engines * span):
            raise UserError(
                f"launch.rollout_nodes={asked}: {engines} engines of {span} nodes each take {engines * span} nodes"
            )
        what = f"rollout.tensor_parallel={width}"
        groups = tuple(Group(tuple(range(i * span, (i + 1) * span)), what) for i in range(engines))
        return Fit("rollout", engines * span, 1, slots, span, engines, groups)
    least = -(-engines // (slots // width))
    nodes = asked or least
    if not least <= nodes <= engines:
        raise UserError(
            f"launch.rollout_nodes={nodes}: {engines} engines of {width} slots fit on {least} to {engines} nodes of"
            f" {slots} slots"
        )
    return Fit("rollout", nodes, -(-engines // nodes), width, 1, engines, ())
