"""A sweep on this machine: one run after the other, and none of them twice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vime.errors import UserError
from vime.launch.sweep.__main__ import main
from vime.launch.sweep.array import prepare_task
from vime.launch.sweep.file import read_sweep
from vime.launch.sweep.submit import submit_sweep
from vime.run.directory import RunDir, Status

SWEEP = "grid: {run.seed: [1, 2]}\nset: {training.steps: 2, rollout.prompts_per_step: 8, data.size: 500}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "seeds.yaml"
    path.write_text(SWEEP)
    return path


@pytest.mark.slow
def test_runs_follow_each_other_and_completed_ones_are_left(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = read_sweep(file, "local", "tiny_sft", [f"run.root={tmp_path}/runs", "training.ranks=1"])
    assert submit_sweep(sweep, None, wait=None) == 0
    runs = [RunDir(path) for path in sorted((tmp_path / "runs" / "seeds").iterdir())]
    assert [run.read_status().state for run in runs] == ["completed", "completed"]
    started = [run.read_status().started for run in runs]
    assert submit_sweep(sweep, None, wait=None) == 0
    assert [run.read_status().started for run in runs] == started
    assert capfd.readouterr().out.splitlines()[-1] == f"{tmp_path}/runs/seeds"


def test_a_wrong_combination_is_named_before_any_is_started(file: Path, tmp_path: Path) -> None:
    file.write_text("grid: {training.ranks: [2, 3]}\n")
    sweep = read_sweep(file, "local", "tiny_sft", [f"run.root={tmp_path}/runs"])
    with pytest.raises(UserError, match=r"combination 1 of seeds: .*128 samples do not divide over the 3"):
        submit_sweep(sweep, None, wait=None)
    assert not (tmp_path / "runs").exists()


def test_a_local_sweep_cannot_be_left_alone(file: Path, tmp_path: Path) -> None:
    sweep = read_sweep(file, "local", "tiny_sft", [f"run.root={tmp_path}/runs"])
    with pytest.raises(UserError, match="leave --no-wait out"):
        submit_sweep(sweep, None, wait=False)


def test_the_array_s_command_asks_for_the_largest_combination(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("grid: {training.ranks: [2, 4]}\nparallel: 2\n")
    assert main([str(file), "cluster=minislurm", "recipe=tiny_grpo"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"sbatch --array=0-1%2 ", command)
    assert "--nodes=5 " in command
    assert "--signal=B:USR2@60" in command
    assert command.endswith(f"sbatch/sweep.sbatch {file} cluster=minislurm recipe=tiny_grpo")


def test_a_task_that_does_not_fit_its_allocation_says_so(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = read_sweep(file, "minislurm", "tiny_grpo", [f"run.root={tmp_path}/runs"])
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    needs = "combination 1 needs an allocation of 3 nodes, this one has 2"
    with pytest.raises(UserError, match=f"{needs}; use: sbatch --array=0-1 .* --nodes=3 .* sbatch/sweep.sbatch x.yaml"):
        prepare_task(sweep, 1, job, ["x.yaml"])
    # Not the array's first task, which does something about it; and numbers that make no --array=FIRST-LAST:STEP.
    array = {"ARRAY_JOB_ID": "6", "ARRAY_TASK_MIN": "0", "ARRAY_TASK_MAX": "1", "ARRAY_TASK_COUNT": "2"}
    job |= {f"SLURM_{name}": value for name, value in array.items()}
    assert prepare_task(sweep, 1, job) is None
    assert f"{needs}; task 0 of this array submits it again" in capsys.readouterr().err
    with pytest.raises(UserError, match=f"{needs}; use: sbatch --array=0-1 "):
        prepare_task(sweep, 1, job | {"SLURM_ARRAY_TASK_COUNT": "5"})
    # The first task's combination is completed: it submits the array again for the others all the same.
    done = RunDir(tmp_path / "runs" / sweep.name / sweep.combinations[0].name)
    done.path.mkdir(parents=True)
    done.write_status(Status(state="completed"))
    with pytest.raises(UserError, match=r"combination 0 needs an allocation of 3 nodes, this one has 2; use: sbatch"):
        prepare_task(sweep, 0, job | {"SLURM_ARRAY_TASK_COUNT": "5"})
    assert not list(tmp_path.glob("runs/*/*/submission.sbatch"))
    with pytest.raises(UserError, match="task 2: the sweep has 2 combinations; use --array=0-1"):
        prepare_task(sweep, 2, job)


def test_a_task_that_slurm_starts_again_goes_on_with_its_run(file: Path, tmp_path: Path) -> None:
    sweep = read_sweep(file, "minislurm", "tiny_grpo", [f"run.root={tmp_path}/runs"])
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
    with pytest.raises(UserError, match="combination 1 needs an allocation with the options of its plan; use: sbatch"):
        prepare_task(sweep, 1, job)
    job |= {"SLURM_NTASKS_PER_NODE": "1"}
    script = prepare_task(sweep, 1, job)
    assert script is not None
    assert script.read_text().splitlines()[-1].endswith(f"-m submitit.core._submit {script.parent}/submitit")
    assert (script.parent / "submitit" / "7_submitted.pkl").is_file()
    assert prepare_task(sweep, 1, job) == script
    # Another job leaves it alone: it may be running.
    assert prepare_task(sweep, 1, {**job, "SLURM_JOB_ID": "8"}) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "the sweep's file is missing"),
        (("--task", "x"), "--task needs a whole number"),
        (("a.yaml", "b.yaml"), "'b.yaml' is not dotted.key=value"),
        (("--tsk",), "unknown option --tsk"),
        (("missing.yaml",), "cannot read missing.yaml"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
