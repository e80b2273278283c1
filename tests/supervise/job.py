"""Starts a run of small scripts through the real launcher, and looks at what it leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vime.config import Config, Model, TinyModel
from vime.config.compose import compose, dump_resolved, load_resolved
from vime.run.checkpoints import Facts, begin, commit, fixed_settings
from vime.run.directory import RunDir, Status, utc_now

SCRIPTS = Path(__file__).parent / "scripts"
REPOSITORY = Path(__file__).parents[2]
Roles = Sequence[tuple[str, int, int, bool, list[str]]]

SERVING: Roles = (
    ("trainer", 0, 2, True, ["serve"]),
    ("trainer", 1, 2, True, ["serve"]),
    ("engine", 0, 1, False, ["serve"]),
    ("router", 0, 1, False, ["serve"]),
    ("generator", 0, 1, True, ["serve"]),
)
"""One of each role, and a second trainer, that never end by themselves."""
SMALLEST = TinyModel(layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, ffn=8, context=128)


def config_in(root: Path, *overrides: str) -> Config:
    """The local tiny recipe with its runs in `root`, and a folder there in place of a model."""
    config = compose("local", "tiny_grpo", [f"run.root={root}", "model.warmup=null", *overrides])
    return config.model_copy(update={"model": Model(path=root)})


class Job:
    """A launcher process and the run that it started."""

    def __init__(
        self,
        root: Path,
        roles: Roles,
        *flags: str,
        environ: Mapping[str, str] | None = None,
        overrides: Sequence[str] = (),
        warmup: Roles | None = None,
        tiny: TinyModel | None = None,
    ) -> None:
        self.root = root
        self.marker = uuid.uuid4().hex
        self._count = len(roles)
        config = config_in(root, *overrides)
        if warmup is not None:
            config = config.model_copy(update={"model": Model(tiny=SMALLEST, warmup="tiny_sft")})
            (root / "commands-sft.json").write_text(json.dumps(warmup))
        if tiny is not None:
            config = config.model_copy(update={"model": Model(tiny=tiny)})
        (root / "commands-grpo.json").write_text(json.dumps(roles))
        (root / "config.yaml").write_text(dump_resolved(config))
        self.output = (root / "launcher.log").open("ab")
        self.launcher = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "launcher.py"), str(root / "config.yaml"), *flags],
            env={**os.environ, **(environ or {}), "TEST_MARKER": self.marker, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def run(self) -> RunDir:
        """The run directory, once there is one."""
        until(lambda: self._folders(), 30, "a run directory")
        return RunDir(self._folders()[0])

    def _folders(self) -> list[Path]:
        return [path.parent for path in self.root.glob("*/status.json")]

    def status(self) -> Status:
        """The run's status now."""
        return self.run.read_status()

    def seen(self) -> dict[str, dict[str, Any]]:
        """What each role that has started said: pid, port and environ, by name."""
        folder = self.run.path / "seen"
        found = folder.glob("[!.]*") if folder.exists() else ()
        return {path.name: json.loads(path.read_text()) for path in found}

    def wait_started(self, more: int = 0) -> None:
        """Wait until every role (and `more` others) runs."""
        until(lambda: len(self.seen()) == self._count + more, 60, f"{self._count} roles; launcher: {self.log()}")

    def log(self) -> str:
        """What the launcher printed."""
        return (self.root / "launcher.log").read_text()

    def processes(self) -> dict[int, str]:
        """pid -> command line of every live process of this job, the launcher included."""
        return marked(self.marker)

    def pid_of(self, part: str) -> int:
        """The pid of the one process whose command line holds `part`."""
        [pid] = [pid for pid, line in self.processes().items() if part in line]
        return pid

    def kill(self, pid: int) -> None:
        """SIGKILL, as the kernel does when memory runs out."""
        os.kill(pid, signal.SIGKILL)

    def end(self, timeout: float) -> int:
        """Wait for the launcher's end; its exit code."""
        return self.launcher.wait(timeout)

    def check_nothing_left(self) -> None:
        """No process of the job lives, and every port it used is free."""
        until(lambda: not self.processes(), 3, f"no process: {self.processes()}")
        store = {role["environ"]["VIME_STORE"].rpartition(":")[2] for role in self.seen().values()}
        wait_free({role["port"] for role in self.seen().values()} | {int(port) for port in store})

    def close(self) -> None:
        """End whatever a failed test left."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.launcher.wait(10)
        self.output.close()


def marked(marker: str) -> dict[int, str]:
    """pid -> command line of every live process whose environment holds `marker`."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found


def listening(pids: Iterable[int]) -> set[int]:
    """The TCP ports on which processes of `pids` listen."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            found = re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink()))
            if found:
                inodes.add(found[1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def check_killed_real_run(launcher: subprocess.Popen[Any], run: RunDir, marker: str, victim: str) -> None:
    """Kill one role of a run of real parts: it ends within 10 s, its status names the role, and nothing is left."""
    pids = marked(marker)
    ports = listening(pids)
    assert len(ports) >= 3, "the store, an engine and the router listen"
    log = (run.logs / "latest" / "supervisor-0.log").read_text()
    roles = {name: int(pid) for name, pid in re.findall(r"started (\S+): pid (\d+)", log)}
    [roles["supervisor-0"]] = [pid for pid, line in pids.items() if "vime.supervise.supervisor" in line]
    os.kill(roles[victim], signal.SIGKILL)
    assert launcher.wait(10) == 1
    status = run.read_status()
    assert status.state == "failed"
    assert status.failure is not None
    assert (f"{status.failure.role}-{status.failure.rank}", status.failure.signal) == (victim, "SIGKILL")
    until(lambda: not marked(marker), 3, f"no process: {marked(marker)}")
    wait_free(ports)


def wait_free(ports: Iterable[int]) -> None:
    """Wait until nothing listens on `ports`; 0 is none."""
    for port in set(ports) - {0}:
        # An ending process gives up its environment, by which it is found, a moment before its sockets.
        until(lambda port=port: not answers(port), 5, f"port {port} to be free")


def answers(port: int) -> bool:
    """Whether something listens on `port` of the loopback interface."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) != 0:
            return False
        # A connection from a free ephemeral port may get that very port, and then connects to itself.
        return probe.getsockname() != probe.getpeername()


def until(true: Callable[[], object], timeout: float, what: str) -> None:
    """Wait until `true()`; fails naming `what`."""
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.02)


def leave_checkpoint(run: RunDir, step: int) -> None:
    """A complete checkpoint without tensors, as if the run had saved at `step`."""
    writing = begin(run.checkpoints, step)
    settings = fixed_settings(load_resolved(run.config))
    sizes = {"tensor_parallel": 1, "pipeline_parallel": 1}
    commit(writing, Facts(step=step, cursor={}, attempt=1, time=utc_now(), settings=settings, **sizes))
