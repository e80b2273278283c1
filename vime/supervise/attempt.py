"""One attempt of a run: start every role, watch until the run is completed or something fails, end what is left."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vime.buffer.control import Control, StopMessage
from vime.config import Cluster
from vime.errors import BadMessage, ControlLost, UserError
from vime.run.checkpoints import newest_checkpoint
from vime.run.directory import Failure, RunDir, State, Status, utc_now
from vime.run.jsonl import last_step
from vime.run.role import Role
from vime.slurm.allocation import Allocation
from vime.slurm.environment import srun_environment, without_job
from vime.slurm.scheduler import job_states
from vime.slurm.srun import THREADS
from vime.supervise.commands import Command
from vime.supervise.failure import (
    GRACE,
    describe,
    describe_silent,
    finished,
    first_cause,
    stop_outcome,
    with_disk,
)
from vime.supervise.lifeline import VARIABLE as LIFELINE
from vime.supervise.lifeline import Lifeline
from vime.supervise.processes import End, Processes, spawn
from vime.supervise.step_process import StepProcess
from vime.supervise.step_rank import INTERFACE, STOP_TIMEOUT
from vime.supervise.stop_signals import Stopped, StopSignals

POLL = 0.25
"""Longest seconds between two looks at the roles; an ended child of this process wakes it at once."""
STEP_INTERVAL = 1.0
"""Seconds between two looks at the metrics for `status.step`."""
WRAPPER_TIME = 4.0
"""Seconds that the wrappers of a step get, besides the roles' own, to kill what is left and to report."""
EVENT_TIME = 5.0
"""Seconds that an event which a role wrote before its end may take to show here (NFS)."""
STOP_GRACE = 5.0
"""Seconds in which SLURM, having ended some ranks, tells the supervisor too."""
TOLD_GRACE = 2.0
"""Seconds in which SLURM, having told ranks to stop, tells all of them and the supervisor too."""


class Superseded(Exception):
    """SLURM gave this node up for lost and started the run again elsewhere."""


@dataclass
class Attempt:
    """One attempt of a run, from the start of its roles to `status.json`'s last word."""

    run: RunDir
    cluster: Cluster
    commands: Sequence[Command]
    model: Path
    signals: StopSignals
    host: str
    """Address that the run's store binds."""
    allocation: Allocation | None = None
    """The SLURM job whose batch step this is."""

    def supervise(self) -> Status:
        """Run all roles to the end and leave nothing of them behind. Returns the status that was written.

        The state is completed when every role that finishes exited 0; failed after any other end of any role; cancelled
        when the run was asked to stop (TERM). USR2 lets the trainers save first: the state is requeued where SLURM can
        start the run again, else timeout.
        """
        status = replace(self.run.read_status(), state="running")
        token = secrets.token_urlsafe(32)
        control, port = Control.serve(self.host, status.attempt, token)
        self._supervisor = Role(
            run_dir=self.run.path,
            store_host=self.host,
            store_port=port,
            name="supervisor",
            attempt=status.attempt,
            token=token,
            rank=0,
            world_size=1,
            host=self.host,
            model=self.model,
        )
        begun: dict[str, Any] = {"model": str(self.model), "checkpoint": newest_checkpoint(self.run)}
        if self.allocation is not None:
            begun |= {"job": self.allocation.job_id, "hosts": self.allocation.hosts}
        self.run.append_event(self._supervisor, "run_started", **begun)
        processes = Processes()
        lifeline = self._lifeline = None if self.allocation is None else Lifeline(self.host)
        state: State = "failed"
        failure: Failure | None = None
        superseded = False
        try:
            self._start_all(processes, status.attempt, lifeline)
            cause = self._watch(processes, status)
            state = "completed" if cause is None else "failed"
            failure = None if cause is None else with_disk(self._failure(cause, control), self.run)
        except Stopped as stop:
            state, failure = self._stop(stop, control, processes)
        except Superseded:
            print(f"{utc_now()} a later attempt has begun elsewhere", flush=True)
            superseded = True
        finally:
            # Written before the teardown as well: the cause must not be lost when this process is killed meanwhile.
            status = replace(status, step=last_step(self.run.metrics) or status.step, failure=failure)
            superseded = superseded or attempt_now(self.run, status.attempt) != status.attempt
            if self.allocation is not None and state in ("cancelled", "timeout", "requeued"):
                # SLURM kills this process KillWait seconds after it told it to stop: the last word comes first.
                status = replace(status, state=state)
            if (failure is not None or status.state == state) and not superseded:
                with contextlib.suppress(OSError):  # on a full disk there is space for one more status, the last
                    self.run.write_status(status)
            if failure is not None and not superseded:
                self._event("failure", role_failed=failure.role, rank_failed=failure.rank)
            if lifeline is not None:
                lifeline.close()
            left = processes.stop(self.cluster.stop_timeout + (0 if lifeline is None else WRAPPER_TIME))
            if left:
                print(f"still there after SIGKILL: {left}", flush=True)
        if superseded or attempt_now(self.run, status.attempt) != status.attempt:
            return self.run.read_status()
        del control  # the store lives until here: a role that is stopping may still use it
        status = replace(status, state=state, ended=utc_now())
        self.run.write_status(status)
        self._event("run_ended", state=state)
        return status

    def _failure(self, cause: End, control: Control) -> Failure:
        """What is to blame for an end: itself, or a trainer rank that it waited for."""
        ranks = max((command.world_size for command in self.commands if command.role == "trainer"), default=0)
        try:
            beats = control.beats("trainer", ranks)
        except (ControlLost, BadMessage) as error:
            print(f"{utc_now()} the signs of life cannot be read: {error}", flush=True)
            beats = {}
        attempt = self._supervisor.attempt
        return describe_silent(cause, beats, lambda rank: self.run.log("trainer", rank, attempt)) or describe(cause)

    def _event(self, event: str, **details: Any) -> None:
        """Record what happened, unless the disk is full: the status, which has space of its own, says that."""
        with contextlib.suppress(OSError):
            self.run.append_event(self._supervisor, event, **details)

    def _stop(self, stop: Stopped, control: Control, processes: Processes) -> tuple[State, Failure | None]:
        """What a request to stop leads to. USR2 gives the trainers time to save."""
        print(f"{utc_now()} {stop}", flush=True)
        if stop.signum == signal.SIGUSR2 and not stop.orphaned:
            try:
                saved = self._save(control, processes)
                print(f"{utc_now()} {'the trainers saved' if saved else 'the step was abandoned'}", flush=True)
            except Stopped as second:  # nothing more will be saved
                print(f"{utc_now()} {second}", flush=True)
                stop = second
        if self._lifeline is not None and (stop.signum != signal.SIGUSR2 or stop.orphaned):
            self._lifeline.close()  # the roles' time runs already
        return stop_outcome(stop, self.run, self.cluster, self.allocation)

    def _save(self, control: Control, processes: Processes) -> bool:
        """Ask the trainers to save and stop, and wait for it a bounded time. Returns whether they did."""
        trainers = {command.name for command in self.commands if command.role == "trainer"}
        control.post(StopMessage(save=True, reason="the time limit is near, or the job is preempted"))
        deadline = time.monotonic() + save_time(self.cluster)
        while trainers and time.monotonic() < deadline:
            try:
                self.signals.wait(POLL)
            except Stopped as again:
                # SLURM may signal every process of the batch step: then it comes from the guardian a second time.
                if again.signum != signal.SIGUSR2 or again.orphaned:
                    raise
            for end in processes.poll():
                if end.command.role == "trainer" and not end.succeeded:
                    return False
                trainers.discard(end.command.name)
        return not trainers

    def _start_all(self, processes: Processes, attempt: int, lifeline: Lifeline | None) -> None:
        logs = self.run.log("supervisor", 0, attempt).parent
        logs.mkdir(parents=True, exist_ok=True)
        _point(self.run.logs / "latest", logs.name)
        for command in self.commands:
            if command.rank is not None:
                processes.start(command, self._environment(command), self.run.log(command.role, command.rank, attempt))
            else:
                assert lifeline is not None, "a step needs a SLURM job"
                output = logs / f"{command.role}.step.log"
                popen = spawn(command.argv, self._step_environment(command, lifeline), output)
                processes.running.append(StepProcess(command, popen, output, self.run, attempt))
            print(f"{utc_now()} started {command.name}: pid {processes.running[-1].popen.pid}", flush=True)

    def _environment(self, command: Command) -> dict[str, str]:
        role = replace(
            self._supervisor,
            name=command.role,
            rank=command.rank or 0,
            world_size=command.world_size,
            host=command.host,
        )
        network = {"GLOO_SOCKET_IFNAME": self.cluster.interface, "NCCL_SOCKET_IFNAME": self.cluster.interface}
        # How many threads a role has is the plan's to say, not the login shell's.
        inherited = {name: value for name, value in without_job(os.environ).items() if name not in THREADS}
        return {
            **inherited,
            "PYTHONUNBUFFERED": "1",  # a log must hold what was printed before a kill
            **network,
            **command.environment,
            **self.cluster.environment,
            **self._component_environment(command.role),
            **role.environment(),
        }

    def _component_environment(self, role: str) -> dict[str, str]:
        slurm = self.cluster.slurm
        return {"trainer": slurm.trainer.environment, "engine": slurm.rollout.environment}.get(role, {})

    def _step_environment(self, command: Command, lifeline: Lifeline) -> dict[str, str]:
        """As `_environment` for an srun: what differs between ranks and nodes is found out there."""
        environment = {**srun_environment(os.environ), **self._environment(command)}
        said = {**command.environment, **self.cluster.environment, **self._component_environment(command.role)}
        threads = [name for name in THREADS if name not in said]
        for name in ("VIME_RANK", "VIME_WORLD_SIZE", "VIME_HOST", *threads):
            environment.pop(name, None)
        return {
            **environment,
            LIFELINE: lifeline.address,
            INTERFACE: self.cluster.interface,
            STOP_TIMEOUT: str(self.cluster.stop_timeout),
        }

    def _watch(self, processes: Processes, status: Status) -> End | None:
        """Wait for the end. Returns its cause, or None when the run is completed."""
        unfinished = {command.name for command in self.commands if command.finishes}
        step, looked = status.step, time.monotonic()
        while unfinished:
            unexpected = []
            for end in processes.poll():
                if end.succeeded and self._finished(end, status.attempt):
                    unfinished.discard(end.command.name)
                else:
                    unexpected.append(end)
            if unexpected:
                unexpected += self._collect(processes, stopping=all(end.stopped for end in unexpected))
                causes = [end for end in unexpected if not end.stopped]
                if not causes and self._job_is_over():
                    # The slurmd of this node is gone, or it would have told this process too.
                    raise Stopped(signal.SIGTERM, orphaned=False)
                return first_cause(causes or unexpected)
            if (told := self._told(processes)) is not None:
                return told
            if unfinished:
                self.signals.wait(POLL)
            if time.monotonic() - looked > STEP_INTERVAL:
                looked = time.monotonic()
                if attempt_now(self.run, status.attempt) != status.attempt:
                    raise Superseded
                if (now := last_step(self.run.metrics)) > step:
                    step = now
                    with contextlib.suppress(OSError):  # whoever needs the disk more fails by it, and is named
                        self.run.write_status(replace(status, step=step))
        return None

    def _told(self, processes: Processes) -> End | None:
        """The end of a rank that someone told to stop, and not the rest of its step; None while there is no such rank.

        Decided TOLD_GRACE seconds after the first was told. Where SLURM ends the job it has told this process by then,
        which raised Stopped. A preemption with grace time tells every rank of a component's steps and not the batch
        step: Stopped is raised here, as by the signal that asks to save.
        """
        steps = [process for process in processes.running if isinstance(process, StepProcess) and process.told]
        told = [end for step in steps for end in step.told.values()]
        if not told or time.monotonic() - min(end.seconds for end in told) < TOLD_GRACE:
            return None
        if any(len(step.told) == step.command.world_size for step in steps):
            print(
                f"{utc_now()} SLURM tells the roles to stop and not this step: preempted, with grace time", flush=True
            )
            raise Stopped(signal.SIGUSR2, orphaned=False)
        return first_cause(told)

    def _finished(self, end: End, attempt: int) -> bool:
        """Whether the role has said that its work is done: here, or on a node whose file shows a moment later."""
        deadline = time.monotonic() + EVENT_TIME
        while not (done := finished(end, self.run, attempt)) and time.monotonic() < deadline:
            self.signals.wait(POLL)
        return done

    def _job_is_over(self) -> bool:
        """Whether SLURM says that the job does not run any more; no answer is no."""
        job = None if self.allocation is None else self.allocation.job_id
        return job is not None and job_states([job]).get(job, "RUNNING") != "RUNNING"

    def _collect(self, processes: Processes, stopping: bool) -> list[End]:
        """Unexpected ends in the moment after the first one.

        `stopping`: all that ended were told to by SLURM, which is about to tell this process, so Stopped is raised.
        """
        ends: list[End] = []
        deadline = time.monotonic() + (STOP_GRACE if stopping else GRACE)
        while (processes.running or stopping) and (left := deadline - time.monotonic()) > 0:
            try:
                self.signals.wait(min(left, POLL))
            except Stopped:
                if stopping and all(end.stopped for end in ends):
                    raise
            ends += [end for end in processes.poll() if not end.succeeded]
        return ends


def _point(link: Path, target: str) -> None:
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.symlink_to(target)
    temporary.replace(link)


def attempt_now(run: RunDir, otherwise: int) -> int:
    """The attempt that the run's status names; `otherwise` when it cannot be read at this moment."""
    try:
        return run.read_status().attempt
    except UserError:
        return otherwise


def save_time(cluster: Cluster) -> float:
    """Seconds that trainers get to finish their step and save after USR2, so that the rest can end before the limit."""
    if cluster.scheduler == "local":
        return cluster.save_timeout
    rest = cluster.stop_timeout + WRAPPER_TIME + 3 * GRACE
    return max(1.0, min(cluster.save_timeout, cluster.slurm.signal_seconds - rest))
