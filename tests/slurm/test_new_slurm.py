"""What the other tests show of Slurm 22.05 holds on 24.11 too: both are in use. The same tests, a layout each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.slurm import test_requeue, test_run
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import Clusters
from tests.slurm.job import SlurmRun
from tests.slurm.shape import Nodes, Shape

pytestmark = pytest.mark.slow

Start = Callable[..., SlurmRun]
ONE_BLOCK = Shape((Nodes("train", 2, block="rack"), Nodes("rollout", 1, block="rack")), block_size=3)


@pytest.fixture
def slurm(new_slurm_clusters: Clusters) -> Iterator[SlurmCluster]:
    cluster = new_slurm_clusters(ONE_BLOCK)
    yield cluster
    cluster.cancel_all()


def test_it_is_the_other_slurm(slurm: SlurmCluster) -> None:
    assert slurm.run("scontrol", "--version").stdout.startswith("slurm-wlm 24.11")


@pytest.mark.parametrize("layout", ["hetjob", "partitioned"])
def test_a_run_completes_in_both_layouts(start: Start, slurm: SlurmCluster, layout: str) -> None:
    test_run.test_a_run_completes_in_both_layouts(start, slurm, layout)


def test_what_ends_early_is_named_or_cancelled_and_leaves_nothing(start: Start, slurm: SlurmCluster) -> None:
    test_run.test_a_killed_rank_is_named_with_its_node_within_seconds(start, "trainer-1", "train1")
    test_run.test_a_killed_supervisor_leaves_nothing_on_any_node(start)
    test_run.test_scancel_means_cancelled_and_leaves_nothing(start, slurm)


def test_what_is_interrupted_goes_on(start: Start, slurm: SlurmCluster) -> None:
    test_requeue.test_usr2_saves_and_requeues_and_attempt_2_completes(start, slurm, "hetjob")
    test_requeue.test_a_job_that_is_requeued_from_outside_goes_on(start, slurm)
