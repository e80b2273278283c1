"""Makes run folders as a run leaves them, through the same writers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from vime.run.directory import Failure, RunDir, Status
from vime.run.role import Role

CONFIG = """\
recipe: tiny_grpo
cluster: {{name: local}}
algorithm: {{name: grpo}}
rollout: {{prompts_per_step: 32, samples_per_prompt: 8, max_response_tokens: 8}}
buffer: {{max_staleness: 0}}
training: {{steps: {steps}, learning_rate: {learning_rate}}}
weights: {{verify: true, tolerance: 1.0e-4}}
run: {{root: runs, name: null, seed: 1234}}
"""

ROLE = Role(
    run_dir=Path(),
    store_host="127.0.0.1",
    store_port=1,
    name="trainer",
    attempt=1,
    token="secret",
    rank=0,
    world_size=2,
    host="127.0.0.1",
    model=Path("model"),
)


def make_run(
    root: Path, name: str = "tiny_grpo-20261129-194308-1a2b", steps: int = 60, learning_rate: str = "5e-4"
) -> RunDir:
    """A run that is pending: configuration and status only."""
    run = RunDir.create(root, name, "tiny_grpo")
    run.config.write_text(CONFIG.format(steps=steps, learning_rate=learning_rate))
    run.write_status(Status(state="pending"))
    return run


def role(name: str, rank: int = 0, attempt: int = 1) -> Role:
    """A process of the run."""
    return replace(ROLE, name=name, rank=rank, attempt=attempt)


def metrics(step: int, attempt: int = 1, /, **other: Any) -> dict[str, Any]:
    """One step's line: 4 s, of which the trainer waits 2.4 s, computes 1.5 s and 0.1 s go elsewhere."""
    return {
        "step": step,
        "version": step,
        "attempt": attempt,
        "time": f"2026-11-29T19:{43 + step // 60 % 10:02d}:{step % 60:02d}.000Z",
        "rollout/raw_reward": 0.85 - 0.65 * math.exp(-step / 20),
        "rollout/response_len/mean": 3.9,
        "rollout/truncated_ratio": 0.01,
        "rollout/zero_std_ratio": 0.3,
        "rollout/dropped_samples": 0,
        "rollout/staleness/max": 0,
        "train/loss": -0.01 / step,
        "train/grad_norm": 0.5,
        "train/train_rollout_logprob_abs_diff": 2e-7 + step * 1e-9,
        "perf/step_time": 4.0,
        "perf/rollout_time": 2.2,
        "perf/log_probs_time": 0.5,
        "perf/actor_train_time": 0.75,
        "perf/update_weights_time": 0.25,
        "perf/wait_time_ratio": 0.6,
        "perf/rollout_tok_per_s": 1800.0,
        "perf/actor_train_tok_per_s": 5200.0,
        "perf/tokens_per_gpu_per_sec": 495.0,
    } | other


def train(run: RunDir, first: int, last: int, attempt: int = 1) -> None:
    """What trainer and generator write over these steps."""
    if first == 1:
        evaluate(run, 0, attempt)
        update(run, 0, attempt)
    for step in range(first, last + 1):
        run.append_metrics(metrics(step, attempt))
        update(run, step, attempt)
        if step % 20 == 0:
            evaluate(run, step, attempt)


def evaluate(run: RunDir, version: int, attempt: int = 1) -> None:
    """A held-out evaluation: accuracy rises by 0.01 a version from 0.2."""
    accuracy = round(0.2 + 0.01 * version, 4)
    run.append_event(
        role("generator", attempt=attempt),
        "evaluation",
        version=version,
        dataset="chain_sum",
        accuracy=accuracy,
        samples=128,
    )


def update(run: RunDir, version: int, attempt: int = 1) -> None:
    """A verified weight update."""
    found = {"verified": True, "max_abs_diff": 9e-7, "mean_abs_diff": 3e-7, "engines": 1}
    run.append_event(
        role("trainer", attempt=attempt), "weights_updated", version=version, seconds=0.2, bytes=4_194_304, **found
    )


def start_roles(run: RunDir, attempt: int = 1, ready: bool = True) -> None:
    """Every role starts, and becomes ready."""
    run.append_event(role("supervisor", attempt=attempt), "run_started")
    for name, rank in (("trainer", 0), ("trainer", 1), ("engine", 0), ("router", 0), ("generator", 0)):
        run.append_event(role(name, rank, attempt), "started")
        if ready:
            run.append_event(role(name, rank, attempt), "ready")


def make_completed(root: Path, **options: Any) -> RunDir:
    """60 steps in 4 minutes."""
    run = make_run(root, **options)
    start_roles(run)
    train(run, 1, 60)
    run.append_event(role("trainer"), "exported", step=60, path=str(run.export / "step_60"))
    run.write_status(Status("completed", step=60, started="2026-11-29T19:43:08.123Z", ended="2026-11-29T19:50:20.623Z"))
    return run


def make_failed(root: Path, **options: Any) -> RunDir:
    """An engine dies in step 8."""
    run = make_run(root, **options)
    start_roles(run)
    train(run, 1, 7)
    log = run.log("engine", 0, 1)
    log.parent.mkdir(parents=True)
    (run.logs / "latest").symlink_to("attempt_1")
    tail = [
        "INFO 11-29 19:44:02 [loggers.py:257] Engine 000: Avg generation throughput: 1802.3 tokens/s, Running: 64 reqs",
        "\x1b[31mERROR\x1b[0m [core.py:991] EngineCore encountered a fatal error.",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:118] can't allocate memory: you tried to allocate 1073741824 B",
    ]
    log.write_text("\n".join(tail) + "\n")
    failure = Failure("engine", 0, "node03", None, "SIGKILL", "2026-11-29T19:44:10.400Z", str(log), tail)
    run.write_status(Status("failed", 1, 7, "2026-11-29T19:43:08.123Z", "2026-11-29T19:44:13.000Z", failure))
    return run
