"""What is submitted for each cluster, layout and recipe, to be read in review. `python -m tests.golden` writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from vime.config.compose import ROOT, compose
from vime.plan.plan import make_plan
from vime.slurm.script import batch_command, sbatch_text
from vime.supervise.commands import step_lines

FOLDER = Path(__file__).parent
PUBLISHED = ("qwen3_4b_grpo", "qwen3_30b_a3b_grpo", "glm45_air_grpo")
RECIPES = {"a100": PUBLISHED, "h200": PUBLISHED, "gb200": PUBLISHED, "minislurm": ("tiny_grpo",)}
LAYOUTS = ("hetjob", "partitioned")
CASES = [(cluster, layout, recipe) for cluster, recipes in RECIPES.items() for layout in LAYOUTS for recipe in recipes]


def golden(cluster: str, layout: str, recipe: str) -> Path:
    """The file of one case."""
    return FOLDER / f"{cluster}-{layout}-{recipe}.sbatch"


def submission(cluster: str, layout: str, recipe: str) -> str:
    """The text of one case, from a checkout in /opt/vime that keeps its runs in /lustre/runs."""
    config = compose(cluster, recipe, [f"launch.layout={layout}", "cluster.python=python", "run.root=/lustre/runs"])
    run_dir = config.run.root / f"{recipe}-1"
    plan = make_plan(config)
    text = sbatch_text(config, plan, run_dir=run_dir, command=batch_command(config, run_dir))
    steps = "".join(f"# {line}\n" for line in step_lines(config, plan))
    return f"{text}\n{steps}".replace(str(ROOT), "/opt/vime").replace(sys.executable, "python")


def texts() -> Iterator[tuple[Path, str]]:
    """Every file and what it should hold."""
    for case in CASES:
        yield golden(*case), submission(*case)
