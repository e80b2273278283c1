from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.supervise.job import config_in
from vime.config.compose import compose
from vime.plan.plan import make_plan
from vime.supervise.commands import role_commands


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def test_a_grpo_run_has_every_role_and_waits_for_trainers_and_generator(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    commands = role_commands(config, make_plan(config))
    assert [command.name for command in commands] == ["trainer-0", "trainer-1", "engine-0", "router-0", "generator-0"]
    assert [command.name for command in commands if command.finishes] == ["trainer-0", "trainer-1", "generator-0"]
    assert [command.world_size for command in commands] == [2, 2, 1, 1, 1]
    assert commands[2].argv == (sys.executable, "-m", "vime.rollout.engine.engine")


def test_an_sft_run_has_trainers_and_demonstrations(tmp_path: Path) -> None:
    config = compose("local", "tiny_sft", [f"run.root={tmp_path}"])
    commands = role_commands(config, make_plan(config))
    assert {command.role for command in commands} == {"trainer", "generator"}
    assert commands[-1].argv[-1] == "vime.rollout.demonstrations"


@pytest.mark.parametrize(
    ("overrides", "trainer", "engine"),
    [
        ([], 4, 8),  # they take turns
        (["buffer.max_staleness=1"], 2, 2),  # 8 cores // (2 trainers + 1 engine)
        (["training.ranks=16"], 1, 8),
    ],
)
def test_cores_are_divided_over_what_computes_at_once(
    tmp_path: Path, overrides: list[str], trainer: int, engine: int
) -> None:
    config = config_in(tmp_path, *overrides)
    threads = {c.name: c.environment["OMP_NUM_THREADS"] for c in role_commands(config, make_plan(config))}
    assert (threads["trainer-0"], threads["engine-0"], threads["router-0"]) == (str(trainer), str(engine), "1")
