from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from vime.config.cluster import Cluster, Slurm
from vime.run.directory import RunDir, Status
from vime.slurm.allocation import Allocation
from vime.supervise.commands import Command
from vime.supervise.failure import first_cause, stop_outcome, tail
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
