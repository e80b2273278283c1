"""Sweep files: which runs they stand for, and which of those are due."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vime.config.compose import compose
from vime.errors import UserError
from vime.launch.sweep.file import Sweep, look, read_sweep
from vime.run.directory import RunDir, Status


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lr.yaml"


def read(file: Path, text: str, *given: str) -> Sweep:
    file.write_text(text)
    return read_sweep(file, "local", "tiny_grpo", given)


def refused(file: Path, text: str, *given: str) -> str:
    with pytest.raises(UserError) as caught:
        read(file, text, *given)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_grid_is_every_combination_in_the_file_s_order(file: Path) -> None:
    sweep = read(file, "grid:\n  training.learning_rate: [1e-6, 2e-6]\n  run.seed: [1, 2]\nset: {training.steps: 3}\n")
    assert [combination.overrides for combination in sweep.combinations] == [
        ("training.steps=3", "training.learning_rate=1e-6", "run.seed=1"),
        ("training.steps=3", "training.learning_rate=1e-6", "run.seed=2"),
        ("training.steps=3", "training.learning_rate=2e-6", "run.seed=1"),
        ("training.steps=3", "training.learning_rate=2e-6", "run.seed=2"),
    ]
    assert [combination.index for combination in sweep.combinations] == [0, 1, 2, 3]
    assert sweep.name == "lr"
    config = compose(sweep.cluster, sweep.recipe, sweep.combinations[3].overrides)
    assert (config.training.learning_rate, config.run.seed, config.training.steps) == (2e-6, 2, 3)


def test_zipped_values_go_side_by_side_and_meet_the_grid(file: Path) -> None:
    sweep = read(file, "zip: {training.steps: [10, 20], training.ranks: [2, 4]}\ngrid: {run.seed: [1, 2]}\n")
    values = [dict(text.split("=") for text in combination.overrides) for combination in sweep.combinations]
    assert [(v["training.steps"], v["training.ranks"], v["run.seed"]) for v in values] == [
        ("10", "2", "1"),
        ("10", "2", "2"),
        ("20", "4", "1"),
        ("20", "4", "2"),
    ]


def test_values_mean_what_they_mean_on_a_command_line(file: Path) -> None:
    sweep = read(file, "grid: {data.task: [007, 'a b', null]}\nset: {data.task_args: {min_terms: 2}}\n")
    tasks = [combination.overrides[-1] for combination in sweep.combinations]
    assert tasks == ["data.task=007", 'data.task="a b"', "data.task=null"]
    config = compose("local", "tiny_grpo", sweep.combinations[0].overrides)
    assert (config.data.task, config.data.task_args) == ("007", {"min_terms": 2})


def test_names_are_readable_and_differ_by_all_that_changes_the_result(file: Path) -> None:
    text = "grid: {training.learning_rate: [1e-6, 2e-6]}\n"
    names = [combination.name for combination in read(file, text).combinations]
    assert names[0].startswith("learning_rate_1e-6-")
    assert compose("local", "tiny_grpo", [f"run.name={names[0]}"]).run.name == names[0]
    # The same file, with a value added in front: the old runs keep their names.
    more = read(file, "grid: {training.learning_rate: [5e-7, 1e-6, 2e-6]}\n").combinations
    assert [combination.name for combination in more[1:]] == names
    others = [
        read(file, text + "set: {training.steps: 4}\n"),
        read(file, text, "training.steps=4"),
        read_sweep(file, "local", "tiny_sft"),
    ]
    found = {sweep.combinations[0].name for sweep in others}
    assert names[0] not in found
    assert read(file, text, "run.root=/elsewhere").combinations[0].name == names[0]


def test_cluster_and_recipe_may_be_the_file_s(file: Path) -> None:
    file.write_text("grid: {run.seed: [1]}\ncluster: local\nrecipe: tiny_sft\nparallel: 2\nname: seeds\n")
    sweep = read_sweep(file)
    assert (sweep.cluster, sweep.recipe, sweep.parallel, sweep.name) == ("local", "tiny_sft", 2, "seeds")
    assert read_sweep(file, recipe="tiny_grpo").recipe == "tiny_grpo"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gird: {}\n", "lr.yaml:1: unknown key gird in a sweep; did you mean grid?"),
        ("set: {training.steps: 3}\n", "lr.yaml: a sweep needs `grid` or `zip`"),
        ("grid: {run.seed: 3}\n", "lr.yaml:1: grid.run.seed must be a list of values"),
        ("grid: {run.seed: []}\n", "grid.run.seed must be a list of values"),
        ("grid: [1]\n", "`grid` must map dotted keys to values"),
        ("zip: {run.seed: [1, 2], training.steps: [3]}\n", "run.seed has 2, training.steps has 1"),
        ("grid: {run.seed: [1]}\nset: {run.seed: 2}\n", "lr.yaml:2: run.seed is in grid and in set"),
        ("grid: {run.seed: [1, 1]}\n", "two combinations of the sweep are the same"),
        ("grid: {run.name: [a]}\n", "a sweep places its runs itself; leave run.name out"),
        ("grid: {run.seed: [1]}\nparallel: 0\n", "parallel=0 must be a whole number of at least 1"),
        ("grid: {run.seed: [1]}\nname: a/b\n", "the sweep's name 'a/b'"),
        ("grid: {a: [1,2,3,4,5,6,7,8,9,10,11], b: [1,2,3,4,5,6,7,8,9,10], c: [1,2,3,4,5,6,7,8,9,10]}\n", None),
    ],
)
def test_what_is_no_sweep_is_refused(file: Path, text: str, words: str | None) -> None:
    if words is None:
        assert len(read(file, text).combinations) == 1100
        return
    assert words in refused(file, text)


def test_a_value_given_twice_is_refused(file: Path) -> None:
    assert "run.seed is in the command line and in grid" in refused(file, "grid: {run.seed: [1]}\n", "run.seed=2")
    with pytest.raises(UserError, match="names no cluster"):
        read_sweep(file)


def test_too_many_are_refused_before_they_are_made(file: Path) -> None:
    lists = ", ".join(f"k{index}: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" for index in range(12))
    assert "1000000000000 combinations are more than the 10000" in refused(file, f"grid: {{{lists}}}\n")


def test_what_is_completed_or_goes_on_is_not_started_and_what_failed_is_tried_anew(file: Path, tmp_path: Path) -> None:
    [combination] = read(file, "grid: {run.seed: [1]}\n").combinations
    folder = tmp_path / "runs" / "lr"
    assert look(folder, combination).start == combination.name
    first = RunDir.create(folder, combination.name, "tiny")
    first.write_status(Status(state="running"))
    slot = look(folder, combination)
    assert (slot.start, slot.state, slot.run) == (None, "running", first)
    # Unless its job is known to be gone: cancelled while it waited, it could not say so.
    assert look(folder, combination, lambda run: False).start == f"{combination.name}-2"
    first.write_status(Status(state="failed"))
    slot = look(folder, combination)
    assert (slot.start, slot.state, slot.run) == (f"{combination.name}-2", "failed", first)
    second = RunDir.create(folder, f"{combination.name}-2", "tiny")
    second.write_status(replace(first.read_status(), state="completed"))
    slot = look(folder, combination)
    assert (slot.start, slot.state, slot.run) == (None, "completed", second)
