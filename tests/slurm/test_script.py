"""The text that is submitted to SLURM."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.golden import CASES, FOLDER, golden, submission
from vime.config.compose import compose
from vime.errors import UserError
from vime.plan.plan import make_plan
from vime.slurm.environment import without_job
from vime.slurm.script import sbatch_text

RESET = ("partition", "constraint", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "gres", "segment")
CARRIED = ("account", "qos", "time", "mem", "signal", "requeue", "output", "reservation", "exclude", "dependency")


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\nscheduler: slurm\nnode: {slots: 1, cpus: 4}\n"
        "slurm: {allocation: {partition: all}, trainer: {partition: train}, rollout: {partition: rollout}}\n"
    )
    return file


def text(cluster: Path | str, *overrides: str, recipe: str = "tiny_grpo", dependency: str | None = None) -> str:
    config = compose(str(cluster), recipe, overrides)
    command = ["python", "-m", "thing", "a folder"]
    return sbatch_text(config, make_plan(config), run_dir=Path("/r/x"), command=command, dependency=dependency)


def options(script: str) -> list[tuple[str, str | None]]:
    found = re.findall(r"^#SBATCH (?:--)?([\w-]+)(?:=(.*))?$", script, re.MULTILINE)
    return [(name, value or None) for name, value in found]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_golden(case: tuple[str, str, str]) -> None:
    assert submission(*case) == golden(*case).read_text(), "if this is meant: python -m tests.golden"


def test_there_is_no_golden_file_of_a_case_that_is_gone() -> None:
    assert set(FOLDER.glob("*.sbatch")) == {golden(*case) for case in CASES}


def test_a_heterogeneous_job_repeats_what_slurm_resets_and_only_that(cluster: Path) -> None:
    given = [
        "cluster.slurm.account=acc",
        "cluster.slurm.qos=q",
        "cluster.slurm.reservation=res",
        "cluster.slurm.exclude='n[1-2]'",
        "cluster.slurm.constraint=fast",
        "cluster.node.gpus=2",
        "cluster.slurm.segment=true",
        "cluster.slurm.trainer.extra=[--network=ib]",
        "cluster.slurm.extra=['--licenses=scratch:1', '--hint=nomultithread', '-s']",
    ]
    script = text(cluster, *given, dependency="afterany:7")
    job, trainer, rollout = re.split(r"^#SBATCH hetjob$|^# trainer component$", script, flags=re.MULTILINE)
    assert {name for name, _ in options(job)} >= set(CARRIED) - {"gres"}
    assert ("exclude", "'n[1-2]'") in options(job)
    assert ("licenses", "scratch:1") in options(job)
    assert not {"hint", "-s"} & {name for name, _ in options(job)}
    assert [dict(options(part)).get("hint") for part in (trainer, rollout)] == ["nomultithread"] * 2
    for part in (trainer, rollout):
        names = [name for name, _ in options(part)]
        assert not set(names) & set(CARRIED)
        assert set(names) >= set(RESET) - {"gres"} | {"exclusive"}
        assert len(names) == len(set(names))
    assert ("network", "ib") in options(trainer)
    assert "network" not in dict(options(rollout))
    assert (dict(options(trainer))["nodes"], dict(options(rollout))["nodes"]) == ("2", "1")


def test_the_key_of_a_served_teacher_reaches_the_job_without_being_written_down(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIME_TEACHER_API_KEY", "the-key")
    script = text(cluster, "algorithm.teacher=http://teacher:8000")
    assert (dict(options(script))["export"] or "").endswith(",VIME_TEACHER_API_KEY")
    assert "the-key" not in script
    assert without_job({"VIME_TEACHER_API_KEY": "the-key", "VIME_ROLE": "x"}) == {"VIME_TEACHER_API_KEY": "the-key"}
    assert "VIME_TEACHER_API_KEY" not in text(cluster)


def test_what_submitit_writes_wrongly_is_written_right(cluster: Path) -> None:
    script = text(cluster)
    assert dict(options(script))["signal"] == "B:USR2@300"
    assert dict(options(script))["mem"] == "0"
    assert ("exclusive", None) in options(script)
    assert script.splitlines()[0] == "#!/bin/bash -l"
    # The signal goes to the batch shell, which must by then be the supervisor's process.
    assert script.splitlines()[-1] == "exec python -m thing 'a folder'"
    shared = text(cluster, "cluster.slurm.exclusive=false", "cluster.slurm.requeue=false", "cluster.slurm.mem=")
    assert "exclusive" not in shared
    assert ("no-requeue", None) in options(shared)
    assert "mem" not in dict(options(shared))


def test_a_partitioned_job_is_one_allocation_in_the_partition_of_both(cluster: Path) -> None:
    script = text(cluster, "launch.layout=partitioned")
    assert "hetjob" not in script
    assert (dict(options(script))["partition"], dict(options(script))["nodes"]) == ("all", "3")
    with pytest.raises(UserError, match=r"trainer asks for partition=train and the rollout for partition=rollout; set"):
        text(cluster, "launch.layout=partitioned", "cluster.slurm.allocation.partition=")


def test_a_run_without_engines_is_one_component(cluster: Path) -> None:
    script = text(cluster, recipe="tiny_sft")
    assert "hetjob" not in script
    assert (dict(options(script))["nodes"], dict(options(script))["partition"]) == ("2", "train")


@pytest.mark.parametrize(
    ("overrides", "option"),
    [
        (("cluster.slurm.gpus=gpus-per-node",), ("gpus-per-node", "2")),
        (("cluster.slurm.gpus=gres",), ("gres", "gpu:2")),
        (("cluster.slurm.gpus=gres", "cluster.slurm.gpu_type=a100"), ("gres", "gpu:a100:2")),
        (("cluster.slurm.gpus=none",), None),
    ],
)
def test_how_gpus_are_asked_for_is_the_site_s_choice(
    cluster: Path, overrides: tuple[str, ...], option: tuple[str, str] | None
) -> None:
    asked = [item for item in options(text(cluster, "cluster.node.gpus=2", *overrides)) if item[0].startswith("g")]
    assert asked == ([option] * 2 if option else [])


def test_setup_comes_before_the_environment_and_values_are_quoted(cluster: Path) -> None:
    script = text(cluster, "cluster.setup=['module load x', '. venv']", 'cluster.environment={A: "it\'s $HOME"}')
    body = script.split("\n\n", 1)[1].splitlines()
    assert body[:3] == ["module load x", ". venv", "export A='it'\"'\"'s $HOME'"]


@pytest.mark.parametrize(
    "override",
    [
        'cluster.setup=["a\\nb"]',
        'cluster.slurm.account="a\\n#SBATCH --wrap=x"',
        "cluster.slurm.extra=[licenses]",
        "cluster.environment={'A B': x}",
        "cluster.slurm.export=['A,B']",
    ],
)
def test_a_value_cannot_become_another_line_or_option(cluster: Path, override: str) -> None:
    with pytest.raises(UserError):
        text(cluster, override)


def test_a_percent_sign_in_a_path_is_not_slurm_s() -> None:
    config = compose("h200", "qwen3_4b_grpo")
    script = sbatch_text(config, make_plan(config), run_dir=Path("/r/50%j"), command=["x"])
    assert dict(options(script))["output"] == "/r/50%%j/submitit/%j_0_log.out"
