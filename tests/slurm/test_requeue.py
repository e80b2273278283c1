"""A run that is interrupted goes on as its next attempt, on a real Slurm."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.slurm.cluster import SlurmCluster
from tests.slurm.job import FINISHING, SAVING, SERVING, SlurmRun
from tests.supervise.job import leave_checkpoint, until

pytestmark = pytest.mark.slow
Start = Callable[..., SlurmRun]
AGAIN = 240
"""Seconds until a requeued job runs again and ends: KillWait, the old credential's time, the scheduler's pass."""


@pytest.mark.parametrize("layout", ["hetjob", "partitioned"])
def test_usr2_saves_and_requeues_and_attempt_2_completes(start: Start, slurm: SlurmCluster, layout: str) -> None:
    run = start(SAVING, overrides=[f"launch.layout={layout}"])
    run.wait_started("trainer-0", "trainer-1")
    slurm.run("scancel", "--batch", "--signal=USR2", run.job_id)
    # A second one in the midst of saving, as when Slurm signals each process of the batch step, changes nothing.
    slurm.run("scancel", "--batch", "--signal=USR2", run.job_id)
    requeued = run.wait_state("requeued", "failed", "timeout")
    assert requeued.state == "requeued", run.supervisor_log()
    assert "the trainers saved" in run.supervisor_log()
    assert run.end(AGAIN) == 0, run.log() + run.supervisor_log()
    status = run.status()
    assert (status.state, status.attempt, status.step, status.failure) == ("completed", 2, 3, None)
    assert status.started == requeued.started
    assert slurm.job(run.job_id)["Restarts"] == "1"
    assert (run.run.logs / "attempt_2" / "trainer-1.log").read_text() == "attempt 2 goes on after step 3\n"
    assert (run.run.logs / "latest").resolve().name == "attempt_2"
    begun = [event for event in events(run) if event["event"] == "run_started"]
    assert [(event["attempt"], event["checkpoint"]) for event in begun] == [(1, 0), (2, 3)]
    run.check_nothing_left()


def test_the_warning_before_the_time_limit_reaches_the_run(start: Start, slurm: SlurmCluster) -> None:
    # The last 60 s are for saving, and Slurm may warn a minute earlier still. So the limit is set when the trainers are
    # there, however long that took, and lifted for the second attempt.
    run = start(SAVING, overrides=["launch.time=02:00:00", "cluster.slurm.signal_seconds=60"])
    run.wait_started("trainer-0", "trainer-1")
    slurm.run("scontrol", "update", f"JobId={run.job_id}", "TimeLimit=2")
    assert run.wait_state("requeued", "failed", "timeout", timeout=130).state == "requeued", run.supervisor_log()
    assert "stopped by SIGUSR2" in run.supervisor_log()
    slurm.run("scontrol", "update", f"JobId={run.job_id}", "TimeLimit=120")
    assert run.end(AGAIN) == 0, run.log() + run.supervisor_log()


def test_a_job_that_is_requeued_from_outside_goes_on(start: Start, slurm: SlurmCluster) -> None:
    run = start(SERVING)
    run.wait_started()
    run.write(FINISHING)
    slurm.run("scontrol", "requeue", run.job_id)
    assert run.wait_state("requeued", "cancelled", "failed").state == "requeued", run.supervisor_log()
    assert run.end(AGAIN) == 0, run.log() + run.supervisor_log()
    assert (run.status().state, run.status().attempt) == ("completed", 2)
    assert slurm.job(run.job_id)["Restarts"] == "1"
    run.check_nothing_left()


@pytest.mark.parametrize("node", ["train0", "rollout0"])
def test_a_node_whose_slurmd_is_killed(start: Start, slurm: SlurmCluster, node: str) -> None:
    run = start(SERVING)
    run.wait_started()
    run.write(FINISHING)
    slurm.kill_node(node)
    try:
        run.wait_state("requeued", "failed", "cancelled", timeout=90)
        # Nothing of the attempt is left, not even on the node that Slurm cannot reach.
        until(lambda: not run.processes(), 30, f"no process: {run.processes()}")
        # While the batch step's end is on its way, the controller would take it for the end of the next attempt's.
        until(lambda: not run.batch_step_daemons(), 60, f"the batch step's end: {run.batch_step_daemons()}")
        until(lambda: slurm.job(run.job_id)["Reason"] == "Resources", 60, "a job that waits for its node")
    finally:
        slurm.start_node(node)
    assert run.end(AGAIN) == 0, run.log() + run.supervisor_log()
    assert (run.status().state, run.status().attempt) == ("completed", 2)


def test_a_run_is_resumed_by_hand(start: Start, slurm: SlurmCluster) -> None:
    run = start(SERVING)
    run.wait_started()
    slurm.run("scancel", run.job_id)
    assert run.end(90) == 1
    assert run.status().state == "cancelled"
    run.write(FINISHING)
    first = run.job_id
    leave_checkpoint(run.run, 1)
    assert run.resume() == 0, run.log() + run.supervisor_log()
    assert (run.status().state, run.status().attempt) == ("completed", 2)
    assert run.job_id != first
    assert "resumed" in [event["event"] for event in events(run)]
    assert run.resume() == 2
    assert "is completed: there is nothing to resume" in run.log()


def test_a_run_that_goes_on_is_not_resumed(start: Start) -> None:
    run = start(SERVING, "--no-wait")
    run.wait_started()
    assert run.resume() == 2
    assert "still goes on" in run.log()
    assert run.status().attempt == 1


def test_steps_that_are_not_saved_in_time_are_abandoned_and_a_chain_without_progress_ends_itself(
    start: Start, slurm: SlurmCluster
) -> None:
    run = start({**SAVING, "trainer": ["train", "--never-save"]}, overrides=["cluster.save_timeout=1"])
    for attempt in (1, 2):
        until(lambda attempt=attempt: run.status().attempt == attempt, AGAIN, f"attempt {attempt}")
        until(lambda attempt=attempt: (run.run.logs / f"attempt_{attempt}" / "trainer-1.log").exists(), 60, "trainers")
        slurm.run("scancel", "--batch", "--signal=USR2", run.job_id)
        run.wait_state("requeued")
        assert "the step was abandoned" in (run.run.logs / f"attempt_{attempt}" / "supervisor-0.log").read_text()
    assert run.end(AGAIN) == 1
    status = run.status()
    assert (status.state, status.attempt) == ("failed", 3)
    assert status.failure is not None
    assert "2 attempts in a row made no progress: each began at step 0" in status.failure.tail[0]
    run.check_nothing_left()


def events(run: SlurmRun) -> list[dict[str, object]]:
    return [json.loads(line) for line in run.run.events.read_text().splitlines()]
