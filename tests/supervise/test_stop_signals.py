"""Signals that are fetched: in processes of their own, because a test must not stop itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WAIT = """
import signal
from vime.supervise.stop_signals import Stopped, StopSignals
signals = StopSignals()
print("waits", flush=True)
try:
    for _ in range(4):
        signals.wait(0.5)
    print("nothing came", flush=True)
    signals.wait(20)
except Stopped as stop:
    print(stop, flush=True)
"""


def stopped(pid: int) -> bool:
    return ") T" in Path(f"/proc/{pid}/stat").read_text()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_process_that_was_suspended_goes_on_waiting() -> None:
    with subprocess.Popen([sys.executable, "-c", WAIT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        # As `scontrol suspend` and `resume` do, for longer than a wait may last.
        os.kill(process.pid, signal.SIGSTOP)
        while not stopped(process.pid):
            time.sleep(0.01)
        time.sleep(0.6)
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.readline() == "nothing came\n"
        process.send_signal(signal.SIGUSR2)
        assert process.stdout.readline() == "stopped by SIGUSR2\n"
        assert process.wait(10) == 0
