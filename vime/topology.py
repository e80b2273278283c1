"""What lies near what: NVLink domains, the segments that keep nodes inside one, and the groups that must not leave it.

Nodes of a component are numbered from 0, ranks are laid out node after node. In Megatron's order tensor-parallel ranks
are neighbours, so the ranks of one group are near whenever the numbers allow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vime.errors import UserError


@dataclass(frozen=True)
class Group:
    """Nodes whose GPUs exchange data all the time, and why."""

    nodes: tuple[int, ...]
    what: str
    """Setting that makes the group, such as training.tensor_parallel=8."""


def rank_groups(ranks: int, size: int, per_node: int, what: str) -> list[Group]:
    """Groups of `size` neighbouring ranks when each node holds `per_node`: those of tensor or expert parallelism."""
    return [
        Group(tuple(range(first // per_node, (first + size - 1) // per_node + 1)), what)
        for first in range(0, ranks, size)
    ]


def choose_segment(
    nodes: int, domain_nodes: int, groups: Sequence[Group], wanted: int | None, where: str, setting: str
) -> int:
    """Nodes of one `--segment`: the most that one NVLink domain holds, that divide `nodes`, and that part no group.

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
    whole = [size for size in fitting if not parted(groups, size)]
    widest = max((len(group.nodes) for group in groups), default=1)
    if not whole and widest <= domain_nodes:
        group = max(groups, key=lambda group: len(group.nodes))
        near = (nodes // widest + 1) * widest
        raise UserError(
            f"{where}: {nodes} nodes do not divide into segments of at most {domain_nodes} nodes (an NVLink domain)"
            f" that keep the {widest} nodes of {group.what} together; use {setting}={near}"
        )
    return max(whole or fitting)


def parted(groups: Sequence[Group], segment: int) -> list[Group]:
    """Those of `groups` whose nodes are not all in one run of `segment` nodes."""
    return [group for group in groups if group.nodes[0] // segment != group.nodes[-1] // segment]


def _multiples(nodes: int, segment: int) -> str:
    below = nodes // segment * segment
    return f"{below} or {below + segment}" if below else str(segment)
