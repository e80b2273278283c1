"""srun's options: where tasks are placed, what they get of a node, and the container around them."""

from __future__ import annotations

import sys

from vime.config import Config
from vime.config.cluster import Cluster
from vime.models.cache import cache_folder
from vime.plan.plan import Component, Plan

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def python_of(cluster: Cluster) -> str:
    """The Python that runs the roles: the container's, or the one that runs the supervisor."""
    return cluster.container.python if cluster.container.kind != "none" else sys.executable


def step_options(
    config: Config,
    plan: Plan,
    component: Component,
    hosts: list[str],
    tasks: int,
    each: int,
    cpus: int | None,
    name: str,
    *,
    contained: bool = True,
) -> list[str]:
    """srun and the options that place `tasks` tasks on `hosts`, `each` a node in the order of their numbers.

    cpus: of each task, which are then its own; None for all CPUs of the node, shared with other steps. contained:
    whether the tasks run in the cluster's container.
    """
    group = [f"--het-group={plan.components.index(component)}"] if plan.layout == "hetjob" else []
    return [
        "srun",
        *group,
        f"--job-name={name}",
        f"--nodes={len(hosts)}",
        f"--nodelist={','.join(hosts)}",
        f"--ntasks={tasks}",
        # Fills one node after the other, as the plan does; `block` would balance them.
        f"--distribution=plane={each}",
        # 22.05 stopped handing down the job's own. The option implies --exact: a step without GPUs would get the first
        # cores whatever else runs there, so it leaves the option out and binds nothing.
        *([f"--cpus-per-task={cpus}"] if cpus is not None else ["--cpu-bind=none"]),
        # Steps of one node share it: engine, router and generator, and an idle rank's memory.
        "--overlap",
        "--mem=0",
        "--mpi=none",
        "--kill-on-bad-exit=1",
        "--input=none",
        *config.cluster.slurm.srun,
        *(pyxis_options(config) if contained else []),
    ]


def gpu_request(cluster: Cluster, count: int) -> tuple[str, str] | None:
    """The option, without its dashes, by which a job or a step asks for `count` GPUs of each node, and its value.

    None where the site has no such option.
    """
    if not count or cluster.slurm.gpus == "none":
        return None
    named = f"{cluster.slurm.gpu_type}:{count}" if cluster.slurm.gpu_type else str(count)
    return ("gpus-per-node", named) if cluster.slurm.gpus == "gpus-per-node" else ("gres", f"gpu:{named}")


def gpu_option(cluster: Cluster, count: int) -> list[str]:
    """How a step asks for `count` GPUs of each node; nothing where the site has no such option.

    0 has to be said: SLURM gives a step that does not ask all GPUs of the job, whatever CUDA_VISIBLE_DEVICES was.
    """
    if cluster.device != "cuda" or cluster.slurm.gpus == "none":
        return []
    request = gpu_request(cluster, count)
    return ["--gres=none"] if request is None else [f"--{request[0]}={request[1]}"]


def pyxis_options(config: Config) -> list[str]:
    """The container options of srun; [] without pyxis."""
    cluster, container = config.cluster, config.cluster.container
    if container.kind != "pyxis":
        return []
    components = [*cluster.slurm.trainer.environment, *cluster.slurm.rollout.environment]
    names = list(dict.fromkeys([*ROLE_VARIABLES, *cluster.environment, *components, *container.environment]))
    workdir = [f"--container-workdir={container.workdir}"] if container.workdir else []
    mounts = [f"--container-mounts={','.join(_mounts(config))}"]
    # A variable set in the image beats the host's unless it is named here.
    environment = [f"--container-env={','.join(names)}"]
    return [f"--container-image={container.image}", *mounts, *workdir, *environment, *container.extra]


def container_prefix(config: Config) -> list[str]:
    """What comes before the program where apptainer runs it; [] elsewhere."""
    cluster, container = config.cluster, config.cluster.container
    if container.kind != "apptainer":
        return []
    binds = [f"--bind={mount}" for mount in _mounts(config)]
    workdir = [f"--pwd={container.workdir}"] if container.workdir else []
    gpus = ["--nv"] if cluster.device == "cuda" else []
    return ["apptainer", "exec", *gpus, *binds, *workdir, *container.extra, str(container.image)]


def _mounts(config: Config) -> list[str]:
    """What the site mounts, and the folders of the runs and of the made models under their own names."""
    own = [f"{config.run.root}:{config.run.root}"]
    if config.model.tiny is not None:
        own.append(f"{cache_folder()}:{cache_folder()}")
    return [*config.cluster.container.mounts, *own]


ROLE_VARIABLES = (
    "VIME_RUN_DIR",
    "VIME_STORE",
    "VIME_ROLE",
    "VIME_ATTEMPT",
    "VIME_RUN_TOKEN",
    "VIME_MODEL",
    "VIME_LIFELINE",
    "VIME_INTERFACE",
    "VIME_STOP_TIMEOUT",
    "PYTHONUNBUFFERED",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    *THREADS,
)
"""What a role is told by its environment, by name, for containers that set variables of their own."""
