"""An interrupted run trains on the prompts of an uninterrupted one: the real feed and buffer, with the steps played."""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.conftest import stack_config
from tests.run.test_checkpoints import steps as complete_steps
from vime.buffer.control import BatchMessage, Control
from vime.buffer.reader import BufferReader
from vime.config import Config, TinyModel
from vime.errors import UserError
from vime.launch.checks import check_unchanged
from vime.models.tiny import make_tiny
from vime.rollout.demonstrations import run_demonstrations
from vime.run.checkpoints import Facts, begin, commit, fixed_settings, newest
from vime.run.directory import RunDir
from vime.run.role import Role

STEPS = 6
PROMPTS = 4


@dataclass
class Run:
    """A run of sft whose trainer is played: it takes batches in order, and saves what a trainer's checkpoint says."""

    config: Config
    role: Role

    def attempt(self, number: int, until: int, save_at: int | None = None) -> list[int]:
        """Train until step `until`; the stream positions trained, in order. Attempts after the first resume."""
        run = RunDir(self.role.run_dir)
        control, port = Control.serve("127.0.0.1", number, "t")
        start, cursor = 0, {}
        if number > 1:
            facts = newest(run.checkpoints, self.config)[0].facts
            start, cursor = facts.step, facts.cursor
        control.put("start", {"step": start, "cursor": cursor})
        if start:
            control.publish_consumed(start)
        role = replace(self.role, store_port=port, attempt=number)
        worker = threading.Thread(target=self._generate, args=(role,), daemon=True)
        worker.start()
        reader = BufferReader(run, self.config.buffer)
        trained: list[int] = []
        for step in range(start + 1, until + 1):
            message = control.next_message(step - start - 1, 30, f"the batch of step {step}")
            assert isinstance(message, BatchMessage)
            manifest = reader.manifest(message)
            assert manifest.step == step
            trained += [entry.group for entry in manifest.samples]
            control.publish_consumed(step)
            if step == save_at:
                facts = Facts(
                    step=step,
                    cursor=manifest.cursor,
                    attempt=number,
                    time="now",
                    tensor_parallel=1,
                    pipeline_parallel=1,
                    settings=fixed_settings(self.config),
                )
                commit(begin(run.checkpoints, step), facts)
                reader.collect(step)
        if until == STEPS:
            worker.join(30)
            assert not worker.is_alive()
        del control  # an interrupted attempt's store ends, and its generator with it
        worker.join(30)
        return trained

    def _generate(self, role: Role) -> None:
        with contextlib.suppress(ConnectionError):
            run_demonstrations(role, self.config)


def make_run(folder: Path, prompts_per_step: int) -> Run:
    """Four prompts in a file, none held out."""
    model = folder / "model"
    make_tiny(TinyModel(layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, ffn=8, context=32), model)
    for name, numbers in (("train", range(PROMPTS)), ("held_out", range(90, 92))):
        lines = [json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) for n in numbers]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    raw = stack_config(model).model_dump()
    raw["algorithm"]["name"] = "sft"
    raw["data"] |= {
        "source": "jsonl",
        "path": folder / "train.jsonl",
        "eval_path": folder / "held_out.jsonl",
        "reward": "exact",
    }
    raw["rollout"] |= {
        "engines": 0,
        "samples_per_prompt": 1,
        "context": 32,
        "prompts_per_step": prompts_per_step,
    }
    raw["training"]["steps"] = STEPS
    run = RunDir.create(folder, "run", "test")
    return Run(
        Config.model_validate(raw), Role(run.path, "127.0.0.1", 1, "generator", 1, "t", 0, 1, "127.0.0.1", model)
    )


@pytest.mark.parametrize(
    ("prompts_per_step", "save_at", "stop_at"),
    [
        (4, 1, 1),  # saved at the end of the first epoch, and nothing after it
        (4, 1, 3),  # steps 2 and 3 were trained after it, and are lost
        (2, 2, 3),
        (3, 4, 4),  # 12 prompts: the end of an epoch, reached in the middle of a batch before
        (3, 2, 5),  # an epoch ends in the middle of a batch
    ],
)
def test_prompts_of_an_interrupted_run(tmp_path: Path, prompts_per_step: int, save_at: int, stop_at: int) -> None:
    interrupted = make_run(tmp_path, prompts_per_step)
    before = interrupted.attempt(1, until=stop_at, save_at=save_at)
    assert complete_steps(RunDir(interrupted.role.run_dir).checkpoints) == [save_at]
    after = interrupted.attempt(2, until=STEPS)
    counted = before[: save_at * prompts_per_step] + after  # what the checkpoint holds, and what followed it
    assert counted == list(range(STEPS * prompts_per_step))
    # Steps that were lost and trained again saw the same prompts.
    assert before == counted[: len(before)]


def test_data_edited_between_attempts_are_refused_unless_asked_for(tmp_path: Path) -> None:
    """Otherwise some prompts are asked twice and others never; a batch that was written before is trained as it is."""
    run = make_run(tmp_path, 2)
    before = run.attempt(1, until=2, save_at=1)
    file = tmp_path / "train.jsonl"
    file.write_text(file.read_text() + "".join(f'{{"prompt": "new {n}", "answer": "{n}"}}\n' for n in range(20)))
    with pytest.raises(UserError, match=r"^the data changed since the checkpoint: 4 training problems then, 24 now\."):
        check_unchanged(run.config, newest(RunDir(run.role.run_dir).checkpoints, run.config)[0].facts.cursor)
    run.config = run.config.model_copy(
        update={"data": run.config.data.model_copy(update={"allow_change": True, "shuffle": False})}
    )
    after = run.attempt(2, until=STEPS)
    assert before + after[2:] == list(range(2 * STEPS))
    events = [json.loads(line) for line in RunDir(run.role.run_dir).events.read_text().splitlines()]
    changed = [event["changes"] for event in events if event["event"] == "data_changed"]
    assert changed == [["4 training problems then, 24 now", "another data.shuffle"]]
