"""The cluster that the other tests use: it is a real one, and it leaves nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster
from tests.slurm.shape import Nodes, Shape

pytestmark = pytest.mark.slow


def test_a_heterogeneous_job_runs(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH -p train -N 2 -n 2\n#SBATCH hetjob\n#SBATCH -p rollout -N 1 -n 1\n"
        "srun --het-group=0,1 --mpi=none bash -c 'echo $SLURMD_NODENAME'\n"
    )
    slurm.run("sbatch", "--wait", f"--output={tmp_path}/out", str(script))
    assert sorted((tmp_path / "out").read_text().split()) == ["rollout0", "train0", "train1"]


def test_gpus_are_there_to_be_asked_for_and_nothing_is_left(slurm_clusters: object) -> None:
    cluster = SlurmCluster(Shape((Nodes("gpu", 2, cpus=16, gpus=4),)))
    try:
        assert "gpu:4" in cluster.run("sinfo", "-h", "-o", "%G").stdout
        asked = ("sbatch", "--test-only", "-N2", "--gpus-per-node=4", "--wrap=true")
        assert "to start at" in cluster.run(*asked).stderr
        assert cluster.run("sbatch", "--test-only", "-N1", "--gpus-per-node=5", "--wrap=true", check=False).returncode
        assert len(cluster.leftovers()) >= 4
    finally:
        cluster.close()
    assert cluster.leftovers() == []
    assert not cluster.folder.exists()


def test_one_cluster_a_shape(slurm_clusters: Callable[[Shape], SlurmCluster]) -> None:
    shape = Shape((Nodes("one", 1),))
    assert slurm_clusters(shape) is slurm_clusters(Shape((Nodes("one", 1),)))
