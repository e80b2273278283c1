"""What routing replay does for the agreement of engine and trainer: the same run with replay off and on.

Both are whole runs, as `launch.py` starts them, of a mixture of 32 experts: vLLM computes in bfloat16 and Megatron in
float32, so that routing really differs. They have the same seeds, prompts and initial weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.row import Row

REPOSITORY = Path(__file__).parents[1]
DIFFERENCE = "train/train_rollout_logprob_abs_diff"
TIMEOUT = 900.0
MODEL = (
    "model.warmup=null", "model.tiny.layers=4", "model.tiny.experts=32", "model.tiny.top_k=4",
    "model.tiny.expert_ffn=96", "model.tiny.initializer_range=0.08",
)  # fmt: skip
RUN = (
    "rollout.dtype=bfloat16", "rollout.max_response_tokens=24", "rollout.prompts_per_step=16",
    "data.reward=benchmarks.replay_reward:score", "evaluation.prompts=0", "training.warmup_steps=0",
    # The probe after an update is scored with free routing on both sides.
    "weights.tolerance=0.5",
)  # fmt: skip


# At 5e-5 the policy stops sampling within 20 steps, and of sure tokens both sides have the same logprob, 0.
def measure(steps: int = 20, learning_rate: float = 1e-5) -> dict[str, Any]:
    """Of each run: the logprob difference of every step, its mean, rewards, coverage, and the step times."""
    with tempfile.TemporaryDirectory(prefix="vime-bench-") as name:
        runs = {
            label: _run(Path(name), on, steps, learning_rate) for label, on in (("free", "false"), ("replay", "true"))
        }
    return runs | {
        "sizes": {"steps": steps, "learning_rate": learning_rate},
        "ratio": runs["replay"]["difference"] / runs["free"]["difference"],
    }


def rows(measured: dict[str, Any]) -> list[Row]:
    """The two means and their ratio."""
    steps = measured["sizes"]["steps"]
    free, replay = measured["free"], measured["replay"]
    return [
        Row(
            f"mean |trainer - engine| logprob over {steps} steps, engine bfloat16, trainer float32",
            f"{replay['difference']:.5f} replayed, coverage {replay['coverage']:.0%}",
            f"{free['difference']:.5f} free",
            measured["ratio"],
            at_most=0.4,
        )
    ]


def _run(root: Path, on: str, steps: int, learning_rate: float) -> dict[str, Any]:
    arguments = (
        f"run.root={root / 'runs'}", *MODEL, *RUN, f"algorithm.routing_replay={on}", f"training.steps={steps}",
        f"training.learning_rate={learning_rate}",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "launch.py", "cluster=local", "recipe=tiny_moe_grpo", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "VIME_CACHE": str(root / "cache"), "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the run ended with {done.returncode}:\n{done.stdout[-3000:]}")
    lines = [
        json.loads(line) for line in (Path(done.stdout.splitlines()[-1]) / "metrics.jsonl").read_text().splitlines()
    ]
    return {
        "difference": mean(line[DIFFERENCE] for line in lines),
        "differences": [round(line[DIFFERENCE], 6) for line in lines],
        "rewards": [round(line["rollout/raw_reward"], 4) for line in lines],
        "coverage": min(line.get("train/routing_replay_coverage", 0.0) for line in lines),
        "train_seconds": mean(line["perf/actor_train_time"] for line in lines[1:]),
    }
