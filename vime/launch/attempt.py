"""One attempt of a run: start every role, watch until the run is completed or something fails, end what is left."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vime.buffer.control import Control
from vime.config import Cluster
from vime.launch.commands import Command
from vime.launch.failure import GRACE, describe, first_cause, stop_outcome
from vime.launch.processes import End, Processes
from vime.launch.stop_signals import Stopped, StopSignals
from vime.role import Role
from vime.run_dir import Failure, RunDir, State, Status, last_step, utc_now

POLL = 0.25
"""Longest seconds between two looks at the roles; an ended child of this process wakes it at once."""
STEP_INTERVAL = 1.0
"""Seconds between two looks at the metrics for `status.step`."""


@dataclass
class Attempt:
    """One attempt of a run, from the start of its roles to `status.json`'s last word."""

    run: RunDir
    cluster: Cluster
    commands: Sequence[Command]
    model: Path
    signals: StopSignals

    def supervise(self) -> Status:
        """Run all roles to the end and leave nothing of them behind. Returns the status that was written.

        The state is completed when every role that finishes exited 0; failed after any other end of any role; cancelled
        or timeout when the run was asked to stop (TERM, USR2).
        """
        status = replace(self.run.read_status(), state="running")
        control, port = Control.serve(self.cluster.host, status.attempt)
        self._supervisor = Role(
            run_dir=self.run.path,
            store_host=self.cluster.host,
            store_port=port,
            name="supervisor",
            attempt=status.attempt,
            token=secrets.token_urlsafe(32),
            rank=0,
            world_size=1,
            host=self.cluster.host,
            model=self.model,
        )
        self.run.append_event(self._supervisor, "run_started", model=str(self.model))
        processes = Processes()
        state: State = "failed"
        failure: Failure | None = None
        try:
            self._start_all(processes, status.attempt)
            cause = self._watch(processes, status)
            state = "completed" if cause is None else "failed"
            failure = None if cause is None else describe(cause)
        except Stopped as stop:
            print(f"{utc_now()} {stop}", flush=True)
            state, failure = stop_outcome(stop, self.run.log("supervisor", 0, status.attempt))
        finally:
            # Written before the teardown as well: the cause must not be lost when this process is killed meanwhile.
            status = replace(status, step=last_step(self.run.metrics) or status.step, failure=failure)
            if failure is not None:
                self.run.write_status(status)
                self.run.append_event(self._supervisor, "failure", role_failed=failure.role, rank_failed=failure.rank)
            left = processes.stop(self.cluster.stop_timeout)
            if left:
                print(f"still there after SIGKILL: {left}", flush=True)
        del control  # the store lives until here: a role that is stopping may still use it
        status = replace(status, state=state, ended=utc_now())
        self.run.write_status(status)
        self.run.append_event(self._supervisor, "run_ended", state=state)
        return status

    def _start_all(self, processes: Processes, attempt: int) -> None:
        logs = self.run.log("supervisor", 0, attempt).parent
        logs.mkdir(parents=True, exist_ok=True)
        _point(self.run.logs / "latest", logs.name)
        for command in self.commands:
            log = self.run.log(command.role, command.rank, attempt)
            processes.start(command, self._environment(command), log)
            print(f"{utc_now()} started {command.name}: pid {processes.running[-1].popen.pid}", flush=True)

    def _environment(self, command: Command) -> dict[str, str]:
        role = replace(
            self._supervisor, name=command.role, rank=command.rank, world_size=command.world_size, host=command.host
        )
        network = {"GLOO_SOCKET_IFNAME": self.cluster.interface, "NCCL_SOCKET_IFNAME": self.cluster.interface}
        return {
            **os.environ,
            "PYTHONUNBUFFERED": "1",  # a log must hold what was printed before a kill
            **network,
            **command.environment,
            **self.cluster.environment,
            **role.environment(),
        }

    def _watch(self, processes: Processes, status: Status) -> End | None:
        """Wait for the end. Returns its cause, or None when the run is completed."""
        unfinished = {command.name for command in self.commands if command.finishes}
        step, looked = status.step, time.monotonic()
        while unfinished:
            unexpected = []
            for end in processes.poll():
                if end.succeeded:
                    unfinished.discard(end.command.name)
                else:
                    unexpected.append(end)
            if unexpected:
                return first_cause(unexpected + self._collect(processes))
            if unfinished:
                self.signals.wait(POLL)
            if time.monotonic() - looked > STEP_INTERVAL:
                looked = time.monotonic()
                if (now := last_step(self.run.metrics)) > step:
                    step = now
                    self.run.write_status(replace(status, step=step))
        return None

    def _collect(self, processes: Processes) -> list[End]:
        """Unexpected ends in the moment after the first one."""
        ends: list[End] = []
        deadline = time.monotonic() + GRACE
        while processes.running and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(Stopped):  # it is ending already
                self.signals.wait(min(left, POLL))
            ends += [end for end in processes.poll() if not end.succeeded]
        return ends


def _point(link: Path, target: str) -> None:
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.symlink_to(target)
    temporary.replace(link)
