"""The SLURM job that this process runs in: its id, and which of its hosts are which component of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vime.errors import UserError
from vime.plan.plan import Plan
from vime.slurm.node_list import expand


@dataclass(frozen=True)
class Allocation:
    """What the job has."""

    job_id: str
    """Of a heterogeneous job the leader's: the one to ask about, cancel and requeue."""
    hosts: dict[str, tuple[str, ...]]
    """Component -> its hosts, in the plan's order."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], plan: Plan) -> Allocation:
        """Read what SLURM tells a batch script. Raises UserError when the job does not fit the plan."""
        hosts: dict[str, tuple[str, ...]] = {}
        for index, component in enumerate(plan.components):
            if plan.layout == "hetjob":
                listed = expand(_text(environ, f"SLURM_JOB_NODELIST_HET_GROUP_{index}"))
            else:
                listed = expand(_text(environ, "SLURM_JOB_NODELIST"))[component.first_node :]
            if len(listed) < len(component.nodes):
                raise UserError(
                    f"the job has {len(listed)} nodes for component {component.name}; the plan wants"
                    f" {len(component.nodes)}"
                )
            hosts[component.name] = tuple(listed[: len(component.nodes)])
        # In an array every task has a job id of its own.
        return cls(_text(environ, "SLURM_JOB_ID"), hosts)


def _text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise UserError(f"{name} is not set: the supervisor runs in the batch step of the job that the plan describes")
    return value
