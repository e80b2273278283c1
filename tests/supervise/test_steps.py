from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vime.config import Config
from vime.config.compose import compose
from vime.errors import UserError
from vime.plan.plan import make_plan
from vime.run.directory import RunDir
from vime.slurm.allocation import Allocation
from vime.slurm.environment import srun_environment
from vime.supervise.commands import Command, step_commands
from vime.supervise.step_process import StepProcess
from vime.supervise.step_rank import RankReport, role_environment

BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "train[0-1]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "train[0-1]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "rollout0",
    "SLURM_HET_SIZE": "2",
    "SLURM_NTASKS": "2",
    "SLURM_CPUS_PER_TASK": "8",
    "SLURM_MEM_PER_NODE": "1",
    "PATH": "/bin",
}


def _config(*overrides: str) -> Config:
    return compose("minislurm", "tiny_grpo", overrides)


def _commands(config: Config, nodes: str | None = None) -> dict[str, Command]:
    plan = make_plan(config)
    environ = BATCH if nodes is None else BATCH | {"SLURM_JOB_NODELIST": nodes}
    return {c.role: c for c in step_commands(config, plan, Allocation.from_environment(environ, plan))}


def test_a_step_of_a_heterogeneous_job_names_its_component_and_its_size() -> None:
    commands = _commands(_config())
    trainer = commands["trainer"].argv
    program = (sys.executable, "-m", "vime.supervise.step_rank", sys.executable, "-m", "vime.training.trainer")
    assert trainer[-6:] == program
    assert trainer[:7] == (
        "srun",
        "--het-group=0",
        "--job-name=trainer",
        "--nodes=2",
        "--nodelist=train0,train1",
        "--ntasks=2",
        "--distribution=plane=1",
    )
    for option in ("--cpus-per-task=8", "--mpi=none", "--kill-on-bad-exit=1", "--mem=0", "--overlap"):
        assert option in trainer
    router = commands["router"].argv
    assert "--het-group=1" in router
    assert "--nodelist=rollout0" in router
    # All CPUs of its node, beside the engine's step; -c would confine it to the first of them.
    assert "--cpu-bind=none" in router
    assert not any(option.startswith("--cpus-per-task") for option in router)
    assert commands["trainer"].environment["OMP_NUM_THREADS"] == "8"
    assert commands["engine"].environment == {}
    assert [name for name, command in commands.items() if command.finishes] == ["trainer", "generator"]


def test_a_partitioned_step_is_a_slice_of_the_allocation() -> None:
    commands = _commands(_config("launch.layout=partitioned"), nodes="rollout0,train[0-1]")
    assert "--nodelist=rollout0,train0" in commands["trainer"].argv
    assert "--nodelist=train1" in commands["engine"].argv
    assert not any(option.startswith("--het-group") for option in commands["engine"].argv)


def test_a_job_that_does_not_fit_the_plan_is_refused() -> None:
    plan = make_plan(_config())
    with pytest.raises(UserError, match="the job has 1 nodes for component trainer; the plan wants 2"):
        Allocation.from_environment(BATCH | {"SLURM_JOB_NODELIST_HET_GROUP_0": "train0"}, plan)
    with pytest.raises(UserError, match="SLURM_JOB_NODELIST_HET_GROUP_1 is not set"):
        Allocation.from_environment({k: v for k, v in BATCH.items() if not k.endswith("_1")}, plan)


def test_gpus_and_containers_of_a_step(tmp_path: Path) -> None:
    image = tmp_path / "vime.sqsh"
    gpus = ["cluster.device=cuda", "cluster.node.gpus=4", "cluster.node.slots=null", "weights.backend=nccl"]
    pyxis = ["cluster.container.kind=pyxis", f"cluster.container.image={image}", "cluster.container.mounts=[/data]"]
    sizes = ["training.ranks=8", "launch.trainer_nodes=2"]
    trainer = _commands(_config(*gpus, *pyxis, *sizes))["trainer"].argv
    assert "--gpus-per-node=4" in trainer
    assert "--distribution=plane=4" in trainer
    # SLURM gives a step that does not ask all GPUs of the job.
    assert _commands(_config(*gpus, *sizes))["trainer"].environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "--gres=none" in _commands(_config(*gpus, *pyxis, *sizes))["generator"].argv
    assert f"--container-image={image}" in trainer
    [names] = [option for option in trainer if option.startswith("--container-env=")]
    assert {"VIME_RUN_TOKEN", "VIME_LIFELINE", "OMP_NUM_THREADS"} <= set(names.partition("=")[2].split(","))
    [mounts] = [option for option in trainer if option.startswith("--container-mounts=")]
    assert mounts.startswith("--container-mounts=/data,")
    assert f"{Path.cwd()}/runs:{Path.cwd()}/runs" in mounts
    apptainer = ["cluster.container.kind=apptainer", "cluster.container.image=vime.sif", "cluster.slurm.gpus=gres"]
    trainer = _commands(_config(*gpus, *apptainer, *sizes))["trainer"].argv
    assert "--gres=gpu:4" in trainer
    assert trainer[trainer.index("apptainer") : trainer.index("apptainer") + 3] == ("apptainer", "exec", "--nv")


def test_srun_gets_the_job_and_none_of_its_options() -> None:
    environment = srun_environment(BATCH)
    assert environment["SLURM_JOB_ID"] == "7"
    assert environment["SLURM_JOB_NODELIST_HET_GROUP_1"] == "rollout0"
    assert not {"SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_NODE"} & set(environment)


def test_a_rank_becomes_a_role_that_knows_no_scheduler() -> None:
    environ = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURMD_NODENAME": "n7",
        "VIME_RUN_TOKEN": "secret",
        "VIME_LIFELINE": "host:1",
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
        "PATH": "/bin",
    }
    environment = role_environment(environ, (1, 2), "10.0.0.7")
    assert environment == {
        "VIME_RANK": "3",
        "VIME_WORLD_SIZE": "4",
        "VIME_NODE": "n7",
        "VIME_HOST": "10.0.0.7",
        "VIME_RUN_TOKEN": "secret",
        "CUDA_VISIBLE_DEVICES": "5,6",
        "PATH": "/bin",
    }


def _step(tmp_path: Path, output: str, code: int, finishes: bool = True) -> StepProcess:
    command = Command("trainer", None, 2, ("srun",), finishes)
    log = tmp_path / "trainer.step.log"
    log.write_text(output)
    popen = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"], process_group=0)
    popen_ended = StepProcess(command, popen, log, RunDir(tmp_path), 1)
    while popen.poll() is None:
        pass
    return popen_ended


def _lines(*reports: RankReport) -> str:
    return "".join(f"{report.line()}\n" for report in reports)


STARTED = [RankReport(rank, f"n{rank}", "now", 100 + rank) for rank in (0, 1)]


@pytest.fixture(autouse=True)
def _collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vime.supervise.step_process.collect", lambda popen: popen.returncode)


def test_the_ranks_of_a_step_say_how_they_ended(tmp_path: Path) -> None:
    failed = RankReport(1, "n1", "now", 101, True, 3)
    stopped = RankReport(0, "n0", "now", 100, True, None, "SIGTERM", stopped=True)
    output = _lines(*STARTED, failed) + "srun: error: n1: task 1: Exited with exit code 3\n" + _lines(stopped)
    ends, ended = _step(tmp_path, output, 3).poll()
    assert ended
    assert [(end.rank, end.node, end.exit_code, end.stopped) for end in ends] == [
        (1, "n1", 3, False),
        (0, "n0", None, True),
    ]


def test_a_rank_whose_wrapper_was_killed_and_a_lost_node_are_known_from_srun(tmp_path: Path) -> None:
    ends, _ = _step(tmp_path, _lines(*STARTED) + "srun: error: n1: task 1: Killed\n", 137).poll()
    assert [(end.rank, end.node, end.signal, end.stopped) for end in ends] == [(1, "n1", "SIGKILL", False)]
    ends, _ = _step(tmp_path, _lines(*STARTED) + "srun: error: Node failure on n0\n", 1).poll()
    assert [(end.rank, end.node, end.signal) for end in ends] == [(0, "n0", "SIGKILL")]


def test_ranks_that_srun_kills_after_another_one_are_not_the_cause(tmp_path: Path) -> None:
    failed = RankReport(1, "n1", "now", 101, True, 3)
    ends, _ = _step(tmp_path, _lines(*STARTED, failed) + "srun: error: n0: task 0: Killed\n", 3).poll()
    assert [(end.rank, end.stopped) for end in ends] == [(1, False), (0, True)]


def test_a_step_that_slurm_refuses_ends_with_sruns_words(tmp_path: Path) -> None:
    step = _step(tmp_path, "srun: error: Unable to create step for job 7: Requested nodes are busy\n", 1)
    [end], ended = step.poll()
    assert ended
    assert (end.exit_code, end.log) == (1, step.output)


def test_a_step_that_finishes_is_one_end_and_a_server_that_exits_0_is_named(tmp_path: Path) -> None:
    done = _lines(*STARTED, *(RankReport(rank, f"n{rank}", "now", 1, True, 0) for rank in (0, 1)))
    ends, _ = _step(tmp_path, done, 0).poll()
    assert [end.succeeded for end in ends] == [True]
    ends, _ = _step(tmp_path, done, 0, finishes=False).poll()
    assert not any(end.succeeded for end in ends)
