"""What one vLLM process leaves: nothing, however it ends. A script that leaves the same plays vLLM."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from vime.rollout.engine.server import LONGEST_FOLDER, Server

PLAYED = """
import multiprocessing, os, signal, socket, sys, time
from pathlib import Path
folder = Path(os.environ["VLLM_RPC_BASE_PATH"])
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
unix = socket.socket(socket.AF_UNIX)
unix.bind(str(folder / ("x" * 36)))
lock = multiprocessing.get_context("spawn").Lock()
said = Path(sys.argv[1])
said.with_suffix(".tmp").write_text(f"{folder}\\n/dev/shm/sem.{lock._semlock.name.removeprefix('/')}")
said.with_suffix(".tmp").rename(said)
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="semaphores are files on Linux only")
@pytest.mark.parametrize("end", ["asked", "stubborn", "killed"])
def test_an_engine_leaves_no_sockets_and_no_semaphores(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("t" * LONGEST_FOLDER)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    said = tmp_path / "said"
    environment = {**os.environ, "VIME_ENGINE_TOKEN": "t"}
    server = Server.start([sys.executable, "-c", PLAYED, str(said), end], environment, "")
    deadline = time.monotonic() + 30
    while not said.exists():
        assert time.monotonic() < deadline
        assert server.process.poll() is None
        time.sleep(0.02)
    left = [Path(line) for line in said.read_text().splitlines()]
    assert all(path.exists() for path in left)
    if end == "killed":
        server.process.send_signal(signal.SIGKILL)
    server.kill_tree(0.5)
    deadline = time.monotonic() + 5  # of a killed server the tracker is no child of this process, which does not adopt
    while any(path.exists() for path in left):
        assert time.monotonic() < deadline, [path for path in left if path.exists()]
        time.sleep(0.02)
