"""Every golden submission is accepted by a real Slurm that has the cluster's nodes, and a wrong one is not."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.golden import CASES, golden
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import Clusters
from tests.slurm.shape import SMALL, Nodes, Shape

pytestmark = pytest.mark.slow

SHAPES = {
    "a100": Shape((Nodes("gpu", 10, cpus=128, gpus=8),)),
    "h200": Shape((Nodes("gpu", 6, cpus=112, gpus=8),)),
    "minislurm": SMALL,
}


@pytest.mark.parametrize("case", [case for case in CASES if case[0] in SHAPES], ids="-".join)
def test_a_submission_is_accepted(slurm_clusters: Clusters, case: tuple[str, str, str]) -> None:
    done = slurm_clusters(SHAPES[case[0]]).run("sbatch", "--test-only", str(golden(*case)))
    # All components together, in one line.
    assert f"using {processors(golden(*case).read_text())} processors" in done.stderr, done.stderr


def processors(script: str) -> int:
    """CPUs that a submission asks for, over its components."""
    values = [
        [int(value) for value in re.findall(rf"#SBATCH --{option}=(\d+)", script)]
        for option in ("nodes", "ntasks-per-node", "cpus-per-task")
    ]
    return sum(math.prod(component) for component in zip(*values, strict=True))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("--nodes=8", "--nodes=11"), ("--gres=gpu:8", "--gres=gpu:9"), ("--partition=gpu", "--partition=cpu")],
)
def test_a_wrong_one_is_not(slurm_clusters: Clusters, tmp_path: Path, right: str, wrong: str) -> None:
    text = golden("a100", "hetjob", "glm45_air_grpo").read_text()
    assert right in text
    (tmp_path / "job.sbatch").write_text(text.replace(right, wrong))
    command = ("sbatch", "--test-only", str(tmp_path / "job.sbatch"))
    assert slurm_clusters(SHAPES["a100"]).run(*command, check=False).returncode != 0


def test_what_is_written_once_holds_for_every_component(slurm: SlurmCluster) -> None:
    script = golden("minislurm", "hetjob", "tiny_grpo")
    leader = slurm.run("sbatch", "--parsable", "--hold", "--chdir=/tmp", str(script)).stdout.strip()
    jobs = [slurm.job(f"{leader}+{component}") for component in range(2)]
    assert [(job["Partition"], job["NumNodes"].split("-")[0]) for job in jobs] == [("train", "2"), ("rollout", "1")]
    for job in jobs:
        assert (job["TimeLimit"], job["Requeue"], job["MinMemoryNode"]) == ("02:00:00", "1", "0")
        assert job["OverSubscribe"] == "NO"
        assert job["Comment"] == "/lustre/runs/tiny_grpo-1"
