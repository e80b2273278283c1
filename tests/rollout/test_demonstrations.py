"""The sft role against a real store and buffer, with the trainers' answers played."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import stack_config
from vime.buffer.control import Control
from vime.buffer.manifest import committed
from vime.buffer.reader import BufferReader
from vime.config import Config, Demonstrations, TinyModel
from vime.models.tiny import make_tiny
from vime.rollout.data.format import load_tokenizer
from vime.rollout.data.sources import load_problems
from vime.rollout.demonstrations import BATCHES_AHEAD, demonstrated_answer, run_demonstrations
from vime.run.directory import RunDir
from vime.run.jsonl import read_lines
from vime.run.role import Role

HERE = "tests.rollout.test_demonstrations"
STEPS = 7


def chat_of_some(record: dict[str, Any], tokenizer: Any) -> list[int]:
    """As data.format=chat, but it fails on some."""
    if int(record["answer"]) % 4 == 0:
        raise ValueError("divisible by four")
    messages = [{"role": "user", "content": f"{record['metadata']['expression']} ="}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.fixture
def run(tmp_path: Path) -> tuple[Role, Config, Control]:
    model = tmp_path / "model"
    make_tiny(TinyModel(layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, ffn=8, context=32), model)
    raw = stack_config(model).model_dump()
    raw["algorithm"]["name"] = "sft"
    raw["rollout"] |= {"engines": 0, "samples_per_prompt": 1, "context": 32}
    raw["training"]["steps"] = STEPS
    raw["buffer"]["wait_timeout"] = 30
    raw["data"]["format"] = f"{HERE}:chat_of_some"
    config = Config.model_validate(raw)
    run_dir = RunDir.create(tmp_path, "run", "test")
    control, port = Control.serve("127.0.0.1", 1, "t")
    return Role(run_dir.path, "127.0.0.1", port, "generator", 1, "t", 0, 1, "127.0.0.1", model), config, control


def test_demonstrations_are_prompts_with_their_answers(run: tuple[Role, Config, Control]) -> None:
    role, config, control = run
    control.put("start", {"step": 0, "cursor": {}})
    failures: list[BaseException] = []

    def work() -> None:
        try:
            run_demonstrations(role, config)
        except BaseException as error:
            failures.append(error)
            raise

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    for position in range(BATCHES_AHEAD):
        assert control.next_message(position, 30, "a batch").kind == "batch"
    worker.join(0.5)
    assert control.posted() == BATCHES_AHEAD, "it runs ahead of the trainers, but not without bound"
    for step in range(1, STEPS + 1):
        control.next_message(step - 1, 30, "a batch")
        control.publish_consumed(step)
    worker.join(30)
    assert not worker.is_alive()
    assert not failures

    run_dir, tokenizer = RunDir(role.run_dir), load_tokenizer(role.model)
    problems = {p.uid: p for p in load_problems(config.data, config.run.seed, 5).training}
    answers = {str(p.prompt): p.answer for p in problems.values()}
    manifests = committed(run_dir.buffer)
    assert [m.step for m in manifests] == list(range(1, STEPS + 1))
    groups, asked = [], []
    for manifest in manifests:
        groups += [entry.group for entry in manifest.samples]
        for sample in BufferReader(run_dir, config.buffer).samples(manifest, range(len(manifest.samples))):
            prompt, response = sample.token_ids[: sample.prompt_length], sample.token_ids[sample.prompt_length :]
            question = tokenizer.decode(prompt, skip_special_tokens=True)
            assert response[-1] == tokenizer.eos_token_id
            assert tokenizer.decode(response[:-1]) == answers[question]
            asked.append(answers[question])
            assert sample.loss_mask.all()
            assert sample.versions.tolist() == [[0, manifest.step - 1]]
    assert groups == sorted(set(groups))
    assert len(groups) == 4 * STEPS
    dropped = sorted(set(range(groups[-1])) - set(groups))
    events = [event for event in read_lines(run_dir.events) if event["event"] == "sample_dropped"]
    assert [event["prompt"] for event in events][: len(dropped)] == dropped
    assert sum(manifest.metrics["rollout/dropped_samples"] for manifest in manifests) == len(dropped) > 0
    assert all(int(answer) % 4 for answer in asked)


def test_a_share_of_the_demonstrations_declines() -> None:
    config = Demonstrations(decline_share=0.25, decline_text="?", seed=1)
    answers = [demonstrated_answer("10", config, index) for index in range(2000)]
    assert set(answers) == {"10", "?"}
    assert 0.2 < answers.count("?") / len(answers) < 0.3
    assert answers == [demonstrated_answer("10", config, index) for index in range(2000)]
    assert {demonstrated_answer("x", Demonstrations(), index) for index in range(100)} == {"x"}
