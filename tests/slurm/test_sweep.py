"""Sweeps on a real Slurm: as a job array, and as jobs in lanes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster
from vime.config.compose import ROOT
from vime.report.compare import compare
from vime.run.directory import RunDir

pytestmark = pytest.mark.slow

# Supervised: the trainer's two nodes, and no engine to wait for.
SWEEP = """
cluster: minislurm
recipe: tiny_sft
grid: {training.learning_rate: [1e-4, 3e-3]}
zip: {run.seed: [1, 2], training.steps: [2, 3]}
set: {rollout.prompts_per_step: 8, data.size: 500}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lr.yaml"
    path.write_text(SWEEP)
    return path


def launch(slurm: SlurmCluster, *arguments: str, module: tuple[str, ...] = ("launch.py",)) -> str:
    done = subprocess.run(
        [sys.executable, *module, *arguments],
        cwd=ROOT,
        env=slurm.environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def until(true: Callable[[], bool], timeout: float, what: str) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.5)


def until_idle(slurm: SlurmCluster, timeout: float = 600) -> None:
    until(lambda: not slurm.jobs(), timeout, "an empty queue")


def check_completed(folder: Path) -> None:
    runs = [RunDir(path) for path in sorted(folder.iterdir())]
    assert [(run.read_status().state, run.read_status().attempt) for run in runs] == [("completed", 1)] * 4, [
        run.read_status() for run in runs
    ]
    assert sorted(run.read_status().step for run in runs) == [2, 2, 3, 3]
    comparison = compare(folder)
    # Those of the array are partitioned jobs, the others are not.
    assert set(comparison.varied) == {"training.learning_rate", "run.seed", "training.steps", "launch.layout"}
    rows = {tuple(row.settings[key] for key in ("training.learning_rate", "run.seed")) for row in comparison.runs}
    assert rows == {(1e-4, 1), (1e-4, 2), (3e-3, 1), (3e-3, 2)}


def test_an_array_and_lanes_complete_a_sweep_and_leave_what_is_done(
    slurm: SlurmCluster, file: Path, tmp_path: Path
) -> None:
    root = f"run.root={tmp_path}/runs"
    folder = tmp_path / "runs" / "lr"
    script = (str(ROOT / "sbatch" / "sweep.sbatch"), str(file), root)

    def submit_array(tasks: str) -> str:
        """As a person types it; what the tasks said."""
        here = ("env", f"VIME_VENV={sys.prefix}", "sbatch", f"--output={tmp_path}/%A_%a.log", f"--chdir={ROOT}")
        slurm.run(*here, f"--array={tasks}", *script)
        until_idle(slurm)
        return "\n".join(path.read_text() for path in tmp_path.glob("*.log"))

    # One node a task, if nothing else is said: the first task submits the array again with the two that it needs.
    logs = submit_array("0-1%2")
    assert [RunDir(path).read_status().state for path in folder.iterdir()] == ["completed"] * 2, logs
    told = "combination 0 needs an allocation of 2 nodes, this one has 1; submitted again as job "
    [command] = re.findall(rf"{told}\d+: (sbatch --array=0-1%2 .*--nodes=2 .*)", logs)
    shown = launch(slurm, *script[1:], "sweep.parallel=2", module=("-m", "vime.launch.sweep")).splitlines()[-1]
    assert shown == command.replace("VIME_VENV,", "").replace("0-1%2", "0-3%2")

    arguments = (f"sweep={file}", root, "sweep.parallel=1")
    out = launch(slurm, *arguments)
    assert out.splitlines()[-1] == str(folder)
    [(first, none), (_, after)] = re.findall(r"^job (\d+)  \S+(?:  afterany:(\d+))?$", out, re.MULTILINE)
    assert (none, after) == ("", first)
    until_idle(slurm)
    check_completed(folder)

    assert launch(slurm, *arguments).count("nothing to do") == 4
    assert slurm.jobs() == []
    logs = submit_array("0-3")
    assert logs.count("is completed, or goes on in another job") == 4, logs
    check_completed(folder)


def test_ctrl_c_cancels_what_waits_too_and_the_next_launch_starts_all_anew(
    slurm: SlurmCluster, file: Path, tmp_path: Path
) -> None:
    # Long enough that none has ended when the last one is in the queue, however busy the machine.
    file.write_text(file.read_text().replace("[2, 3]", "[500, 600]"))
    arguments = (f"sweep={file}", f"run.root={tmp_path}/runs", "sweep.parallel=1", "--wait", "training.warmup_steps=1")
    launcher = subprocess.Popen(
        [sys.executable, "launch.py", *arguments], cwd=ROOT, env=slurm.environ, stdout=subprocess.PIPE, text=True
    )
    try:
        until(lambda: len(slurm.jobs()) == 4, 120, "four jobs")
        launcher.send_signal(signal.SIGINT)
        launcher.wait(150)
    finally:
        launcher.kill()
    until_idle(slurm, 60)
    assert launcher.returncode == 1
    runs = [RunDir(path) for path in (tmp_path / "runs" / "lr").iterdir()]
    assert [run.read_status().state for run in runs] == ["cancelled"] * 4
    again = launch(slurm, *arguments[:3], "training.warmup_steps=1", "--dry-run")
    assert len(re.findall(r"cancelled\s+starts", again)) == 4, again
