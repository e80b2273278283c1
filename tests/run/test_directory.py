from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vime.errors import UserError
from vime.run.directory import Failure, RunDir, Status, utc_now
from vime.run.files import write_atomic
from vime.run.jsonl import last_step
from vime.run.role import Role

FAILURE = Failure("engine", 0, "node7", None, "SIGKILL", "2026-11-29T19:43:08.123Z", "logs/x", ["last", "words"])


def test_a_status_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for status in (Status("pending"), Status("failed", 2, 7, "a", "b", FAILURE)):
        run.write_status(status)
        assert run.read_status() == status
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_only_an_end_is_terminal() -> None:
    assert not Status("running").terminal
    assert not Status("requeued").terminal
    assert all(Status(state).terminal for state in ("completed", "failed", "cancelled", "timeout"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "sleeping"}', "{}", '{"state": "failed", "failure": {}}'])
def test_a_status_that_is_none_is_an_error_with_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "status.json"))):
        RunDir(tmp_path).read_status()


def test_a_folder_without_status_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        RunDir(tmp_path).read_status()


def test_a_reader_never_sees_half_a_status(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    statuses = [Status("running"), Status("failed", failure=Failure(**{**vars(FAILURE), "tail": ["x" * 100] * 4000}))]
    run.write_status(statuses[0])
    done = threading.Event()

    def write() -> None:
        for n in range(60):
            run.write_status(statuses[n % 2])
        done.set()

    with ThreadPoolExecutor() as pool:
        writing = pool.submit(write)
        while not done.is_set():
            assert run.read_status() in statuses
        writing.result()


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    (target / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        write_atomic(target, "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_given_name_is_used_once(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs", "mine", "tiny")
    assert run.path == tmp_path / "runs" / "mine"
    assert run.path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(UserError, match=r"run\.name=mine"):
        RunDir.create(tmp_path / "runs", "mine", "tiny")


def test_a_default_name_tells_recipe_and_time(tmp_path: Path) -> None:
    assert re.fullmatch(r"tiny-\d{8}-\d{6}-[0-9a-f]{4}", RunDir.create(tmp_path, None, "tiny").path.name)


def test_many_runs_at_once_get_a_folder_each(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: RunDir.create(tmp_path, None, "tiny"), range(64)))
    assert len({run.path for run in runs}) == 64


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run\.root="):
        RunDir.create(tmp_path / "file", None, "tiny")


def test_the_time_is_utc_in_milliseconds() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", utc_now())


def test_events_of_many_writers_are_whole_lines(tmp_path: Path) -> None:
    run = RunDir(tmp_path)

    def write(rank: int) -> None:
        role = Role(tmp_path, "h", 1, "trainer", 3, "secret", rank, 8, "h", tmp_path)
        for n in range(50):
            run.append_event(role, "ready", n=n, text="x" * 500)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert sorted((event["rank"], event["n"]) for event in events) == [(r, n) for r in range(8) for n in range(50)]
    assert {(event["attempt"], event["role"], event["event"]) for event in events} == {(3, "trainer", "ready")}
    assert "secret" not in run.events.read_text()


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("", 0),
        ('{"step": 1}\n{"step": 2}\n', 2),
        ('{"step": 1}\n{"step": 2}\n{"step": 3, "tra', 2),
        ('{"step": 1}\nrubbish\n', 1),
        ("x" * 200_000 + '\n{"step": 9}\n', 9),
    ],
)
def test_the_last_step_is_that_of_the_last_whole_line(tmp_path: Path, text: str, step: int) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    assert last_step(tmp_path / "metrics.jsonl") == step


def test_there_is_no_step_before_there_are_metrics(tmp_path: Path) -> None:
    assert last_step(tmp_path / "metrics.jsonl") == 0


def test_metrics_are_appended_a_line_each(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (1, 2):
        run.append_metrics({"step": step, "train/loss": 0.5})
    assert last_step(run.metrics) == 2
    assert len(run.metrics.read_text().splitlines()) == 2


def test_paths_are_those_of_the_design() -> None:
    run = RunDir(Path("/runs/a"))
    assert run.log("engine", 3, 2) == Path("/runs/a/logs/attempt_2/engine-3.log")
    assert run.submission == Path("/runs/a/submission.sbatch")
