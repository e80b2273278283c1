"""Which role runs on which node, device and rank. Pure functions: the plan of a configuration never changes.

The roles of a run sit in components (`trainer`, `rollout`), which a scheduler places apart. On a local cluster
both components are the same single node. On SLURM nodes have no names before the job starts: `rollout-1` is the second
node of the rollout component, whichever host that will be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import AliasChoices, Field, field_validator

from vime.config import Config
from vime.config.section import Frozen
from vime.errors import UserError
from vime.plan.memory import memory_warnings
from vime.plan.nodes import NodeCount, idle_gpus, rollout_nodes, segments_of, shared_memory, trainer_nodes

RoleName = Literal["supervisor", "trainer", "engine", "router", "generator"]
ComponentName = Literal["trainer", "rollout"]
MOVED = {
    "vime.launch.supervisor": "vime.supervise.supervisor",
    "vime.training.main": "vime.training.trainer",
    "vime.rollout.engine": "vime.rollout.engine.engine",
    "vime.rollout.router": "vime.rollout.router.router",
}
"""Where the programs are now that jobs still in the queue name: they were submitted before these modules moved."""


class Process(Frozen):
    """One process of a role."""

    rank: int
    """Rank within the role, from 0. An engine that spans nodes has one for each of its nodes."""
    node: str
    """A name in the component's nodes."""
    devices: tuple[int, ...] = ()
    """GPU indices on that node; empty on a CPU."""
    engine_node: int = Field(0, validation_alias=AliasChoices("engine_node", "part"))
    """Which of the nodes of an engine that spans several. Node 0 has the server that the run talks to."""


class RolePlan(Frozen):
    """A role: where its processes are and what they run."""

    name: RoleName
    component: ComponentName
    module: str
    """`python -m module` is the process."""
    processes: tuple[Process, ...]

    @field_validator("module")
    @classmethod
    def _where_it_is_now(cls, module: str) -> str:
        return MOVED.get(module, module)


class Component(Frozen):
    """Nodes that a scheduler places together."""

    name: ComponentName
    nodes: tuple[str, ...]
    """Addresses on a local cluster; on SLURM `trainer-0`, `trainer-1`, ... in the order of the component's hosts."""
    first_node: int = 0
    """partitioned: place of the first of these nodes in the allocation. hetjob: 0, each component has its own list."""
    tasks_per_node: int = 1
    """Trainer ranks, or engines, of one node."""
    cpus_per_task: int = 1
    """CPUs of each of them."""
    gpus_per_node: int = 0
    """GPUs to ask for on each node."""
    segment: int | None = None
    """Nodes that must share an NVLink domain; None where the scheduler cannot be asked."""


class Plan(Frozen):
    """Everything that runs, and where."""

    recipe: str
    cluster: str
    layout: Literal["local", "hetjob", "partitioned"]
    components: tuple[Component, ...]
    roles: tuple[RolePlan, ...]
    data_parallel: int
    """Model replicas of the trainer."""
    samples_per_step: int
    """Prompts times responses to each."""
    time_limit: int | None = None
    """Seconds that the job may take; None on a local cluster."""
    warnings: tuple[str, ...] = ()
    """What works, but badly."""

    def role(self, name: RoleName) -> RolePlan | None:
        """The role of that name, or None when this run has none (an sft run has no engine and no router)."""
        return next((role for role in self.roles if role.name == name), None)

    def component(self, name: ComponentName) -> Component | None:
        """The component of that name, or None: on SLURM an sft run has no rollout component."""
        return next((component for component in self.components if component.name == name), None)

    @property
    def nodes(self) -> int:
        """Nodes of the request."""
        return sum(len(component.nodes) for component in self.components)

    @property
    def gpus(self) -> int:
        """GPUs of the request, idle ones included."""
        return sum(len(component.nodes) * component.gpus_per_node for component in self.components)


def make_plan(config: Config) -> Plan:
    """Place the roles of `config`. Raises UserError with the numbers for what cannot be placed."""
    return _local_plan(config) if config.cluster.scheduler == "local" else _slurm_plan(config)


def _local_plan(config: Config) -> Plan:
    node = config.cluster.host
    on_gpu = config.cluster.device == "cuda"
    ranks, width = config.training.ranks, config.rollout.tensor_parallel
    trainers = tuple(Process(rank=rank, node=node, devices=(rank,) if on_gpu else ()) for rank in range(ranks))
    engines = tuple(
        Process(rank=index, node=node, devices=_gpus(ranks + index * width, width) if on_gpu else ())
        for index in range(config.rollout.engines)
    )
    return Plan(
        recipe=config.recipe,
        cluster=config.cluster.name,
        layout="local",
        components=(Component(name="trainer", nodes=(node,)), Component(name="rollout", nodes=(node,))),
        roles=_roles(config, trainers, engines, "rollout", node, node),
        data_parallel=config.training.data_parallel,
        samples_per_step=config.rollout.prompts_per_step * config.rollout.samples_per_prompt,
    )


def _slurm_plan(config: Config) -> Plan:
    cluster, limit = config.cluster, config.time_limit
    if limit <= cluster.slurm.signal_seconds:
        raise UserError(
            f"the time limit of {limit} s is not longer than cluster.slurm.signal_seconds="
            f"{cluster.slurm.signal_seconds}: USR2 would come before the run starts; raise launch.time"
        )
    # Without engines nothing needs nodes of its own: demonstrations are written on the trainer's first node.
    counts = [trainer_nodes(config), *([rollout_nodes(config)] if config.rollout.engines else [])]
    layout = _layout(config, counts)
    segments, warnings = segments_of(config, counts, layout)
    components = tuple(_component(config, count, segment) for count, segment in zip(counts, segments, strict=True))
    if layout == "partitioned":
        components = tuple(
            component.model_copy(update={"first_node": sum(count.nodes for count in counts[:index])})
            for index, component in enumerate(components)
        )
    engines = _engines(config, counts[-1]) if config.rollout.engines else ()
    rollout = components[-1]
    return Plan(
        recipe=config.recipe,
        cluster=cluster.name,
        layout=layout,
        components=components,
        roles=_roles(config, _trainers(config, counts[0]), engines, rollout.name, "trainer-0", rollout.nodes[0]),
        data_parallel=config.training.data_parallel,
        samples_per_step=config.rollout.prompts_per_step * config.rollout.samples_per_prompt,
        time_limit=limit,
        warnings=(
            *warnings,
            *(line for count in counts for line in idle_gpus(config, count)),
            *shared_memory(config),
            *memory_warnings(config),
        ),
    )


def _layout(config: Config, counts: Sequence[NodeCount]) -> Literal["hetjob", "partitioned"]:
    if len(counts) == 1:
        return "partitioned"  # a single component is not heterogeneous
    if config.launch.layout == "auto":
        return "hetjob" if config.cluster.slurm.components_differ else "partitioned"
    return config.launch.layout


def _roles(
    config: Config,
    trainers: tuple[Process, ...],
    engines: tuple[Process, ...],
    rollout: ComponentName,
    first_trainer: str,
    first_rollout: str,
) -> tuple[RolePlan, ...]:
    supervisor = (Process(rank=0, node=first_trainer),)
    one = (Process(rank=0, node=first_rollout),)
    generator = "vime.rollout.demonstrations" if config.algorithm.name == "sft" else "vime.rollout.generator"
    roles = [
        RolePlan(name="supervisor", component="trainer", module="vime.supervise.supervisor", processes=supervisor),
        RolePlan(name="trainer", component="trainer", module="vime.training.trainer", processes=trainers),
    ]
    if engines:
        roles.append(RolePlan(name="engine", component=rollout, module="vime.rollout.engine.engine", processes=engines))
        roles.append(RolePlan(name="router", component=rollout, module="vime.rollout.router.router", processes=one))
    roles.append(RolePlan(name="generator", component=rollout, module=generator, processes=one))
    return tuple(roles)


def _trainers(config: Config, count: NodeCount) -> tuple[Process, ...]:
    each, on_gpu = count.tasks_per_node, config.cluster.device == "cuda"
    return tuple(
        Process(rank=rank, node=f"trainer-{rank // each}", devices=(rank % each,) if on_gpu else ())
        for rank in range(count.tasks)
    )


def _engines(config: Config, count: NodeCount) -> tuple[Process, ...]:
    on_gpu = config.cluster.device == "cuda"
    processes = []
    for index in range(count.tasks):
        node, place = divmod(index, count.tasks_per_node)
        for engine_node in range(count.span):
            devices = _gpus(place * count.width, count.width) if on_gpu else ()
            host = f"rollout-{node * count.span + engine_node}"
            processes.append(
                Process(rank=index * count.span + engine_node, node=host, devices=devices, engine_node=engine_node)
            )
    return tuple(processes)


def _component(config: Config, count: NodeCount, segment: int | None) -> Component:
    node, whole = config.cluster.node, config.cluster.slurm.exclusive
    used = count.tasks_per_node * count.width
    cpus = node.cpus if whole else node.cpus * used // node.places
    if cpus < count.tasks_per_node:
        raise UserError(f"cluster.node.cpus={node.cpus} do not give each of {count.tasks_per_node} tasks of a node one")
    return Component(
        name=count.name,
        nodes=tuple(f"{count.name}-{index}" for index in range(count.nodes)),
        tasks_per_node=count.tasks_per_node,
        cpus_per_task=cpus // count.tasks_per_node,
        gpus_per_node=node.gpus if whole else min(used, node.gpus),
        segment=segment,
    )


def _gpus(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))
