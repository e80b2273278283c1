from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from vime.buffer.control import Beat
from vime.config.cluster import Cluster, Slurm
from vime.run.directory import RunDir, Status
from vime.slurm.allocation import Allocation
from vime.supervise.commands import Command
from vime.supervise.failure import (
    SILENCE,
    describe,
    describe_silent,
    finished,
    first_cause,
    silent_ranks,
    stop_outcome,
    tail,
)
from vime.supervise.processes import End
from vime.supervise.stop_signals import Stopped


def _end(role: str, seconds: float, exit_code: int | None = None, signal: str | None = None) -> End:
    return End(Command(role, 0, 1, ("true",), True), exit_code, signal, "now", seconds, Path("log"))


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ([_end("a", 1.0, 1), _end("b", 1.5, 1)], "a"),
        ([_end("a", 1.5, 1), _end("b", 1.0, 42)], "b"),
        # b was killed; a noticed the broken connection, and was collected first.
        ([_end("a", 1.0, 1), _end("b", 1.1, None, "SIGKILL")], "b"),
        ([_end("a", 1.0, None, "SIGSEGV"), _end("b", 1.1, None, "SIGKILL")], "a"),
        # gloo and c10 abort when a peer is gone, and a broken pipe is a consequence too.
        ([_end("a", 1.0, 1), _end("b", 1.1, None, "SIGABRT")], "a"),
        ([_end("a", 1.0, None, "SIGABRT"), _end("b", 1.1, None, "SIGKILL")], "b"),
        ([_end("a", 1.0, None, "SIGPIPE"), _end("b", 1.1, None, "SIGSEGV")], "b"),
    ],
)
def test_the_cause_is_the_end_that_the_others_follow_from(ends: list[End], cause: str) -> None:
    assert first_cause(ends).command.role == cause


def test_the_tail_of_a_log_is_its_last_lines_whatever_the_bytes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"".join(b"line %d\n" % n for n in range(100_000)) + b"\xff torn")
    assert tail(log)[-2:] == ["line 99999", "\ufffd torn"]
    assert len(tail(log)) == 40
    assert tail(tmp_path / "none") == []


def test_a_generator_that_exits_0_has_finished_only_when_it_said_so(tmp_path: Path) -> None:
    """Chaos 5: os._exit(0) in what runs in it."""
    run, end = RunDir(tmp_path), _end("generator", 1.0, 0)
    lines = [
        '{"event": "stopped", "role": "engine", "attempt": 2}',
        '{"event": "stopped", "role": "generator", "attempt": 1}',
    ]
    run.events.write_text("\n".join(lines) + "\n")
    assert not finished(end, run, 2)
    assert describe(end).tail[-1].startswith("generator-0 exited 0 before its work was done")
    assert finished(end, run, 1)
    assert finished(_end("trainer", 1.0, 0), run, 2)


def test_what_a_stop_signal_means(tmp_path: Path) -> None:
    run, cluster = RunDir(tmp_path), Cluster(name="here")
    run.write_status(Status(state="running"))
    job = Allocation("7", {})

    def outcome(signum: signal.Signals, orphaned: bool, allocation: Allocation | None = None) -> Any:
        return stop_outcome(Stopped(signum, orphaned), run, cluster, allocation)

    assert outcome(signal.SIGTERM, False) == ("cancelled", None)
    assert outcome(signal.SIGUSR2, False) == ("timeout", None)
    assert outcome(signal.SIGUSR2, False, job) == ("requeued", None)
    run.submitit.mkdir()
    (run.submitit / "7_0_log.out").write_text(
        "slurmstepd-a: error: *** JOB 7 ON a CANCELLED AT 2026-11-29T21:03:35 DUE TO JOB REQUEUE ***\n"
    )
    assert outcome(signal.SIGTERM, False, job) == ("requeued", None)
    cluster = Cluster(name="here", slurm=Slurm(requeue=False))
    assert outcome(signal.SIGUSR2, False, job) == ("timeout", None)
    state, failure = outcome(signal.SIGTERM, False, job)
    assert state == "failed"
    assert failure is not None
    assert failure.tail[-1].endswith("DUE TO JOB REQUEUE ***")
    state, failure = outcome(signal.SIGTERM, True)
    assert state == "failed"
    assert failure is not None
    assert (failure.role, failure.exit_code, failure.signal) == ("guardian", None, None)


def _beat(time: float, place: str = "the training of step 3") -> Beat:
    return Beat(time=time, node=f"node-{time:g}", place=place, since=time - 7)


def test_a_rank_that_gives_no_sign_of_life_is_to_blame_and_not_who_waited_for_it(tmp_path: Path) -> None:
    (tmp_path / "trainer-0.log").write_text("gloo timed out\n")
    (tmp_path / "trainer-2.log").write_text("its last words\n")
    end = End(_end("trainer", 1.0).command, 1, None, "now", 1.0, tmp_path / "trainer-0.log")
    beats = {0: _beat(1000.0), 1: _beat(991.0), 2: _beat(935.0, "the wait for a batch"), 3: _beat(950.0)}
    assert silent_ranks(beats) == [2, 3]
    failure = describe_silent(end, beats, lambda rank: tmp_path / f"trainer-{rank}.log")
    assert failure is not None
    assert (failure.role, failure.rank, failure.node, failure.exit_code) == ("trainer", 2, "node-935", None)
    assert failure.tail == [
        "trainer-2 on node-935 has given no sign of life for 65 s, nor have 1 others of 4: it stood at the wait for a"
        " batch since 72 s. The other ranks: 2 at the training of step 3",
        f"{end} meanwhile: gloo timed out",
        "its last words",
    ]
    killed = End(end.command, None, "SIGKILL", "now", 1.0, end.log)
    assert describe_silent(killed, beats, lambda rank: tmp_path) is None
    slow = {rank: _beat(1000.0 - rank * SILENCE / 4) for rank in range(4)}
    assert describe_silent(end, slow, lambda rank: tmp_path) is None
    assert describe_silent(end, {}, lambda rank: tmp_path) is None
