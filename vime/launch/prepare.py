"""What lies in a run directory before anything runs."""

from __future__ import annotations

from vime.config import Config
from vime.config.compose import dump_resolved
from vime.plan.plan import Plan
from vime.run.directory import RunDir, Status
from vime.run.files import write_atomic


def prepare(run: RunDir, config: Config, plan: Plan) -> None:
    """Write configuration, plan and a pending status into the run's folder."""
    write_atomic(run.config, dump_resolved(config))
    write_atomic(run.plan, plan.model_dump_json(indent=2) + "\n")
    run.write_status(Status(state="pending"))
