"""The combinations of a sweep, composed and planned: what a person is shown before anything is submitted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vime.config import Config
from vime.config.compose import compose
from vime.errors import UserError
from vime.launch.preview import preview_data, print_preview
from vime.launch.sweep.file import Combination, Slot, Sweep, look
from vime.plan.checks import check_model
from vime.plan.plan import Plan, make_plan
from vime.run.directory import RunDir
from vime.slurm.scheduler import ask


@dataclass(frozen=True)
class Member:
    """One combination, ready to be submitted."""

    slot: Slot
    config: Config
    plan: Plan

    @property
    def due(self) -> bool:
        """Whether a run is to be started."""
        return self.slot.start is not None


def members(sweep: Sweep, *more: str) -> list[Member]:
    """Every combination composed and planned, with `more` overrides. Raises UserError for the first that is wrong."""
    alive = Alive()
    return [plan_member(sweep, combination, more, alive) for combination in sweep.combinations]


class Alive:
    """Whether a run without a last word may still go on. Asks the controller once for the jobs that it has."""

    def __init__(self) -> None:
        self._asked = False
        self._jobs: set[str] | None = None

    def __call__(self, run: RunDir) -> bool:
        """False only when the controller answers and has no such job: no answer is no answer."""
        from vime.slurm.executor import newest_job  # brings submitit, which most dry runs need not pay for

        job = newest_job(run)
        if job is None:
            return True
        if not self._asked:
            self._asked, answer = True, ask(["squeue", "--me", "-h", "-o", "%A"])
            self._jobs = None if answer is None else set(answer.split())
        return self._jobs is None or job in self._jobs


def plan_member(sweep: Sweep, combination: Combination, more: Sequence[str], alive: Alive) -> Member:
    """One combination composed and planned. Raises UserError that names it."""
    try:
        config = compose(sweep.cluster, sweep.recipe, [*combination.overrides, *more], check=check_model)
        slot = look(config.run.root / sweep.name, combination, alive)
        place = {"root": config.run.root / sweep.name, "name": slot.start or combination.name}
        config = config.model_copy(update={"run": config.run.model_copy(update=place)})
        return Member(slot, config, make_plan(config))
    except UserError as error:
        raise UserError(f"combination {combination.index} of {sweep.name}: {error}") from None


def show(found: Sequence[Member], console: Console) -> None:
    """The sweep as a table: what each combination is and where it stands."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("task", "run", "nodes", "state", "now"):
        table.add_column(column, overflow="fold")
    for member in found:
        slot = member.slot
        action = "nothing to do" if slot.state == "completed" else "goes on"
        if slot.start is not None:
            action = "starts" if slot.start == slot.combination.name else f"starts {slot.start}"
        table.add_row(str(slot.combination.index), slot.combination.name, str(member.plan.nodes), slot.state, action)
    console.print(table)


def print_sweep(sweep: Sweep, as_json: bool) -> None:
    """The dry run of a sweep: all combinations, and the first one that would start in full."""
    found = members(sweep)
    if as_json:
        rows: list[dict[str, Any]] = [
            {
                "index": member.slot.combination.index,
                "state": member.slot.state,
                "start": member.slot.start,
                "overrides": list(member.slot.combination.overrides),
                **preview_data(member.config, member.plan),
            }
            for member in found
        ]
        print(json.dumps({"sweep": sweep.name, "combinations": rows}, indent=2))
        return
    show(found, Console(highlight=False))
    first = next((member for member in found if member.due), None)
    if first is not None:
        print_preview(first.config, first.plan, False)
