"""Following a run while it is written."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from tests.report.run_maker import make_run, metrics, role, start_roles, train
from vime.report.progress import Watch, follow
from vime.run.directory import Status


def alive_through(*moments: Callable[[], object]) -> Callable[[], bool]:
    """An `is_alive` that lets one thing happen each time it is asked, then says that the job is gone."""
    left: Iterator[Callable[[], object]] = iter(moments)

    def is_alive() -> bool:
        moment = next(left, None)
        if moment is None:
            return False
        moment()
        return True

    return is_alive


def test_a_log_gets_each_phase_and_every_few_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    file = io.StringIO()

    def steps(first: int, last: int) -> Callable[[], object]:
        return lambda: train(run, first, last)

    def warm_up() -> None:
        make_run(run.path, "warmup", steps=100).append_metrics(metrics(40))

    moments = [
        lambda: None,
        lambda: run.write_status(Status("running")),
        warm_up,
        lambda: start_roles(run, ready=False),
        lambda: start_roles(run),
        *(steps(step, step) for step in range(1, 61)),
        lambda: run.write_status(Status("completed")),
    ]
    is_alive = alive_through(*moments)
    follow(run, is_alive, Console(file=file, width=80, highlight=False), poll=0)
    lines = [line.split("] ", 1)[1] for line in file.getvalue().splitlines()]
    assert lines[:5] == [
        "waiting to start",
        "preparing the model",
        "warming up the model, step 40 of 100",
        "starting: engine, generator, router, trainer not ready yet",
        "step 1 of 60",
    ]
    assert "held-out accuracy 0.2000 at version 0" in lines
    assert "step 1/60  reward 0.2317  logprob diff 2e-07  tok/s 1,800  3 min 56 s left" in lines
    assert lines[-1] == "step 60/60  reward 0.8176  logprob diff 2.6e-07  tok/s 1,800"
    numbered = [line for line in lines if line.startswith("step ") and "reward" in line]
    assert 20 <= len(numbered) <= 22


def test_returns_when_the_job_is_gone_without_a_word(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.write_status(Status("running"))
    file = io.StringIO()
    follow(run, alive_through(lambda: train(run, 1, 3)), Console(file=file, width=80), poll=0)
    assert "step 3/60" in file.getvalue()


def test_returns_at_once_when_the_run_has_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.write_status(Status("cancelled"))
    follow(run, lambda: True, Console(file=io.StringIO()), poll=60)


def test_a_terminal_is_redrawn_and_left_clean(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.write_status(Status("running"))
    start_roles(run)
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, highlight=False)
    follow(run, alive_through(lambda: train(run, 1, 30), lambda: train(run, 31, 40)), console, poll=0)
    text = file.getvalue()
    assert "step 31 of 60" in text
    assert " 50%" in text
    assert "about 2 min 0 s left" in text
    assert text.rstrip().endswith("\x1b[2K")  # the last thing done is to erase the lines


def test_watch_reads_only_what_was_appended(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    train(run, 1, 20)
    watch = Watch(run)
    watch.look()
    assert (watch.step, watch.remaining()) == (20, 160.0)
    # Were the file read again from its start, this would be seen as step 1.
    content = run.metrics.read_bytes()
    run.metrics.write_bytes(content.replace(b'"step":20,', b'"step":1 ,'))
    run.append_event(role("engine", 1), "restarted")
    watch.look()
    assert watch.step == 20
    assert watch.news[-1] == "engine 1 restarted"


def test_a_second_attempt_starts_its_roles_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.write_status(Status("running"))
    start_roles(run)
    train(run, 1, 20)
    start_roles(run, attempt=2, ready=False)
    watch = Watch(run)
    watch.look()
    assert watch.phase() == "starting: engine, generator, router, trainer not ready yet"
    start_roles(run, attempt=2)
    watch.look()
    assert watch.phase() == "step 21 of 60"
