"""What would run, for a person or as data. Nothing is started or written."""

from __future__ import annotations

import json
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vime.config import Config
from vime.plan import Plan, Process, RolePlan


def preview_data(config: Config, plan: Plan) -> dict[str, Any]:
    """`{"config": ..., "plan": ...}`: exactly what a run would write to its config.yaml and plan.json."""
    return {"config": config.model_dump(mode="json"), "plan": plan.model_dump(mode="json")}


def print_preview(config: Config, plan: Plan, as_json: bool, console: Console | None = None) -> None:
    """Print the plan and what would be run to stdout."""
    if as_json:
        print(json.dumps(preview_data(config, plan), indent=2))
        return
    console = console or Console(highlight=False)
    title = f"{plan.recipe} on {plan.cluster}, layout {plan.layout}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("role", "component", "node", "ranks", "devices", "runs"):
        # Too narrow a terminal folds a cell; it never hides a module's name.
        table.add_column(column, overflow="fold")
    for role in plan.roles:
        for node in dict.fromkeys(process.node for process in role.processes):
            there = [process for process in role.processes if process.node == node]
            ranks = ranges([process.rank for process in there])
            table.add_row(role.name, role.component, node, ranks, _devices(config, role, there), role.module)
    console.print(table)
    for line in _lines(config, plan):
        console.print(line, markup=False, soft_wrap=True)


def ranges(numbers: list[int]) -> str:
    """`0-3,6` for 0, 1, 2, 3, 6."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _devices(config: Config, role: RolePlan, processes: list[Process]) -> str:
    gpus = [gpu for process in processes for gpu in process.devices]
    if gpus:
        return f"gpu {ranges(gpus)}"
    return "cpu" if role.name in ("trainer", "engine") or config.cluster.device == "cpu" else "-"


def _lines(config: Config, plan: Plan) -> list[str]:
    training, rollout = config.training, config.rollout
    model = str(config.model.path) if config.model.path is not None else "a tiny model made by vime"
    if config.model.warmup is not None:
        model += f", warmed up by {config.model.warmup}"
    return [
        f"model      {model}",
        f"algorithm  {config.algorithm.name}, {training.steps} steps of"
        f" {rollout.prompts_per_step} x {rollout.samples_per_prompt} = {plan.samples_per_step} samples",
        f"trainer    {training.ranks} ranks = data parallel {plan.data_parallel} x tensor parallel"
        f" {training.tensor_parallel} x pipeline parallel {training.pipeline_parallel}, {training.dtype}",
        f"run        {config.run.root / (config.run.name or f'{plan.recipe}-<time>-<random>')}",
    ]
