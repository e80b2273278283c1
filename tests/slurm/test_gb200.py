"""GB200 submissions against Slurm 24.11 with topology/block: a scheduler that knows racks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden import CASES, golden
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import Clusters
from tests.slurm.shape import Nodes, Shape
from tests.slurm.test_golden import processors
from vime.config.compose import compose
from vime.errors import UserError
from vime.plan.plan import make_plan
from vime.slurm.script import sbatch_text

pytestmark = pytest.mark.slow

# Two racks of eight trays: the published sizes fit, and a rack is small enough to overflow.
RACKS = Shape(
    (
        Nodes("batch", 8, cpus=144, gpus=4, block="rack0", prefix="a"),
        Nodes("batch", 8, cpus=144, gpus=4, block="rack1", prefix="b"),
    ),
    block_size=8,
)
SMALL_RACK = "cluster.node.nvlink_domain=32"
HETJOB = "launch.layout=hetjob"


@pytest.fixture
def racks(new_slurm_clusters: Clusters) -> SlurmCluster:
    return new_slurm_clusters(RACKS)


Asked = Callable[[str], str]


@pytest.fixture
def test_only(racks: SlurmCluster) -> Asked:
    """What Slurm says to a script, without running it: its answer, or its refusal."""

    def ask(text: str) -> str:
        (racks.folder / "job.sbatch").write_text(text)
        return racks.run("sbatch", "--test-only", str(racks.seen / "job.sbatch"), check=False).stderr

    return ask


def text(recipe: str, *overrides: str) -> str:
    config = compose("gb200", recipe, overrides)
    return sbatch_text(config, make_plan(config), run_dir=Path("/tmp/x"), command=["true"])


@pytest.mark.parametrize("case", [case for case in CASES if case[0] == "gb200"], ids="-".join)
def test_a_submission_is_accepted(test_only: Asked, case: tuple[str, str, str]) -> None:
    script = golden(*case).read_text()
    answer = test_only(script)
    assert f"using {processors(script)} processors" in answer, answer


def test_a_segment_that_cannot_fit_is_refused_by_slurm_and_by_the_planner_first(test_only: Asked) -> None:
    right = text("glm45_air_grpo", SMALL_RACK, HETJOB)
    assert "--segment=4" in right
    assert "to start at" in test_only(right)
    wrong = right.replace("--segment=4", "--segment=3")
    assert "to start at" not in test_only(wrong)
    with pytest.raises(UserError, match="segments of 3 nodes do not divide its 4 nodes"):
        text("glm45_air_grpo", SMALL_RACK, HETJOB, "cluster.slurm.trainer.segment=3")


def test_more_nodes_than_a_rack_are_divided_into_segments_that_slurm_can_place(test_only: Asked) -> None:
    # 12 trays do not fit a rack of 8: three times four do, also where a tray of a rack is down.
    script = text("qwen3_4b_grpo", SMALL_RACK, "training.ranks=32", "rollout.engines=8")
    assert ("--nodes=12" in script, "--segment=4" in script, "hetjob" in script) == (True, True, False)
    assert "to start at" in test_only(script)


def test_the_components_of_a_job_are_each_in_one_rack(racks: SlurmCluster) -> None:
    script = text("glm45_air_grpo", SMALL_RACK, HETJOB, "training.ranks=32", "rollout.engines=8")
    script = script[: script.index("\n\n")] + "\n\nscontrol show hostnames $SLURM_JOB_NODELIST_HET_GROUP_0 > $0.t\n"
    script += "scontrol show hostnames $SLURM_JOB_NODELIST_HET_GROUP_1 > $0.r\n"
    out = racks.seen / "job"
    script = script.replace("$0", str(out)).replace("HOME,", "HOME,SLURM_CONF,")
    lines = [line for line in script.splitlines() if "--chdir" not in line and "--output" not in line]
    (racks.folder / "job.sbatch").write_text("\n".join(lines) + "\n")
    racks.run("sbatch", "--wait", "--output=/dev/null", str(racks.seen / "job.sbatch"), timeout=120)
    for part, count in (("t", 8), ("r", 4)):
        hosts = Path(f"{racks.folder}/job.{part}").read_text().split()
        assert (len(hosts), len({host[0] for host in hosts})) == (count, 1), hosts
