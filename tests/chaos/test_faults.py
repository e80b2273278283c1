"""The table of faults: what is done to a run, and what must become of it.

A run either survives a fault exactly, or ends within a bound and names who is to blame. In both cases nothing of it is
left, nothing that was written is lost, and nothing is done twice. The supervisor, the launcher and the store are the
real ones; the roles are scripts where the real role is not the point. Kills of single processes are in
`tests/supervise/test_kill.py`, those of real roles in `tests/test_main_job.py` and `tests/training/test_resume_run.py`,
those of the buffer's writer in `tests/buffer`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from tests.supervise.job import REPOSITORY, SCRIPTS, SERVING, SMALLEST, Job, Roles, leave_checkpoint, until
from vime.buffer.control import Beat, Control, EngineAddress, StopMessage
from vime.buffer.seal import Seal
from vime.config import TinyModel
from vime.run.directory import RunDir
from vime.run.role import Role

Start = Callable[..., Job]
GO = "go"
"""A file in the run's folder that lets trainers and generator finish."""
RESUME = (sys.executable, str(SCRIPTS / "resume.py"))
FINISHING: Roles = (
    ("trainer", 0, 2, True, ["until", GO]),
    ("trainer", 1, 2, True, ["until", GO]),
    ("engine", 0, 1, False, ["serve"]),
    ("router", 0, 1, False, ["serve"]),
    ("generator", 0, 1, True, ["until", GO]),
)


def role_of(job: Job, name: str) -> Role:
    """A role of the job, as it knows itself: with the run's token."""
    return Role.from_environment(job.seen()[name]["environ"])


def strange_store(job: Job) -> tuple[TCPStore, str]:
    """The store as any user of the network reaches it, and the prefix that the run's keys have there."""
    role = role_of(job, "trainer-0")
    store = TCPStore(role.store_host, role.store_port, wait_for_workers=False, timeout=timedelta(seconds=20))
    return store, f"attempt_{role.attempt}/"


def environ(job: Job) -> dict[str, str]:
    """For a further process of the job."""
    return {**os.environ, "TEST_MARKER": job.marker, "PYTHONPATH": str(REPOSITORY)}


# What is done


def suspend(job: Job) -> None:
    """`scontrol suspend` and `resume`: every process of the run stands still for a while."""
    pids = [pid for pid in job.processes() if pid != job.launcher.pid]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(1.0)


def forge(job: Job) -> None:
    """A stranger writes addresses, versions and a request to stop into the store."""
    store, prefix = strange_store(job)
    false = EngineAddress(index=0, url="http://10.6.6.6:1", world_size=1, incarnation=0).model_dump_json()
    stop = StopMessage(save=False, reason="mine").model_dump_json()
    for key, text in {"engine/0": false, "router": '"http://10.6.6.6:2"', "version": "9", "inbox/0": stop}.items():
        store.set(prefix + key, text)
        store.set(f"{prefix}{key}/guessed", Seal.of("guessed", 1).close(key, text))
    control = Control.connect(role_of(job, "trainer-0"), 20)
    assert [control.try_get(key) for key in ("engine/0", "router", "version", "inbox/0")] == [None] * 4
    assert control.version() is None
    assert control.post(StopMessage(save=True, reason="true")) == 1, "after the stranger's, not instead of it"


def flood_store(job: Job) -> None:
    """A stranger fills the store with keys that nobody asks for."""
    store, prefix = strange_store(job)
    for number in range(5000):
        store.set(f"{prefix}junk/{number}", "x" * 1000)


def tear_status(job: Job) -> None:
    """Somebody's editor, or a full disk, leaves half a status."""
    job.run.status.write_bytes(job.run.status.read_bytes()[:40])


def resume_again(job: Job) -> None:
    """`--resume` by another path while the run goes on, several at once."""
    link = job.root.parent / "link"
    link.symlink_to(job.run.path)
    tries = [subprocess.Popen([*RESUME, str(path)], env=environ(job), stderr=subprocess.PIPE) for path in (link,) * 2]
    said = [process.communicate(timeout=120)[1] for process in tries]
    # The second may come while the first is being refused.
    assert all(b"still goes on" in text or b"is being resumed" in text for text in said), said
    assert any(b"still goes on" in text for text in said), said


def freeze_trainer(job: Job) -> None:
    """Trainer 1 stands still for ever; trainer 0 gives up waiting for it a minute later, which the beats say."""
    control, now = Control.connect(role_of(job, "trainer-0"), 20), time.time()
    control.beat("trainer", 0, Beat(time=now, node="a", place="the training of step 3", since=now - 64))
    control.beat("trainer", 1, Beat(time=now - 65, node="b", place="the training of step 3", since=now - 66))
    os.kill(job.seen()["trainer-1"]["pid"], signal.SIGSTOP)
    os.kill(job.seen()["trainer-0"]["pid"], signal.SIGABRT)  # as gloo and NCCL end a process


def nothing(job: Job) -> None:
    """The role is the fault."""


@dataclass(frozen=True)
class Fault:
    """One row. role: who must be named, None where the run must survive. within: seconds until it has ended."""

    strike: Callable[[Job], None]
    role: str | None = None
    within: float = 20.0
    roles: Roles = FINISHING
    tiny: TinyModel | None = None
    """A model, where the configuration is looked at again."""
    says: str = ""
    """What the first line of the failure's tail holds."""


SURVIVED = [
    *(Fault(strike) for strike in (suspend, forge, flood_store, tear_status)),
    Fault(resume_again, tiny=SMALLEST),
]
NAMED = [
    Fault(freeze_trainer, "trainer-1", says="trainer-1 on b has given no sign of life for 65 s", roles=SERVING),
    Fault(nothing, "generator-0", roles=(*SERVING[:-1], ("generator", 0, 1, True, ["flood", "64"]))),
]


@pytest.mark.parametrize("fault", SURVIVED, ids=lambda fault: fault.strike.__name__)
def test_survived(start: Start, fault: Fault) -> None:
    job = start(fault.roles, tiny=fault.tiny)
    job.wait_started()
    run, seen = job.run, job.seen()
    fault.strike(job)
    assert {name: role["pid"] for name, role in job.seen().items()} == {name: r["pid"] for name, r in seen.items()}
    (run.path / GO).touch()
    assert job.end(timeout=fault.within) == 0, job.log()
    status = run.read_status()
    assert (status.state, status.attempt, status.failure) == ("completed", 1, None)
    assert events(run) == ["run_started", "stopped", "run_ended"]
    job.check_nothing_left()


@pytest.mark.parametrize("fault", NAMED, ids=lambda fault: f"{fault.strike.__name__}-{fault.role}")
def test_named(start: Start, fault: Fault) -> None:
    job = start(fault.roles)
    job.wait_started()
    fault.strike(job)
    assert job.end(timeout=fault.within) == 1, job.log()
    status = job.status()
    assert status.state == "failed"
    assert status.failure is not None
    assert f"{status.failure.role}-{status.failure.rank}" == fault.role
    assert fault.says in "".join(status.failure.tail[:1])
    assert job.run.status.stat().st_size < 1 << 20
    job.check_nothing_left()


def test_two_resumptions_of_a_failed_run_begin_one_attempt(start: Start) -> None:
    job = start((("trainer", 0, 1, True, ["fail", "0", "3"]),), tiny=SMALLEST)
    assert job.end(timeout=60) == 1
    run = job.run
    leave_checkpoint(run, 1)
    (job.root / "commands-grpo.json").write_text(json.dumps([("trainer", 0, 1, True, ["finish", "0"])]))
    tries = [
        subprocess.Popen([*RESUME, str(run.path)], env=environ(job), stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [process.communicate(timeout=120)[1] for process in tries]
    assert sum("UserError" in text for text in said) == 2, said
    assert sorted(process.returncode for process in tries) == [0, 1, 1], said
    until(lambda: run.read_status().terminal, 60, "the end of the resumed run")
    status = run.read_status()
    assert (status.state, status.attempt) == ("completed", 2)
    assert events(run) == ["run_started", "failure", "run_ended", "resumed", "run_started", "run_ended"]
    job.check_nothing_left()


def events(run: RunDir) -> list[str]:
    """The names of a run's events, in order."""
    return [json.loads(line)["event"] for line in run.events.read_text().splitlines()]
