"""The generator against a real engine: batches that a trainer can read, whose every number is checked."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import EngineStack, start_role
from tests.rollout.reference import logprobs
from vime.buffer.control import Control
from vime.buffer.manifest import committed
from vime.buffer.reader import BufferReader
from vime.config import Buffer, Evaluation
from vime.config.algorithm import TEACHER_KEY, Algorithm
from vime.config.compose import dump_resolved
from vime.rollout.data.format import load_tokenizer
from vime.rollout.data.sources import load_problems
from vime.run.directory import RunDir
from vime.run.tokens import engine_token

pytestmark = pytest.mark.slow


def train_nothing(stack: EngineStack, seconds: float = 0.0) -> None:
    """What the trainers say to the generator, without training: each batch is consumed and makes the next version."""
    control = stack.control.clone()
    position = control.posted()
    control.put("start", {"step": 0, "cursor": {}})
    serve_version(stack, 0)
    control.publish_version(0)
    for step in range(1, stack.config.training.steps + 1):
        message = control.next_message(position, 120, f"the batch of step {step}")
        assert message.kind == "batch"
        assert message.step == step
        position += 1
        time.sleep(seconds)
        control.publish_consumed(step)
        serve_version(stack, step)
        control.publish_version(step)


def serve_version(stack: EngineStack, version: int) -> None:
    """Let the engine say that it serves `version`, as after an update."""
    stack.post("/update_weight_version", {"new_version": str(version)})
    stack.post("/resume")


def test_the_generator_makes_batches(engine_stack: EngineStack) -> None:
    stack = engine_stack
    trainer = threading.Thread(target=train_nothing, args=(stack,), daemon=True)
    trainer.start()
    role = replace(stack.role, name="generator")
    generator = start_role(role, "vime.rollout.generator")
    log = stack.run_dir.log("generator", 0, 1)
    try:
        assert generator.wait(180) == 0, log.read_text()[-3000:]
    finally:
        generator.kill()
    trainer.join(10)
    serve_version(stack, 0)

    config = stack.config
    manifests = committed(stack.run_dir.buffer)
    assert [manifest.step for manifest in manifests] == [1, 2]
    reader = BufferReader(stack.run_dir, config.buffer)
    problems = load_problems(config.data, config.run.seed, 5)
    answers = {problem.uid: problem for problem in problems.training}
    tokenizer = load_tokenizer(stack.model)
    seen: list[int] = []
    for manifest in manifests:
        samples = reader.samples(manifest, range(len(manifest.samples)))
        assert len(samples) == 16
        seen += sorted({entry.group for entry in manifest.samples})
        for sample in samples:
            assert sample.versions.tolist() == [[0, manifest.step - 1]]
            response = sample.token_ids[sample.prompt_length :]
            expected = logprobs(stack.model, sample.token_ids[: sample.prompt_length].tolist(), response)
            np.testing.assert_allclose(sample.rollout_logprobs, expected, atol=2e-5)
            assert (sample.finish_reason == "stop") == (response[-1] == tokenizer.eos_token_id)
        metrics = manifest.metrics
        assert metrics["rollout/raw_reward"] == pytest.approx(np.mean([s.reward for s in samples]))
        assert metrics["rollout/response_len/mean"] == pytest.approx(np.mean([s.response_length for s in samples]))
        truncated = np.mean([s.finish_reason == "truncated" for s in samples])
        assert metrics["rollout/truncated_ratio"] == pytest.approx(truncated)
        assert metrics["rollout/staleness/max"] == 0
        assert metrics["perf/rollout_tok_per_s"] > 0
        assert metrics["rollout/dropped_samples"] == metrics["rollout/filtered_prompts"] == 0
    assert seen == list(range(8)), "the order of the stream is the order of the batches"
    cursor = manifests[-1].cursor
    assert (cursor["epoch"], cursor["position"], cursor["data"]["problems"]) == (0, 8, len(problems.training))
    assert len(answers) == len(problems.training)

    events = [json.loads(line) for line in stack.run_dir.events.read_text().splitlines()]
    evaluations = [event for event in events if event["event"] == "evaluation"]
    assert [event["version"] for event in evaluations] == [0, 2]
    assert evaluations[0]["samples"] == 4
    # Nothing was trained, and evaluations of a run draw alike.
    assert evaluations[0]["accuracy"] == evaluations[1]["accuracy"]
    assert evaluations[0]["mean_reward"] == evaluations[1]["mean_reward"]
    assert evaluations[0]["pass_at"] == {"1": evaluations[0]["accuracy"]}


def test_a_run_ahead_evaluates_each_due_version_once(
    engine_stack: EngineStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two versions ahead of trainers that take a while; the answers of an evaluation are all of its version.

    The engine is its own teacher, which says of each token what the policy said that sampled it.
    """
    stack = engine_stack
    monkeypatch.setenv(TEACHER_KEY, engine_token(stack.role.token, 0))
    config = stack.config.model_copy(
        update={
            "algorithm": Algorithm(teacher=stack.engine_url),
            "rollout": stack.config.rollout.model_copy(update={"context": 127}),
            "buffer": Buffer(max_staleness=2, groups_per_chunk=2),
            "training": stack.config.training.model_copy(update={"steps": 5}),
            "evaluation": Evaluation(prompts=4, every=2, samples_per_prompt=2),
        }
    )
    run_dir = RunDir.create(tmp_path, "run", "test")
    run_dir.config.write_text(dump_resolved(config))
    role = replace(stack.role, run_dir=run_dir.path, name="generator", attempt=2)  # keys of the store of its own
    control = Control.connect(role, 30)
    control.publish_router(stack.router_url)
    slow = replace(stack, config=config, run_dir=run_dir, control=control, role=role)
    trainer = threading.Thread(target=train_nothing, args=(slow, 0.5), daemon=True)
    trainer.start()
    generator = start_role(role, "vime.rollout.generator")
    log = run_dir.log("generator", 0, 2)
    try:
        assert generator.wait(180) == 0, log.read_text()[-3000:]
    finally:
        generator.kill()
    trainer.join(10)
    serve_version(stack, 0)
    events = [json.loads(line) for line in run_dir.events.read_text().splitlines()]
    evaluations = [event for event in events if event["event"] == "evaluation"]
    assert [event["version"] for event in evaluations] == [0, 2, 4, 5]
    assert {event["samples"] for event in evaluations} == {8}
    manifests = committed(run_dir.buffer)
    assert [manifest.step for manifest in manifests] == [1, 2, 3, 4, 5]
    staleness = [manifest.metrics["rollout/staleness/max"] for manifest in manifests]
    assert max(staleness) == 2, "it ran ahead, to the bound"
    assert sorted({entry.group for manifest in manifests for entry in manifest.samples}) == list(range(20))
    reader = BufferReader(run_dir, config.buffer)
    for sample in reader.samples(manifests[-1], range(len(manifests[-1].samples))):
        assert sample.teacher_logprobs is not None
        np.testing.assert_allclose(sample.teacher_logprobs, sample.rollout_logprobs, atol=1e-5)
