"""Which nodes of a plan must share an NVLink domain, and what a person should know before paying for others."""

from __future__ import annotations

from vime.config import Config
from vime.fit import Fit
from vime.topology import Group, choose_segment, parted


def segments_of(config: Config, fits: list[Fit], layout: str) -> tuple[list[int | None], list[str]]:
    """The segment of each component, and warnings about groups that leave an NVLink domain. Raises UserError."""
    cluster = config.cluster
    domain, own = cluster.node.domain_nodes, {"trainer": cluster.slurm.trainer, "rollout": cluster.slurm.rollout}
    warnings = []
    if layout == "hetjob":
        parts = [(str(fit), f"launch.{fit.name}_nodes", fit.nodes, fit.groups) for fit in fits]
        wanted = [own[fit.name].segment for fit in fits]
    else:
        shifted = [
            Group(tuple(node + sum(before.nodes for before in fits[:index]) for node in group.nodes), group.what)
            for index, fit in enumerate(fits)
            for group in fit.groups
        ]
        parts = [("the allocation", "its nodes", sum(fit.nodes for fit in fits), tuple(shifted))]
        wanted = [next((own[fit.name].segment for fit in fits if own[fit.name].segment), None)]
    segments: list[int | None] = []
    for (where, setting, nodes, groups), choice in zip(parts, wanted, strict=True):
        on = cluster.slurm.segment
        segment = choose_segment(nodes, domain, groups, choice, where, setting) if on else None
        segments.append(segment)
        warnings += [_leaves_domain(config, group) for group in parted(groups, segment or 1)]
    if domain > 1 and layout == "hetjob":
        warnings.append(
            "Slurm's switch/nvidia_imex gives one IMEX channel to a job record and knows nothing of heterogeneous"
            " components: trainer and rollout nodes of one rack may not share NVLink memory, and weights then travel"
            " over the network. launch.layout=partitioned takes both from one allocation"
        )
    # A partitioned job has one segment for all of its slices.
    return segments * len(fits) if len(segments) < len(fits) else segments, list(dict.fromkeys(warnings))


def _leaves_domain(config: Config, group: Group) -> str:
    node = config.cluster.node
    domain = node.nvlink_domain or node.gpus
    speeds = ""
    if node.network_gb_per_s and node.nvlink_gb_per_s:
        speeds = f": {node.network_gb_per_s:g} GB/s a GPU instead of {node.nvlink_gb_per_s:g}"
    off = node.domain_nodes >= len(group.nodes) and not config.cluster.slurm.segment
    cure = "; cluster.slurm.segment=true would keep them together" if off else ""
    return f"{group.what} spans {len(group.nodes)} nodes and leaves the NVLink domain of {domain} GPUs{speeds}{cure}"


def idle_gpus(config: Config, fit: Fit) -> list[str]:
    """A warning when a component takes whole nodes and leaves GPUs of them unused."""
    node = config.cluster.node
    total = fit.nodes * node.places
    if fit.slots_used == total or not config.cluster.slurm.exclusive or config.cluster.device == "cpu":
        return []
    return [f"{fit} uses {fit.slots_used} of the {total} GPUs of its {fit.nodes} nodes"]


def shared_memory(config: Config) -> list[str]:
    """A warning when nodes are to be shared but all of their memory is asked for."""
    slurm = config.cluster.slurm
    if slurm.exclusive or slurm.mem != "0":
        return []
    return ["cluster.slurm.mem=0 takes all memory of nodes that cluster.slurm.exclusive=false would share; set it"]
