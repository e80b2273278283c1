"""How many nodes a component takes on a cluster, and how its ranks or engines fill them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vime.config import Config, Training
from vime.errors import UserError

WHOLE_SEGMENT, SMALL_SEGMENT, MAX_SEGMENT = 8, 4, 16


@dataclass(frozen=True)
class NodeCount:
    """A component in numbers."""

    name: Literal["trainer", "rollout"]
    nodes: int
    tasks_per_node: int
    """Ranks, or engines (a node of one that spans several), of a full node."""
    width: int
    """Slots of one such task."""
    span: int
    """Nodes of one engine; 1 for ranks."""
    tasks: int
    """Ranks, or engines."""
    groups: tuple[NodeGroup, ...]
    """What should stay inside an NVLink domain."""

    @property
    def slots_used(self) -> int:
        """Slots taken on all nodes together."""
        return self.tasks * self.span * self.width

    def __str__(self) -> str:
        return f"the {self.name} component"


def trainer_nodes(config: Config) -> NodeCount:
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
        for names in (("tensor_parallel", "context_parallel"), ("expert_parallel", "expert_tensor_parallel"))
        if (width := math.prod(getattr(training, name) for name in names)) > 1
        for group in rank_groups(ranks, width, per_node, _product(training, names))
    ]
    return NodeCount("trainer", nodes, per_node, 1, 1, ranks, tuple(groups))


def _product(training: Training, names: Sequence[str]) -> str:
    """`training.expert_parallel=8 x expert_tensor_parallel=2`, without factors of 1."""
    return "training." + " x ".join(
        f"{name}={getattr(training, name)}" for name in names if getattr(training, name) > 1
    )


def rollout_nodes(config: Config) -> NodeCount:
    """The engines' nodes: whole engines on a node, or whole nodes for an engine. Raises UserError for neither."""
    engines, width, slots = config.rollout.engines, config.rollout.tensor_parallel, config.cluster.node.places
    asked = config.launch.rollout_nodes
    if width > slots:
        if width % slots:
            raise UserError(
                f"rollout.tensor_parallel={width} is neither within a node of {slots} slots nor a multiple of it;"
                f" use {width // slots * slots} or {-(-width // slots) * slots}"
            )
        span = config.nodes_per_engine
        if asked not in (None, engines * span):
            raise UserError(
                f"launch.rollout_nodes={asked}: {engines} engines of {span} nodes each take {engines * span} nodes"
            )
        what = f"rollout.tensor_parallel={width}"
        groups = tuple(NodeGroup(tuple(range(i * span, (i + 1) * span)), what) for i in range(engines))
        return NodeCount("rollout", engines * span, 1, slots, span, engines, groups)
    least = -(-engines // (slots // width))
    nodes = asked or least
    if not least <= nodes <= engines:
        raise UserError(
            f"launch.rollout_nodes={nodes}: {engines} engines of {width} slots fit on {least} to {engines} nodes of"
            f" {slots} slots"
        )
    return NodeCount("rollout", nodes, -(-engines // nodes), width, 1, engines, ())


@dataclass(frozen=True)
class NodeGroup:
    """Nodes whose GPUs exchange data all the time, and why."""

    nodes: tuple[int, ...]
    what: str
    """Setting that makes the group, such as training.tensor_parallel=8."""


def rank_groups(ranks: int, size: int, per_node: int, what: str) -> list[NodeGroup]:
    """Groups of `size` neighbouring ranks when each node holds `per_node`: those of tensor or expert parallelism."""
    return [
        NodeGroup(tuple(range(first // per_node, (first + size - 1) // per_node + 1)), what)
        for first in range(0, ranks, size)
    ]


def choose_segment(
    nodes: int, domain_nodes: int, groups: Sequence[NodeGroup], wanted: int | None, where: str, setting: str
) -> int:
    """Nodes of one `--segment`: a number that divides `nodes`, splits no group and fits an NVLink domain.

    All of up to WHOLE_SEGMENT nodes. Of more, few: the smallest from SMALL_SEGMENT on, at most MAX_SEGMENT, because a
    rack with a tray down has nothing to give to a segment of all its trays.

    `wanted` is the site's own choice; `where` names the nodes and `setting` the number of them in messages. Raises
    UserError with the numbers when there is none.
    """
    if wanted is not None:
        if wanted > domain_nodes:
            raise UserError(f"{where}: a segment of {wanted} nodes is more than the {domain_nodes} of an NVLink domain")
        if nodes % wanted:
            other = choose_segment(nodes, domain_nodes, (), None, where, setting)
            raise UserError(
                f"{where}: segments of {wanted} nodes do not divide its {nodes} nodes;"
                f" use {setting}={_multiples(nodes, wanted)} or a segment of {other}"
            )
        return wanted
    fitting = [size for size in range(1, min(nodes, domain_nodes) + 1) if nodes % size == 0]
    whole = [size for size in fitting if not split_groups(groups, size)]
    widest = max((len(group.nodes) for group in groups), default=1)
    if not whole and widest <= domain_nodes:
        group = max(groups, key=lambda group: len(group.nodes))
        near = (nodes // widest + 1) * widest
        raise UserError(
            f"{where}: {nodes} nodes do not divide into segments of at most {domain_nodes} nodes (an NVLink domain)"
            f" that keep the {widest} nodes of {group.what} together; use {setting}={near}"
        )
    if not whole or (nodes in whole and nodes <= WHOLE_SEGMENT):
        return max(whole or fitting)
    small = [size for size in whole if size <= MAX_SEGMENT]
    return min((size for size in small if size >= SMALL_SEGMENT), default=max(small, default=min(whole)))


def split_groups(groups: Sequence[NodeGroup], segment: int) -> list[NodeGroup]:
    """Those of `groups` whose nodes are not all in one run of `segment` nodes."""
    return [group for group in groups if group.nodes[0] // segment != group.nodes[-1] // segment]


def _multiples(nodes: int, segment: int) -> str:
    below = nodes // segment * segment
    return f"{below} or {below + segment}" if below else str(segment)


def segments_of(config: Config, counts: list[NodeCount], layout: str) -> tuple[list[int | None], list[str]]:
    """The segment of each component, and warnings about groups that leave an NVLink domain. Raises UserError."""
    cluster = config.cluster
    domain, own = cluster.node.domain_nodes, {"trainer": cluster.slurm.trainer, "rollout": cluster.slurm.rollout}
    warnings = []
    if layout == "hetjob":
        placed = [(str(count), f"launch.{count.name}_nodes", count.nodes, count.groups) for count in counts]
        wanted = [config.launch.segment or own[count.name].segment for count in counts]
    else:
        shifted = [
            NodeGroup(tuple(node + sum(before.nodes for before in counts[:index]) for node in group.nodes), group.what)
            for index, count in enumerate(counts)
            for group in count.groups
        ]
        placed = [
            (
                "the allocation",
                "launch.trainer_nodes + launch.rollout_nodes",
                sum(count.nodes for count in counts),
                tuple(shifted),
            )
        ]
        own_segments = (cluster.slurm.allocation.segment, *(own[count.name].segment for count in counts))
        wanted = [config.launch.segment or next(filter(None, own_segments), None)]
    segments: list[int | None] = []
    for (where, setting, nodes, groups), choice in zip(placed, wanted, strict=True):
        on = cluster.slurm.segment
        segment = choose_segment(nodes, domain, groups, choice, where, setting) if on else None
        segments.append(segment)
        warnings += [_leaves_domain(config, group) for group in split_groups(groups, segment or 1)]
    if domain > 1 and layout == "hetjob":
        warnings.append(
            "Slurm gives each component of a heterogeneous job an IMEX channel of its own, which the group that sends"
            " weights would cross: where both components are in one rack, NCCL fails at the first update."
            " launch.layout=partitioned takes both from one allocation; else set NCCL_MNNVL_ENABLE=0"
        )
    # A partitioned job has one segment for all of its slices.
    return segments * len(counts) if len(segments) < len(counts) else segments, list(dict.fromkeys(warnings))


def _leaves_domain(config: Config, group: NodeGroup) -> str:
    node = config.cluster.node
    domain = node.nvlink_domain or node.gpus
    speeds = ""
    if node.network_gb_per_s and node.nvlink_gb_per_s:
        speeds = f": {node.network_gb_per_s:g} GB/s a GPU instead of {node.nvlink_gb_per_s:g}"
    off = node.domain_nodes >= len(group.nodes) and not config.cluster.slurm.segment
    cure = "; cluster.slurm.segment=true would keep them together" if off else ""
    return f"{group.what} spans {len(group.nodes)} nodes and leaves the NVLink domain of {domain} GPUs{speeds}{cure}"


def idle_gpus(config: Config, count: NodeCount) -> list[str]:
    """A warning when a component takes whole nodes and leaves GPUs of them unused."""
    node = config.cluster.node
    total = count.nodes * node.places
    if count.slots_used == total or not config.cluster.slurm.exclusive or config.cluster.device == "cpu":
        return []
    return [f"{count} uses {count.slots_used} of the {total} GPUs of its {count.nodes} nodes"]


def shared_memory(config: Config) -> list[str]:
    """A warning when nodes are to be shared but all of their memory is asked for."""
    slurm = config.cluster.slurm
    if slurm.exclusive or slurm.mem != "0":
        return []
    return ["cluster.slurm.mem=0 takes all memory of nodes that cluster.slurm.exclusive=false would share; set it"]
