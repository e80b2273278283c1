"""What a run does now, from the files it has written so far."""

from __future__ import annotations

from vime.report.events import Roles
from vime.report.settings import read_settings
from vime.run.directory import RunDir
from vime.run.jsonl import last_step


def read_phase(run: RunDir, roles: Roles, done: int, planned: int | None, state: str) -> str:
    """One phrase: waiting for the scheduler, preparing the model, starting, at step k of N, or finishing."""
    if state == "pending":
        return "waiting to start"
    if state == "requeued":
        return "waiting to start again"
    if roles.started and done and not starting(roles):
        return finishing_or_step(done, planned)
    if roles.started:
        return starting(roles) or finishing_or_step(done, planned)
    warmup = RunDir(run.path / "warmup")
    if warmup.path.is_dir():
        return warming_up(last_step(warmup.metrics), read_settings(warmup.config).integer("training.steps"))
    return "preparing the model" if not done else finishing_or_step(done, planned)


def finishing_or_step(done: int, planned: int | None) -> str:
    """`done` steps are complete, so the next one is in work, unless none is left."""
    if planned is not None and done >= planned:
        return "finishing: last evaluation, export"
    return f"step {done + 1}" + (f" of {planned}" if planned else "")


def warming_up(done: int, planned: int | None) -> str:
    """Supervised warm-up of a tiny model, before the run's own steps."""
    return "warming up the model" + (f", step {done} of {planned}" if planned else f", step {done}" if done else "")


def starting(roles: Roles) -> str | None:
    """What the roles of this attempt still wait for; None once all that started are ready."""
    waiting = sorted({name.rpartition("-")[0] for name in roles.started - roles.ready})
    return f"starting: {', '.join(waiting)} not ready yet" if waiting else None
