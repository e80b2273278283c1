"""What the other tests show of Slurm 22.05 holds on 24.11 too: both are in use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import Clusters
from tests.slurm.shape import Nodes, Shape
from tests.slurm.test_requeue import (  # noqa: F401  # the same tests, by the fixture below on another Slurm
    test_a_job_that_is_requeued_from_outside_goes_on,
    test_usr2_saves_and_requeues_and_attempt_2_completes,
)
from tests.slurm.test_run import (  # noqa: F401
    test_a_killed_rank_is_named_with_its_node_within_seconds,
    test_a_killed_supervisor_leaves_nothing_on_any_node,
    test_a_run_completes_in_both_layouts,
    test_scancel_means_cancelled_and_leaves_nothing,
)

pytestmark = pytest.mark.slow

ONE_BLOCK = Shape((Nodes("train", 2, block="rack"), Nodes("rollout", 1, block="rack")), block_size=3)


@pytest.fixture
def slurm(new_slurm_clusters: Clusters) -> Iterator[SlurmCluster]:
    cluster = new_slurm_clusters(ONE_BLOCK)
    yield cluster
    cluster.cancel_all()


def test_it_is_the_other_slurm(slurm: SlurmCluster) -> None:
    assert slurm.run("scontrol", "--version").stdout.startswith("slurm-wlm 24.11")
