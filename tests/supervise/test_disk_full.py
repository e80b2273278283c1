"""The disk of a run fills up: the run ends failed, and status and report say why."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.supervise.job import REPOSITORY, SERVING, Job, config_in
from vime.errors import UserError
from vime.launch.submit import submit
from vime.plan.plan import make_plan
from vime.run.directory import Failure, RunDir, Status
from vime.supervise.guardian import close

FAILURE = Failure("supervisor", 0, "here", 1, None, "2026-11-29T19:43:08.123Z", "log", ["last words"])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))


def report_of(run: RunDir) -> str:
    command = [sys.executable, "-m", "vime.report", str(run.path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_a_run_whose_disk_fills_up_has_failed_and_says_so(disk: Path) -> None:
    job = Job(disk, (("trainer", 0, 1, True, ["fill"]), *SERVING[2:]))
    try:
        assert job.end(timeout=60) == 1
        status = job.status()
        assert (status.state, status.attempt) == ("failed", 1)
        assert status.ended is not None
        assert status.failure is not None
        assert (status.failure.role, status.failure.rank, status.failure.exit_code) == ("trainer", 0, 1)
        said = f"{job.run.path} cannot be written: No space left on device (0 bytes are free there)"
        assert status.failure.tail[-1] == said
        assert said in report_of(job.run)
        assert "Traceback" not in job.log()
        job.check_nothing_left()
    finally:
        job.close()


def test_the_last_status_has_space_of_its_own(disk: Path) -> None:
    run = RunDir.create(disk, "run", "tiny_grpo")
    run.reserve_status()
    run.write_status(Status("running", step=3))
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        run.write_status(Status("running", step=4))
    assert run.read_status() == Status("running", step=3), "what was there is still whole"
    long = replace(FAILURE, tail=["x" * 60_000] * 40)
    run.write_status(Status("failed", step=4, failure=long))
    assert run.read_status().state == "failed"
    assert sorted(path.name for path in run.path.iterdir()) == ["status.json"]


def test_a_launcher_that_cannot_write_says_so_and_ends_in_order(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of an earlier version has no space reserved."""
    run = RunDir.create(disk, "run", "tiny_grpo")
    run.write_status(Status("running", step=3))
    fill(disk)
    status = close(run, FAILURE)
    assert status.state == "failed"
    assert status.failure is not None
    assert status.failure.tail[-1].startswith(f"{run.path} cannot be written: No space left on device")
    assert f"{run.status} cannot be written: No space left on device" in capsys.readouterr().err
    assert "no space is left on the disk" in " ".join(report_of(run).split())


def test_a_submission_to_a_full_disk_is_refused_and_leaves_nothing(disk: Path) -> None:
    fill(disk)
    config = config_in(disk, "run.name=mine")
    with pytest.raises(UserError, match=rf"^{disk}/mine cannot be written: No space left on device$"):
        submit(config, make_plan(config), wait=False)
    assert [path.name for path in disk.iterdir()] == ["filler"]


def test_a_limit_on_the_size_of_files_is_named_too(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "run", "tiny_grpo")
    run.reserve_status()
    run.write_status(Status("running", step=3))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        status = close(run, FAILURE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert status.failure is not None
    assert f"{run.path} cannot be written: File too large" in status.failure.tail[-1]
    assert run.read_status() == status
