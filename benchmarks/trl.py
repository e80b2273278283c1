"""A whole run of tiny_grpo against TRL's GRPOTrainer: the same model, task, prompts, batch, settings and cores.

TRL trains the first half of its steps, then vime its whole run, then TRL the second half: other work on the machine
meets both. Afterwards one program draws answers to the held-out questions from both policies.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.row import Row
from vime.config import Config
from vime.config.compose import ROOT, compose, dump_resolved

RECIPE = "tiny_grpo"
STEPS = 60
WARM = 3
"""First steps, and after TRL's pause, that are not timed."""
LAST = 10
"""Steps whose mean reward is "after training"."""
ANSWERS = 4
"""Drawn to each held-out question."""
TIMEOUT = 900.0
NOTES = (
    "each vime step goes through a server, a router and files, as on a cluster, which a 3-token answer hardly repays",
    "vime generates in a vLLM server and sends it the new weights after each step; TRL calls transformers' generate",
    "vime trains on two data-parallel Megatron ranks of one thread, without padding; TRL in one process, padded",
    "vime compares the engine's logprobs with the trainer's after every update; TRL has one copy of the weights",
    "the learning rate's warm-up starts at a tenth of the peak in vime, at 0 in TRL",
    "TRL adds 1e-4 to the deviation of a group's rewards, vime nothing",
)


def measure(steps: int = STEPS) -> dict[str, Any]:
    """Samples per second and rewards of both."""
    with tempfile.TemporaryDirectory(prefix="vime-bench-") as name:
        folder = Path(name)
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.initial_policy", RECIPE, name],
            stdout=subprocess.PIPE, check=True, text=True, env=_environment(), timeout=TIMEOUT,
        )  # fmt: skip
        model = Path(done.stdout.strip().splitlines()[-1])
        overrides = ["model.tiny=null", "model.warmup=null", f"model.path={model}", f"training.steps={steps}"]
        overrides += ["evaluation.prompts=0", f"run.root={folder}", "run.name=vime"]
        config = compose("local", RECIPE, overrides)
        theirs, ours = _turns(config, overrides, folder)
        batch = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
        half = steps // 2
        timed = [line["seconds"] for line in theirs if line["step"] > WARM and not half < line["step"] <= half + WARM]
        own = [line["perf/step_time"] for line in ours[WARM:]]
        result: dict[str, Any] = {
            "sizes": {"steps": steps, "samples_per_step": batch, "held_out_answers": 0},
            "samples_per_second": {"vime": batch / _quiet(own), "trl": batch / _quiet(timed)},
            "mean_samples_per_second": {"vime": batch / mean(own), "trl": batch / mean(timed)},
            "step_seconds": {"vime": [line["perf/step_time"] for line in ours], "trl": [x["seconds"] for x in theirs]},
            "reward": {
                "vime": [line["rollout/raw_reward"] for line in ours],
                "trl": [line["reward"] for line in theirs],
            },
            "held_out": {},
            "differences": NOTES,
        }
        for label, policy in (("vime", folder / "vime" / "export" / f"step_{steps}"), ("trl", folder / "out")):
            accuracy, answers = _held_out(config, policy)
            result["held_out"][label] = accuracy
            result["sizes"]["held_out_answers"] = answers
        before, _ = _held_out(config, model)
        result["held_out"]["before"] = before
        return result


def _quiet(seconds: Sequence[float]) -> float:
    """The time that a quarter of the steps stays below: other work on the machine slows the others, and not evenly."""
    return sorted(seconds)[len(seconds) // 4]


def rows(measured: dict[str, Any]) -> list[Row]:
    """Speed, rewards after equally many samples, held-out accuracy."""
    speed, reward, held_out = measured["samples_per_second"], measured["reward"], measured["held_out"]
    sizes, lines = measured["sizes"], []
    last = {label: mean(values[-LAST:]) for label, values in reward.items()}
    error = {label: stdev(values[-LAST:]) / math.sqrt(LAST) for label, values in reward.items()}
    text = f"GRPO, {sizes['steps']} steps of {sizes['samples_per_step']} samples, against TRL's GRPOTrainer"
    ours, theirs = (f"{speed[label]:,.0f} samples/s" for label in ("vime", "trl"))
    lines.append(Row(text, ours, f"{theirs} TRL", speed["vime"] / speed["trl"], at_least=1.0))
    ours, theirs = (f"{last[label]:.3f} ± {error[label]:.3f}" for label in ("vime", "trl"))
    text = f"  reward, last {LAST} steps (first: {mean(reward['vime'][:3]):.2f}, {mean(reward['trl'][:3]):.2f})"
    # The same update rule on the same prompts: what is above or below is mostly the luck of sampling.
    lines.append(Row(text, ours, f"{theirs} TRL", last["vime"] / last["trl"], at_least=0.95))
    noise = {
        label: math.sqrt(held_out[label] * (1 - held_out[label]) / sizes["held_out_answers"]) for label in held_out
    }
    ours, theirs = (f"{held_out[label]:.3f} ± {noise[label]:.3f}" for label in ("vime", "trl"))
    text = f"  held-out accuracy ({held_out['before']:.3f} before)"
    lines.append(Row(text, ours, f"{theirs} TRL", held_out["vime"] / held_out["trl"], at_least=0.95))
    whole = {label: mean(values) for label, values in reward.items()}
    ours, theirs = (f"{whole[label]:.3f}" for label in ("vime", "trl"))
    lines.append(Row("  reward, mean of all steps", ours, f"{theirs} TRL", whole["vime"] / whole["trl"], at_least=0.95))
    return lines


def _turns(config: Config, overrides: list[str], folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Half of TRL, vime, the other half of TRL: what each said of its steps."""
    (folder / "config.yaml").write_text(dump_resolved(config), encoding="utf-8")
    cores = str(len(os.sched_getaffinity(0)))
    with (folder / "trl.log").open("w+") as log:
        trl = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.trl_trainer", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=_environment() | {"OMP_NUM_THREADS": cores, "MKL_NUM_THREADS": cores},
        )  # fmt: skip
        assert trl.stdin is not None
        assert trl.stdout is not None
        theirs: list[dict[str, Any]] = []
        ours: list[dict[str, Any]] = []
        try:
            for text in trl.stdout:
                if not text.startswith('{"step"'):
                    continue
                theirs.append(json.loads(text))
                if theirs[-1]["step"] == config.training.steps // 2:
                    ours = _vime(overrides, folder)
                    trl.stdin.write("\n")
                    trl.stdin.flush()
            if trl.wait(TIMEOUT):
                log.seek(0)
                raise RuntimeError(f"TRL's trainer failed: {log.read()[-3000:]}")
        finally:
            trl.kill()
            trl.wait()
    return theirs, ours


def _vime(overrides: list[str], folder: Path) -> list[dict[str, Any]]:
    launch = [sys.executable, "launch.py", "cluster=local", f"recipe={RECIPE}", *overrides]
    done = subprocess.run(launch, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        raise RuntimeError(f"vime's run failed: {(done.stdout + done.stderr)[-3000:]}")
    return [json.loads(line) for line in (folder / "vime" / "metrics.jsonl").read_text().splitlines()]


def _environment() -> dict[str, str]:
    """This process's variables without its one thread, which is not the run's."""
    return {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}


def _held_out(config: Config, policy: Path) -> tuple[float, int]:
    """Share of right answers, drawn at temperature 1 with one seed, and how many were drawn."""
    import reasoning_gym
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    from vime.rollout.data.sources import load_problems

    logging.set_verbosity_error()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    problems = load_problems(config.data, config.run.seed, config.cluster.startup_timeout).held_out
    scorer = reasoning_gym.create_dataset(config.data.task, size=1, seed=0, **config.data.task_args)
    tokenizer = AutoTokenizer.from_pretrained(policy, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.prompt}], tokenize=False, add_generation_prompt=True
        )
        for problem in problems
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False)
    torch.manual_seed(0)
    with torch.no_grad():
        ids = model.generate(
            **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=ANSWERS,
            max_new_tokens=config.rollout.max_response_tokens,
        )  # fmt: skip
    answers = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [
        scorer.score_answer(answer.strip(), problems[i // ANSWERS].record) >= 1.0 for i, answer in enumerate(answers)
    ]
    return mean(right), len(right)
