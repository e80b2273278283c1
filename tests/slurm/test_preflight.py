"""A node that is not fit, on a real Slurm: named, and avoided when the job is requeued."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster, missing
from tests.slurm.job import FINISHING, SlurmRun
from tests.slurm.shape import Nodes, Shape

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Three trainer nodes, on the second of which a task is told of a network interface that is not there."""
    reason = missing()
    if reason:
        pytest.skip(f"not run on a real Slurm: {reason}")
    prolog = tmp_path_factory.mktemp("prolog") / "prolog.sh"
    prolog.write_text('#!/bin/sh\n[ "$SLURMD_NODENAME" = train1 ] && echo export VIME_INTERFACE=nope0\nexit 0\n')
    prolog.chmod(0o755)
    prolog.parent.chmod(0o755)
    cluster = SlurmCluster(Shape((Nodes("train", 3), Nodes("rollout", 1)), extra=(f"TaskProlog={prolog}",)))
    yield cluster
    cluster.close()


def _events(run: SlurmRun, name: str) -> list[dict[str, object]]:
    events = [json.loads(line) for line in run.run.events.read_text().splitlines()]
    return [event for event in events if event["event"] == name]


def test_a_bad_node_is_named_and_the_requeued_job_avoids_it(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = SlurmRun(cluster, tmp_path, FINISHING)
    try:
        assert run.end(150) == 0, run.log() + run.supervisor_log()
        [refused] = _events(run, "nodes_refused")
        assert refused["nodes"] == ["train1"]
        assert "preflight: train1: ports: cluster.interface=nope0 has no IPv4 address" in run.supervisor_log()
        [begun] = _events(run, "run_started")
        assert begun["hosts"] == {"trainer": ["train0", "train2"], "rollout": ["rollout0"]}
        # No role had started before, so this is still the first attempt.
        assert (run.status().state, run.status().attempt) == ("completed", 1)
        assert cluster.job(run.job_id)["ExcNodeList"] == "train1"
    finally:
        run.close()


def test_without_requeue_a_bad_node_is_the_failure(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = SlurmRun(cluster, tmp_path, FINISHING, overrides=["cluster.slurm.requeue=false"])
    try:
        assert run.end(90) == 1, run.log() + run.supervisor_log()
        failure = run.status().failure
        assert failure is not None
        assert (failure.role, failure.node) == ("preflight", "train1")
        assert failure.tail[0].startswith("train1: ports: cluster.interface=nope0")
    finally:
        run.close()


def test_checks_can_be_switched_off(cluster: SlurmCluster, tmp_path: Path) -> None:
    overrides = ["cluster.preflight.checks=[]", "cluster.slurm.trainer.nodelist=train0,train2"]
    run = SlurmRun(cluster, tmp_path, FINISHING, overrides=overrides)
    try:
        assert run.end(90) == 0, run.log() + run.supervisor_log()
        assert not (run.run.logs / "attempt_1" / "preflight").exists()
    finally:
        run.close()
