"""Runs of small scripts on a real Slurm: the two layouts, and every way to end."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster
from tests.slurm.job import FINISHING, SERVING, SlurmRun
from vime.plan.plan import Plan

pytestmark = pytest.mark.slow
Start = Callable[..., SlurmRun]


@pytest.mark.parametrize("layout", ["hetjob", "partitioned"])
def test_a_run_completes_in_both_layouts(start: Start, slurm: SlurmCluster, layout: str) -> None:
    run = start(FINISHING, overrides=[f"launch.layout={layout}"])
    run.wait_started()
    rows = slurm.run("squeue", "-h", "-o", "%i %N").stdout.split("\n")
    listed = dict(row.split() for row in rows if row)
    script = slurm.run("scontrol", "write", "batch_script", run.job_id, "-").stdout
    seen = run.seen()
    assert run.end(timeout=90) == 0, run.log() + run.supervisor_log()
    status = run.status()
    assert (status.state, status.attempt, status.failure) == ("completed", 1, None)
    run.check_nothing_left()
    # Slurm, the plan and the run agree about the components.
    plan = Plan.model_validate_json(run.run.plan.read_bytes())
    assert plan.layout == layout
    if layout == "hetjob":
        assert listed == {f"{run.job_id}+0": "train[0-1]", f"{run.job_id}+1": "rollout0"}
    else:
        assert len(listed) == 1
    [begun] = [event for event in events(run) if event["event"] == "run_started"]
    assert {name: len(hosts) for name, hosts in begun["hosts"].items()} == {"trainer": 2, "rollout": 1}
    placed = {name: role["environ"]["VIME_NODE"] for name, role in seen.items()}
    assert [placed["trainer-0"], placed["trainer-1"]] == begun["hosts"]["trainer"]
    assert {placed[name] for name in ("engine-0", "router-0", "generator-0")} == set(begun["hosts"]["rollout"])
    # What was submitted is what lies in the run directory; scontrol leaves empty lines out.
    assert lines(script) == lines(run.run.submission.read_text())
    # A role does not know that Slurm started it.
    environ = seen["trainer-1"]["environ"]
    assert (environ["VIME_RANK"], environ["VIME_WORLD_SIZE"], environ["VIME_HOST"]) == ("1", "2", "127.0.0.1")
    assert not [name for name in environ if name.startswith(("SLURM", "VIME_LIFELINE", "SUBMITIT"))]
    token = environ["VIME_RUN_TOKEN"].encode()
    for file in run.run.path.rglob("*"):
        assert not file.is_file() or file.parent.name == "seen" or token not in file.read_bytes(), file


@pytest.mark.parametrize(("victim", "node"), [("trainer-1", "train1"), ("router-0", "rollout0")])
def test_a_killed_rank_is_named_with_its_node_within_seconds(start: Start, victim: str, node: str) -> None:
    run = start(SERVING)
    run.wait_started()
    began = time.monotonic()
    run.kill(victim)
    status = run.wait_state("failed", timeout=20)
    print(f"{victim}: {time.monotonic() - began:.1f} s")
    failure = status.failure
    assert failure is not None
    assert (f"{failure.role}-{failure.rank}", failure.node) == (victim, node)
    assert (failure.signal, failure.exit_code) == ("SIGKILL", None)
    assert failure.tail == [f"{victim} serves"]
    recorded = next(event["time"] for event in events(run) if event["event"] == "failure")
    assert run.end(60) == 1
    run.check_nothing_left()
    learnt = next(line for line in run.supervisor_log().splitlines() if f"{victim} on {node} ended" in line)
    assert abs(seconds(recorded) - seconds(learnt.split()[0])) < 5


def test_a_rank_whose_wrapper_is_killed_is_named_too(start: Start) -> None:
    run = start({**SERVING, "trainer": ["daemon"]})
    run.wait_started("trainer-0-daemon", "trainer-1-daemon")
    status = Path(f"/proc/{run.seen()['trainer-1']['pid']}/status").read_text()
    os.kill(int(re.findall(r"PPid:\s*(\d+)", status)[0]), signal.SIGKILL)
    failure = run.wait_state("failed", timeout=20).failure
    assert failure is not None
    assert (failure.role, failure.rank, failure.node, failure.signal) == ("trainer", 1, "train1", "SIGKILL")
    assert run.end(60) == 1


def test_an_engine_that_ends_is_named_with_its_exit_code_and_log(start: Start) -> None:
    run = start({**SERVING, "engine": ["pipe", "1", "42"]})
    assert run.end(90) == 1, run.log()
    failure = run.status().failure
    assert failure is not None
    assert (failure.role, failure.rank, failure.node, failure.exit_code) == ("engine", 0, "rollout0", 42)
    assert failure.tail == ["broken engine"]
    run.check_nothing_left()


def test_a_killed_supervisor_leaves_nothing_on_any_node(start: Start) -> None:
    run = start({**SERVING, "engine": ["daemon"]})
    run.wait_started("engine-0-daemon", "trainer-1")
    [supervisor] = [pid for pid, line in run.processes().items() if "scripts/supervisor.py" in line]
    os.kill(supervisor, signal.SIGKILL)
    assert run.wait_state("failed", timeout=20).failure is not None
    assert run.end(60) == 1
    run.check_nothing_left(15)


def test_scancel_means_cancelled_and_leaves_nothing(start: Start, slurm: SlurmCluster) -> None:
    run = start({**SERVING, "engine": ["daemon"]})
    run.wait_started()
    slurm.run("scancel", run.job_id)
    status = run.wait_state("cancelled", "failed", "requeued")
    assert (status.state, status.failure) == ("cancelled", None), run.supervisor_log()
    assert run.end(60) == 1
    run.check_nothing_left(15)


def test_ctrl_c_of_a_launcher_that_waits_cancels_the_job(start: Start, slurm: SlurmCluster) -> None:
    run = start(SERVING, overrides=["launch.layout=partitioned"])
    run.wait_started()
    os.killpg(run.launcher.pid, signal.SIGINT)
    assert run.end(90) == 1
    assert run.status().state == "cancelled"
    assert slurm.jobs() == []
    run.check_nothing_left()


def test_a_submission_from_inside_another_job_is_the_same(start: Start) -> None:
    enclosing = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "9", "SLURM_MEM_PER_CPU": "1", "VIME_RANK": "8"}
    plain = start(FINISHING)
    assert plain.end(90) == 0, plain.log() + plain.supervisor_log()
    nested = start(FINISHING, environ=enclosing)
    assert nested.end(90) == 0, nested.log() + nested.supervisor_log()
    texts = [
        run.run.submission.read_text().replace(str(run.run.path), "RUN").replace(run.run.path.name, "NAME")
        for run in (plain, nested)
    ]
    assert texts[0].replace("run0", "run") == texts[1].replace("run1", "run")


def test_what_sbatch_refuses_is_said_in_a_line_and_leaves_nothing(start: Start) -> None:
    run = start(FINISHING, overrides=["cluster.slurm.trainer.partition=nowhere"])
    assert run.end(30) == 2
    assert re.fullmatch(r"error: sbatch refused the submission: invalid partition specified: nowhere; .*\n", run.log())
    assert not (run.root / "runs").exists() or not list((run.root / "runs").glob("tiny_grpo*"))


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


def events(run: SlurmRun) -> list[dict[str, object]]:
    return [json.loads(line) for line in run.run.events.read_text().splitlines()]


def seconds(stamp: object) -> float:
    clock = re.search(r"T(\d+):(\d+):([\d.]+)Z", str(stamp))
    assert clock is not None
    return float(clock[1]) * 3600 + float(clock[2]) * 60 + float(clock[3])
