from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.supervise.job import until
from vime.config.compose import compose
from vime.errors import WaitTimeout
from vime.plan.plan import make_plan
from vime.run.directory import RunDir
from vime.supervise import lifeline
from vime.supervise.lifecycle import prepare
from vime.supervise.lifeline import Lifeline, hold
from vime.supervise.step_rank import PREFIX

CHILD = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + CHILD


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    config = compose("minislurm", "tiny_grpo", [f"run.root={tmp_path}"])
    prepare(RunDir(tmp_path), config, make_plan(config))
    return RunDir(tmp_path)


def _wrapper(run: RunDir, lifeline: Lifeline, program: str) -> subprocess.Popen[str]:
    environ = {
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "SLURMD_NODENAME": "n1",
        "VIME_RUN_DIR": str(run.path),
        "VIME_ATTEMPT": "1",
        "VIME_ROLE": "trainer",
        "VIME_LIFELINE": lifeline.address,
        "VIME_INTERFACE": "lo",
        "VIME_STOP_TIMEOUT": "0.5",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "vime.supervise.step_rank", sys.executable, "-S", "-c", program],
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        text=True,
    )


def _reports(wrapper: subprocess.Popen[str]) -> list[dict[str, object]]:
    text, _ = wrapper.communicate(timeout=30)
    return [json.loads(line[len(PREFIX) :]) for line in text.splitlines()]


@pytest.mark.parametrize(("program", "how"), [(CHILD, "SIGTERM"), (STUBBORN, "SIGKILL")])
@pytest.mark.parametrize("by", ["lifeline", "signal"])
def test_a_rank_ends_with_its_lifeline_or_by_a_signal(run: RunDir, program: str, how: str, by: str) -> None:
    lifeline = Lifeline("127.0.0.1")
    wrapper = _wrapper(run, lifeline, program)
    log = run.log("trainer", 1, 1)
    until(lambda: log.exists() and log.read_text().endswith("\n"), 30, "the role")
    pid = int(log.read_text())
    if by == "lifeline":
        lifeline.close()
    else:
        # The first may be a preemption's, and is the supervisor's to judge; the second ends the role.
        wrapper.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert wrapper.poll() is None
        wrapper.send_signal(signal.SIGTERM)
    started, *told, ended = _reports(wrapper)
    assert [(report["told"], report["ended"]) for report in told] == [(True, False)] * (by == "signal")
    assert (started["pid"], started["node"], started["ended"]) == (pid, "n1", False)
    assert (ended["rank"], ended["signal"], ended["exit_code"], ended["stopped"]) == (1, how, None, True)
    assert not Path(f"/proc/{pid}").exists()


def test_a_rank_that_ends_by_itself_says_how(run: RunDir) -> None:
    lifeline = Lifeline("127.0.0.1")
    wrapper = _wrapper(run, lifeline, "print('last words'); raise SystemExit(7)")
    *_, ended = _reports(wrapper)
    assert (ended["exit_code"], ended["signal"], ended["stopped"]) == (7, None, False)
    assert wrapper.returncode == 7
    assert run.log("trainer", 1, 1).read_text() == "last words\n"
    lifeline.close()


def test_a_supervisor_that_was_never_there_is_named() -> None:
    lifeline = Lifeline("127.0.0.1")
    lifeline.close()
    began = time.monotonic()
    with pytest.raises(WaitTimeout, match=rf"the supervisor at {lifeline.address}"):
        hold(lifeline.address)
    assert time.monotonic() - began < 5


def test_more_ranks_than_the_kernel_queues_hold_the_lifeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """somaxconn is 128 on older kernels: what nobody accepts is refused beyond it."""
    monkeypatch.setattr(lifeline, "BACKLOG", 2)
    monkeypatch.setattr(lifeline, "CONNECT_TIMEOUT", 2.0)
    held = Lifeline("127.0.0.1")
    ranks = [hold(held.address) for _ in range(20)]
    held.close()
    for rank in ranks:
        rank.settimeout(5)
        assert rank.recv(1) == b""
