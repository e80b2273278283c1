"""A run that a more urgent job pushes away comes back, on a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster, missing
from tests.slurm.job import FINISHING, SAVING, SERVING, SlurmRun
from tests.slurm.shape import Nodes, Shape

pytestmark = pytest.mark.slow
PREEMPTING = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    # The signal of --signal comes at the start of the grace time.
    "SlurmctldParameters=preempt_send_user_signal",
)


GRACE_ALONE = (
    *PREEMPTING[:2],
    "KillWait=5",
    # As proctrack/cgroup does: a signal reaches the tasks of a step, and not what they started.
    "ProctrackType=proctrack/pgid",
)


@pytest.fixture(scope="module", params=[PREEMPTING, GRACE_ALONE], ids=["user_signal", "grace_alone"])
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    """The small cluster, whose trainer nodes are also in the partition of urgent jobs."""
    reason = missing()
    if reason:
        pytest.skip(f"not run on a real Slurm: {reason}")
    cluster = SlurmCluster(Shape((Nodes("train", 2), Nodes("rollout", 1)), extra=request.param))
    cluster.run("scontrol", "update", "PartitionName=train", "GraceTime=40")
    cluster.run("scontrol", "update", "PartitionName=all", "GraceTime=40")
    cluster.run("scontrol", "create", "PartitionName=urgent", "Nodes=train[0-1]", "PriorityTier=10", "State=UP")
    yield cluster
    cluster.close()


@pytest.mark.parametrize(
    ("grace", "mode"), [(40, "REQUEUE"), (0, "REQUEUE"), (0, "CANCEL")], ids=["saves", "lost_step", "site_cancels"]
)
def test_a_preempted_run_is_requeued_and_completes(
    cluster: SlurmCluster, tmp_path: Path, grace: int, mode: str
) -> None:
    """Where a site cancels, the run requeues itself. With grace time alone the batch step hears nothing."""
    cluster.run("scontrol", "update", "PartitionName=train", f"GraceTime={grace}", f"PreemptMode={mode}")
    cluster.run("scontrol", "update", "PartitionName=rollout", f"PreemptMode={mode}")
    run = SlurmRun(cluster, tmp_path, SAVING if grace else SERVING)
    try:
        run.wait_started("trainer-0", "trainer-1")
        if not grace:
            run.write(FINISHING)
        cluster.run("sbatch", "-p", "urgent", "-N2", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")
        assert run.wait_state("requeued", "failed", "cancelled").state == "requeued", run.supervisor_log()
        assert ("the trainers saved" in run.supervisor_log()) == bool(grace)
        assert run.end(150) == 0, run.log() + run.supervisor_log()
        assert (run.status().state, run.status().attempt) == ("completed", 2)
    finally:
        run.close()
