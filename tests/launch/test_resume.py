"""`launch.py --resume RUN`: what it refuses, and what an override of a run's own configuration means."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import launch
from vime.config.compose import compose, dump_resolved, load_resolved, override_resolved
from vime.errors import UserError
from vime.launch.holder import LOCK, RESUMING, held
from vime.plan.checks import check_model
from vime.run.directory import Failure, RunDir, Status
from vime.supervise.guardian import close


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume needs the directory of a run"),
        (["--resume", "--wait"], "--resume needs the directory of a run"),
        (["--resume=runs/a", "cluster=local"], "--resume takes cluster from the run"),
        (["--resume", "runs/a", "recipe=tiny_sft"], "--resume takes recipe from the run"),
        (["--resume", "runs/a", "--dry-run"], "it cannot be used with --resume"),
        (["--resume", "nowhere"], "is not a run directory"),
    ],
)
def test_what_is_refused(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_status_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunDir(tmp_path).status.mkdir()
    assert launch.main(["--resume", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"launch.py: {tmp_path}/status.json cannot be read: Is a directory\n"


def test_a_resumption_that_slurm_refuses_leaves_the_run_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text(dump_resolved(compose("minislurm", "tiny_sft")))
    run.plan.write_text("{}")
    run.submission.write_text("#!/bin/sh\n")
    run.write_status(Status("cancelled", attempt=1))  # nothing of it had begun, so no checkpoint is missed
    before = {path: path.read_bytes() for path in (run.config, run.plan, run.submission, run.status)}
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\nprintf 'sbatch: error: no such account\\nsbatch: error: failed\\n' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:/bin:/usr/bin")
    assert launch.main(["--resume", str(run.path), "training.steps=5"]) == 2
    assert capsys.readouterr().err == "launch.py: sbatch refused the submission: no such account; failed\n"
    assert {path: path.read_bytes() for path in before} == before


def test_a_completed_run_and_a_misspelt_override_are_refused_and_nothing_is_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    run.config.write_text(dump_resolved(compose("local", "tiny_sft")))
    run.write_status(Status("completed"))
    assert launch.main(["--resume", str(tmp_path)]) == 2
    assert "is completed: there is nothing to resume" in capsys.readouterr().err
    run.write_status(Status("cancelled", attempt=3))
    assert launch.main(["--resume", str(tmp_path), "training.step=5"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert run.read_status() == Status("cancelled", attempt=3)
    assert not run.plan.exists()


def test_overrides_change_a_runs_configuration_and_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump_resolved(compose("local", "tiny_sft")))
    changed = override_resolved(file, ["training.ranks=4", "training.learning_rate=1e-6"])
    assert (changed.training.ranks, changed.training.learning_rate) == (4, 1e-6)
    assert load_resolved(file).training.ranks == 2
    with pytest.raises(UserError, match="128 samples do not divide over the 3 data-parallel ranks"):
        override_resolved(file, ["training.ranks=3"], check=check_model)


def failed_run(folder: Path) -> RunDir:
    run = RunDir(folder / "run")
    run.path.mkdir()
    run.config.write_text(dump_resolved(compose("local", "tiny_sft")))
    run.write_status(Status("failed", attempt=3))
    return run


def test_two_launchers_do_not_resume_one_run_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = failed_run(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(run.path)
    with held(run):
        before = {path: path.read_bytes() for path in run.path.iterdir()}
        for path in (run.path, link):
            assert launch.main(["--resume", str(path)]) == 2
            assert f"{run.path} is being resumed by another process" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in run.path.iterdir()} == before
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".")] == [LOCK]


def test_where_the_filesystem_knows_no_locks_a_file_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    run = failed_run(tmp_path)
    (run.path / RESUMING).write_text("another-login-node 77")
    assert launch.main(["--resume", str(run.path)]) == 2
    error = capsys.readouterr().err
    assert f"is being resumed by process 77 of another-login-node; remove {run.path / RESUMING} if" in error
    (run.path / RESUMING).write_text(f"{socket.gethostname()} {os.getppid()}")
    with pytest.raises(UserError, match=f"by process {os.getppid()} of"), held(run):
        pass
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    (run.path / RESUMING).write_text(f"{socket.gethostname()} {gone.pid}")
    with held(run):  # its launcher was killed
        assert (run.path / RESUMING).exists()
    assert not (run.path / RESUMING).exists()


def test_who_holds_an_earlier_attempt_does_not_end_the_later_one(tmp_path: Path) -> None:
    run = failed_run(tmp_path)
    run.write_status(Status("running", attempt=4))
    failure = Failure("supervisor", 0, "here", None, "SIGKILL", "", "", [])
    assert close(run, failure, attempt=3) == run.read_status() == Status("running", attempt=4)
    assert close(run, failure, attempt=4).state == run.read_status().state == "failed"
