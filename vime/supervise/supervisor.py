"""The supervisor of a run: `python -m vime.supervise.supervisor RUN_DIR`, started by the guardian.

It makes sure that the initial policy exists (which may take a whole run of its own, the warm-up), then runs one attempt
and ends with exit code 0 when the run completed, else 1.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TextIO

from vime.config import Config, TinyModel
from vime.config.compose import compose_warmup, load_resolved
from vime.errors import UserError
from vime.models.cache import cached_model, model_key
from vime.plan.plan import Plan, make_plan
from vime.run.directory import Failure, RunDir, Status, utc_now
from vime.run.network import interface_address
from vime.run.role import Role, become_subreaper
from vime.slurm.allocation import Allocation
from vime.supervise.attempt import Attempt
from vime.supervise.commands import Command, role_commands, step_commands
from vime.supervise.failure import stop_outcome
from vime.supervise.lifecycle import MAX_ATTEMPTS_WITHOUT_PROGRESS, prepare, refusals
from vime.supervise.preflight import MAX_TOLD, NodeProblem, check_nodes, shared_fault
from vime.supervise.stop_signals import Stopped, StopSignals

Commands = Callable[[Config, Plan], Sequence[Command]]
WARMUP_SECTIONS = ("model", "data", "demonstrations", "algorithm", "rollout", "training")
"""Sections of a warm-up recipe that change the model it makes."""


def run_commands(config: Config, plan: Plan) -> Sequence[Command]:
    """What to start for each role: processes of this machine, or steps of the SLURM job that this process is in."""
    if config.cluster.scheduler == "local":
        return role_commands(config, plan)
    return step_commands(config, plan, Allocation.from_environment(os.environ, plan))


class WarmupFailed(Exception):
    """The nested run that makes the initial policy did not complete."""

    def __init__(self, status: Status, run: RunDir) -> None:
        super().__init__(f"the warm-up run {run.path} ended {status.state}")
        self.status = status


def supervise(run: RunDir, signals: StopSignals, commands: Commands = run_commands) -> Status:
    """Bring the run in `run` to its end: its model, then all roles. Returns the status that was written."""
    config = load_resolved(run.config)
    plan = Plan.model_validate_json(run.plan.read_bytes())
    before = run.read_status()
    status = replace(before, state="running", started=before.started or utc_now(), ended=None, failure=None)
    run.write_status(status)
    cluster = config.cluster
    local = cluster.scheduler == "local"
    allocation = None if local else Allocation.from_environment(os.environ, plan)
    try:
        if allocation is not None:
            problems = check_nodes(run, config, plan, allocation, signals, status.attempt)
            if problems:
                return _refuse(run, status, problems, allocation, requeue=cluster.slurm.requeue)
        model = initial_policy(config, run, signals, commands)
    except WarmupFailed as error:
        state, failure = error.status.state, error.status.failure
        if allocation is not None and state in ("cancelled", "timeout"):
            # The nested run knows no scheduler: why it was stopped is asked here.
            signum = signal.SIGUSR2 if state == "timeout" else signal.SIGTERM
            state, failure = stop_outcome(Stopped(signum, orphaned=False), run, cluster, allocation)
        return _end(run, replace(status, state=state, failure=failure))
    except Stopped as stop:
        state, failure = stop_outcome(stop, run, cluster, allocation)
        return _end(run, replace(status, state=state, failure=failure))
    attempt = Attempt(
        run=run,
        cluster=cluster,
        commands=commands(config, plan),
        model=model,
        signals=signals,
        host=cluster.host if local else interface_address(cluster.interface),
        allocation=allocation,
    )
    return attempt.supervise()


def initial_policy(config: Config, run: RunDir, signals: StopSignals, commands: Commands = run_commands) -> Path:
    """The Hugging Face folder that training starts from, made first where the configuration says so.

    Raises WarmupFailed, Stopped, and WaitTimeout when another run makes the same model for too long.
    """
    if config.model.path is not None:
        return config.model.path.absolute()
    warmup = compose_warmup(config)
    if warmup is None:
        assert config.model.tiny is not None, "a model has a path or is tiny"
        return _tiny_model(config.model.tiny, signals)
    nested = RunDir(run.path / "warmup")

    def make(folder: Path) -> None:
        print(f"{utc_now()} warming up the model in {nested.path}", flush=True)
        shutil.copytree(_warmed_up(warmup, nested, signals, commands), folder, dirs_exist_ok=True)

    sections = {name: getattr(warmup, name).model_dump(mode="json") for name in WARMUP_SECTIONS}
    return cached_model(model_key({**sections, "seed": warmup.run.seed}), make, signals.wait)


def _tiny_model(tiny: TinyModel, signals: StopSignals) -> Path:
    def make(folder: Path) -> None:
        from vime.models.tiny import make_tiny

        make_tiny(tiny, folder)

    return cached_model(model_key({"tiny": tiny.model_dump(mode="json")}), make, signals.wait)


def _warmed_up(config: Config, nested: RunDir, signals: StopSignals, commands: Commands) -> Path:
    config = _on_this_node(config)
    place = config.run.model_copy(update={"root": nested.path.parent, "name": nested.path.name})
    config = config.model_copy(update={"run": place})
    shutil.rmtree(nested.path, ignore_errors=True)  # of an earlier attempt
    nested.path.mkdir(mode=0o700)
    prepare(nested, config, make_plan(config))
    status = supervise(nested, signals, commands)
    if status.state != "completed":
        raise WarmupFailed(status, nested)
    return nested.export / f"step_{config.training.steps}"


def _on_this_node(config: Config) -> Config:
    """`config` with every role as a process of this node: what a warm-up trains is small enough for one."""
    if config.cluster.scheduler == "local":
        return config
    here = {"scheduler": "local", "host": interface_address(config.cluster.interface)}
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=here)})


def _refuse(
    run: RunDir, status: Status, problems: Sequence[NodeProblem], allocation: Allocation, *, requeue: bool
) -> Status:
    """The end of an attempt whose nodes are not fit: the guardian requeues the job away from them, within limits.

    A fault that most nodes share is the run's: it fails at once, and no node is refused.
    """
    nodes = sorted({problem.node for problem in problems})
    log = run.log("supervisor", 0, status.attempt)
    fault = shared_fault(problems, allocation.hosts)
    if fault is not None:
        print(f"{utc_now()} preflight: {fault}", flush=True)
        tail = [fault, *(str(problem) for problem in problems[:MAX_TOLD])]
        failure = Failure("preflight", 0, nodes[0], None, None, utc_now(), str(log), tail)
        return _end(run, replace(status, state="failed", failure=failure))
    again = requeue and refusals(run) < MAX_ATTEMPTS_WITHOUT_PROGRESS
    role = Role(run.path, "", 0, "supervisor", status.attempt, "", 0, 1, "", Path())
    run.append_event(role, "nodes_refused", nodes=nodes, problems=[str(problem) for problem in problems])
    if again:
        return _end(run, replace(status, state="requeued"))
    tail = [str(problem) for problem in problems]
    failure = Failure("preflight", 0, nodes[0], None, None, utc_now(), str(log), tail)
    return _end(run, replace(status, state="failed", failure=failure))


def _end(run: RunDir, status: Status) -> Status:
    ended = replace(status, ended=utc_now())
    run.write_status(ended)
    return ended


class _Tolerant(io.TextIOBase):
    """A log that goes without what it cannot write: a full disk must not end the one who is to report it."""

    def __init__(self, log: TextIO) -> None:
        super().__init__()
        self._log = log

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._log.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._log.flush()

    def fileno(self) -> int:
        return self._log.fileno()


def main(arguments: Sequence[str], commands: Commands = run_commands) -> NoReturn:
    """Supervise the run of `arguments`: its folder and, from a guardian, the guardian's pid. Ends this process."""
    code = 1
    sys.stdout, sys.stderr = _Tolerant(sys.stdout), _Tolerant(sys.stderr)
    try:
        code = _main(arguments, commands)
    except Exception:  # noqa: BLE001 - the traceback is the failure's log tail
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # The status is final, so this process must be gone. Unloading torch can take longer than everything before.
    os._exit(code)


def _main(arguments: Sequence[str], commands: Commands) -> int:
    signals = StopSignals(int(arguments[1]) if len(arguments) > 1 else None)
    become_subreaper()
    try:
        status = supervise(RunDir(Path(arguments[0])), signals, commands)
    except UserError as error:
        print(f"error: {error}", flush=True)
        return 1
    print(f"{utc_now()} run {status.state}", flush=True)
    return 0 if status.state == "completed" else 1


if __name__ == "__main__":
    main(sys.argv[1:])
