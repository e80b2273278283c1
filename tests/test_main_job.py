"""The main job as its user starts it, every part real: what a run promises, and what stops or survives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors import safe_open

from tests.pages import printed_file
from tests.supervise.job import check_killed_real_run
from vime.run.directory import RunDir

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]
# A small untrained model and few, short steps: what these runs show does not depend on what the policy has learnt.
BRIEF = ("model.warmup=null", "evaluation.prompts=0", "rollout.prompts_per_step=4", "training.warmup_steps=0")


@dataclass
class Outcome:
    """A run that has ended."""

    code: int
    output: str
    run: RunDir

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Its metrics, a step each."""
        return [json.loads(line) for line in self.run.metrics.read_text().splitlines()]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Its events of one name."""
        return [event for event in map(json.loads, self.run.events.read_text().splitlines()) if event["event"] == name]


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """Whatever a test leaves behind that failed in the midst of a run is ended with it."""
    yield
    while STARTED:
        launcher = STARTED.pop()
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(60)


def start(root: Path, *arguments: str, cache: Path | None = None, recipe: str = "tiny_grpo") -> subprocess.Popen[str]:
    """`launch.py cluster=local recipe=...`, with runs, and unless it is given the model cache, in `root`."""
    launcher = subprocess.Popen(
        [sys.executable, "launch.py", "cluster=local", f"recipe={recipe}", f"run.root={root / 'runs'}", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "VIME_CACHE": str(cache or root / "cache"), "TEST_MARKER": str(root)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    STARTED.append(launcher)
    return launcher


def finish(launcher: subprocess.Popen[str], timeout: float = 600) -> Outcome:
    """Wait for a run's end."""
    try:
        output, _ = launcher.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        launcher.terminate()
        output, _ = launcher.communicate(timeout=60)
        pytest.fail(f"the run did not end in {timeout:g} s:\n{output}")
    return Outcome(launcher.returncode, output, RunDir(Path(output.splitlines()[-1])))


@pytest.fixture(scope="module")
def main_job(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Outcome:
    """The main job, whole, once."""
    return finish(start(tmp_path_factory.mktemp("main"), cache=model_cache), timeout=900)


def test_it_completes_and_says_where(main_job: Outcome) -> None:
    assert main_job.code == 0, main_job.output
    assert main_job.run.read_status().state == "completed"
    assert main_job.run.path.stat().st_mode & 0o777 == 0o700
    assert not [p for p in psutil.process_iter(["environ"]) if _belongs(p, main_job.run)]


def test_the_policy_learns(main_job: Outcome) -> None:
    rewards = [line["rollout/raw_reward"] for line in main_job.metrics]
    assert sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 >= 0.3
    accuracies = {event["version"]: event["accuracy"] for event in main_job.events("evaluation")}
    assert accuracies[max(accuracies)] - accuracies[0] >= 0.3
    assert max(accuracies) == len(rewards)


def test_trainer_and_engine_agree_on_every_step(main_job: Outcome) -> None:
    assert max(line["train/train_rollout_logprob_abs_diff"] for line in main_job.metrics) < 1e-4


def test_every_update_is_verified(main_job: Outcome) -> None:
    updates = main_job.events("weights_updated")
    assert [update["version"] for update in updates] == list(range(len(main_job.metrics) + 1))
    assert all(update["verified"] and update["mean_abs_diff"] < 1e-4 for update in updates)


def test_it_exports_what_it_trained(main_job: Outcome) -> None:
    (exported,) = main_job.events("exported")
    with safe_open(Path(exported["path"]) / "model.safetensors", framework="pt") as file:
        assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118  # not a mapping
    assert (Path(exported["path"]) / "tokenizer.json").exists()


def test_its_report_reads(main_job: Outcome) -> None:
    command = [sys.executable, "-m", "vime.report", str(main_job.run.path)]
    text = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert "completed" in text
    data = json.loads(subprocess.run([*command, "--json"], cwd=REPOSITORY, capture_output=True, check=True).stdout)
    assert data["outcome"]["state"] == "completed"
    assert data["steps"]["done"] == len(main_job.metrics)


def test_ppo_learns_the_same_task(tmp_path: Path, model_cache: Path) -> None:
    """With a critic, which learns alone at first; a third of the recipe's steps."""
    brief = ("training.steps=40", "evaluation.prompts=150")
    outcome = finish(start(tmp_path, *brief, cache=model_cache, recipe="tiny_ppo"), timeout=900)
    assert outcome.code == 0, outcome.output
    rewards = [line["rollout/raw_reward"] for line in outcome.metrics]
    assert sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 >= 0.2
    accuracies = {event["version"]: event["accuracy"] for event in outcome.events("evaluation")}
    assert accuracies[40] - accuracies[0] >= 0.15
    alone = ["train/pg_loss" not in line for line in outcome.metrics]
    assert alone == [True] * 5 + [False] * 35
    losses = [line["train/value_loss"] for line in outcome.metrics]
    assert sum(losses[-5:]) < sum(losses[:5])
    assert max(line["train/train_rollout_logprob_abs_diff"] for line in outcome.metrics[5:]) < 1e-4


def test_it_runs_ahead_with_logic_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/custom-logic.md two versions ahead: the bound holds, and each due version is evaluated once on every set."""
    (tmp_path / "my_logic.py").write_text(printed_file("my_logic.py"), encoding="utf-8")
    (tmp_path / "hard.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "2+2", "answer": "4"}\n')
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    functions = {"data.source": "source", "data.format": "render", "data.reward": "score"}
    outcome = finish(
        start(
            tmp_path,
            *BRIEF,
            *(f"{key}=my_logic:{name}" for key, name in functions.items()),
            "rollout.generate=my_logic:generate",
            "rollout.max_response_tokens=24",
            "rollout.batch_filter=my_logic:balance",
            "buffer.max_staleness=2",
            "training.ranks=1",
            "training.steps=5",
            "evaluation.every=2",
            f"evaluation.datasets={{hard: {{path: {tmp_path}/hard.jsonl, samples_per_prompt: 4}}}}",
        )
    )
    assert outcome.code == 0, outcome.output
    staleness = [line["rollout/staleness/max"] for line in outcome.metrics]
    assert len(staleness) == 5
    assert 1 <= max(staleness) <= 2
    # Measured on the tokens of the version that trains on them, of which later steps may have none.
    differences = [line.get("train/train_rollout_logprob_abs_diff") for line in outcome.metrics]
    assert differences[0] is not None
    assert max(difference or 0.0 for difference in differences) < 1e-4
    assert all(line["rollout/dropped_samples"] == 0 for line in outcome.metrics)
    evaluations = [(event["dataset"], event["version"]) for event in outcome.events("evaluation")]
    assert evaluations == [("hard", version) for version in (0, 2, 4, 5)]
    assert all(set(event["pass_at"]) == {"1", "2", "4"} for event in outcome.events("evaluation"))


def test_a_verification_that_fails_stops_the_run(tmp_path: Path) -> None:
    # no two float32 computations agree to 1e-12
    outcome = finish(start(tmp_path, *BRIEF, "weights.tolerance=1e-12", "training.steps=2"))
    assert outcome.code == 1
    status = outcome.run.read_status()
    assert status.state == "failed"
    assert status.failure is not None
    assert (status.failure.role, status.failure.rank) == ("trainer", 0)
    assert any("does not serve version 0" in line for line in status.failure.tail)
    assert not outcome.run.metrics.exists() or not outcome.metrics


def test_a_killed_engine_comes_back_and_a_killed_supervisor_ends_all(tmp_path: Path) -> None:
    # Tensor parallel: the third layout, after those of the main job and of test_resume_run's pipeline.
    launcher = start(
        tmp_path, *BRIEF, "training.steps=400", "training.learning_rate=1e-6", "training.tensor_parallel=2"
    )
    run = _run_of(tmp_path / "runs")
    _until(lambda: _steps(run) >= 3, 300, "step 3")
    (server,) = [p for p in psutil.process_iter(["cmdline", "environ"]) if _belongs(p, run) and _serves(p)]
    server.kill()
    before = _steps(run)
    _until(lambda: _steps(run) >= before + 5, 300, "five steps after the restart")
    # Nobody is left above the roles, the engine and the server that it started again.
    check_killed_real_run(launcher, run, str(tmp_path), "supervisor-0")
    outcome = Outcome(1, "", run)
    (restarted,) = outcome.events("restarted")
    assert restarted["incarnation"] == 1
    steps = [line["step"] for line in outcome.metrics]
    assert steps == list(range(1, len(steps) + 1))
    assert max(line["train/train_rollout_logprob_abs_diff"] for line in outcome.metrics) < 1e-4


def _run_of(root: Path) -> RunDir:
    _until(lambda: list(root.glob("*/status.json")), 60, "a run directory")
    return RunDir(next(root.glob("*/status.json")).parent)


def _steps(run: RunDir) -> int:
    return run.metrics.read_bytes().count(b"\n") if run.metrics.exists() else 0


def _until(condition: Any, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.1)


def _belongs(process: psutil.Process, run: RunDir) -> bool:
    try:
        return process.environ().get("VIME_RUN_DIR") == str(run.path)
    except (psutil.Error, OSError):
        return False


def _serves(process: psutil.Process) -> bool:
    try:
        return "vllm.entrypoints.openai.api_server" in process.cmdline()
    except (psutil.Error, OSError):
        return False
