"""What would run, for a person or as data. Nothing is started or written."""

from __future__ import annotations

import itertools
import json
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vime.config import Config
from vime.config.time_limit import text as time_text
from vime.launch.checks import MAX_BYTES
from vime.plan.memory import checkpoint_gb, memory_of, parts_text
from vime.plan.plan import Component, Plan, Process, RolePlan
from vime.rollout.data.sources import load_problems
from vime.slurm.node_list import compress
from vime.slurm.script import batch_command, sbatch_text
from vime.supervise.attempt import save_time
from vime.supervise.commands import step_lines

PORT = "<port>"
"""Servers bind a free port and publish it; no plan knows it."""
MANY = 8
"""Nodes of a role that get a line each."""


def preview_data(config: Config, plan: Plan) -> dict[str, Any]:
    """`config` and `plan` as a run would write them to config.yaml and plan.json; on SLURM also what is asked of it.

    `memory_gb` is what the fullest trainer rank and one GPU of an engine take, `script` the submission, `steps` the
    srun of each role, `gpu_hours` and
    `node_hours` what it may cost at most, `engine_urls` where the engines will answer, `warnings` what works badly.
    """
    data: dict[str, Any] = {"config": config.model_dump(mode="json"), "plan": plan.model_dump(mode="json")}
    engines = plan.role("engine")
    data["engine_urls"] = (
        [_url(process) for process in engines.processes if process.engine_node == 0] if engines else []
    )
    data["warnings"] = list(plan.warnings)
    trainer, engine = memory_of(config)
    data["memory_gb"] = {
        name: {**memory.model_dump(), "total": memory.total}
        for name, memory in (("trainer", trainer), ("engine", engine))
        if memory is not None
    }
    if plan.time_limit is not None:
        data["gpu_hours"] = plan.gpus * plan.time_limit / 3600
        data["node_hours"] = plan.nodes * plan.time_limit / 3600
        data["script"] = script(config, plan)
        data["steps"] = step_lines(config, plan)
    return data


def script(config: Config, plan: Plan) -> str:
    """The submission of a run whose name is not chosen yet, or is `run.name`."""
    run_dir = config.run.root / (config.run.name or f"{plan.recipe}-<time>-<random>")
    return sbatch_text(config, plan, run_dir=run_dir, command=batch_command(config, run_dir))


def print_preview(config: Config, plan: Plan, as_json: bool, console: Console | None = None) -> None:
    """Print the plan and what would be run to stdout."""
    if as_json:
        print(json.dumps(preview_data(config, plan), indent=2))
        return
    console = console or Console(highlight=False)
    title = f"{plan.recipe} on {plan.cluster}, layout {plan.layout}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    on_slurm = plan.time_limit is not None
    for column in ("role", "component", "node", "ranks", "devices", "address" if on_slurm else "runs"):
        # Too narrow a terminal folds a cell; it never hides a module's name.
        table.add_column(column, overflow="fold")
    for role in plan.roles:
        for nodes, processes in _rows(role):
            ranks = ranges(sorted({process.rank for process in processes}))
            if len(nodes) > 1:
                ranks += f", {len(processes) // len(nodes)} a node"
            last = _address(role, processes) if on_slurm else role.module
            devices = _devices(config, role, processes)
            table.add_row(role.name, role.component, compress(nodes), ranks, devices, last)
    console.print(table)
    for line in [*_lines(config, plan), *(f"warning    {warning}" for warning in plan.warnings)]:
        console.print(line, markup=False, soft_wrap=True)
    if on_slurm:
        print(f"\n{script(config, plan)}\n# What the batch step starts, one step a role:")
        for line in step_lines(config, plan):
            print(f"# {line}")


def ranges(numbers: list[int]) -> str:
    """`0-3,6` for 0, 1, 2, 3, 6."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ",".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)


def _devices(config: Config, role: RolePlan, processes: list[Process]) -> str:
    gpus = sorted({gpu for process in processes for gpu in process.devices})
    if gpus:
        return f"gpu {ranges(gpus)}"
    return "cpu" if role.name in ("trainer", "engine") or config.cluster.device == "cpu" else "-"


def _rows(role: RolePlan) -> list[tuple[list[str], list[Process]]]:
    """The role's processes by node; by runs of equal nodes where one line a node would be many."""
    rows: list[tuple[list[str], list[Process]]] = []
    for node in dict.fromkeys(process.node for process in role.processes):
        rows.append(([node], [process for process in role.processes if process.node == node]))
    if len(rows) <= MANY:
        return rows
    merged: list[tuple[list[str], list[Process]]] = []
    for _, equal in itertools.groupby(rows, lambda row: [(process.devices, process.engine_node) for process in row[1]]):
        together = list(equal)
        merged.append(([node for nodes, _ in together for node in nodes], [p for _, there in together for p in there]))
    return merged


def _address(role: RolePlan, processes: list[Process]) -> str:
    if role.name not in ("engine", "router"):
        return "-"
    nodes = list(dict.fromkeys(process.node for process in processes if process.engine_node == 0))
    return f"http://{compress(nodes)}:{PORT}" if nodes else "node of the engine before"


def _url(process: Process) -> str:
    return f"http://{process.node}:{PORT}"


def _memory_lines(config: Config) -> list[str]:
    """What the fullest trainer rank and one GPU of an engine take, in GB, of what there is."""
    node = config.cluster.node
    of = f" of {node.gpu_memory_gb:g}" if config.cluster.device == "cuda" and node.gpu_memory_gb else ""
    trainer, engine = memory_of(config)
    where = f", stage {trainer.stage}" if config.training.pipeline_parallel > 1 else ""
    lines = [f"memory     trainer rank{where}: {trainer.total:.3g}{of} GB = {parts_text(trainer)}"]
    if engine is not None:
        cache = f"; the cache of an engine holds {engine.kv_tokens:,} tokens"
        what = "engine GPU" if config.cluster.device == "cuda" else "engine"
        lines.append(f"           {what}: {engine.total:.3g}{of} GB = {parts_text(engine)}{cache}")
    return lines


def _checkpoint_line(config: Config, plan: Plan) -> list[str]:
    """How fast the filesystem must be for the checkpoint that USR2 asks for before the time limit."""
    if plan.time_limit is None:
        return []
    size = checkpoint_gb(config)
    seconds = save_time(config.cluster)
    amount = f"{size:.3g} GB" if size < 1000 else f"{size / 1000:.2f} TB"
    return [
        f"checkpoint {amount}; to end a step and write it in {seconds:.0f} s, before the time limit, takes over"
        f" {size / seconds:.2g} GB/s (cluster.save_timeout, cluster.slurm.signal_seconds)"
    ]


def _request(plan: Plan, limit: int) -> str:
    hours = limit / 3600
    components = ", ".join(_component(component) for component in plan.components)
    unit, count = ("GPU", plan.gpus) if plan.gpus else ("node", plan.nodes)
    return f"{components}; {count} {unit}s x {time_text(limit)} = {count * hours:g} {unit}-hours at most"


def _component(component: Component) -> str:
    nodes = len(component.nodes)
    words = f"{component.name} {nodes} node{'s' if nodes > 1 else ''}"
    if component.gpus_per_node:
        words += f" x {component.gpus_per_node} GPUs"
    if component.segment is not None:
        words += f" in segments of {component.segment}"
    return words


def _data_lines(config: Config) -> list[str]:
    """How many problems a JSONL file holds, and what of it is left out. A file too large to read now gets no line."""
    data = config.data
    if data.source != "jsonl" or data.path is None or data.path.stat().st_size > MAX_BYTES:
        return []
    problems = load_problems(data, config.run.seed, 0)
    counts = f"{len(problems.training):,} problems, {len(problems.held_out):,} held out"
    left_out = [f"           left out: {problems.left_out}"] if problems.left_out else []
    return [f"data       {data.path}: {counts}", *left_out]


def _lines(config: Config, plan: Plan) -> list[str]:
    training, rollout = config.training, config.rollout
    model = str(config.model.path or config.model.name or "a published model")
    if config.model.tiny is not None:
        model = "a tiny model made by vime"
    elif config.model.path is None:
        model += " (model.path is not set)"
    split = f"{training.tensor_parallel} x pipeline parallel {training.pipeline_parallel}"
    for name in ("context_parallel", "expert_parallel"):
        if getattr(training, name) > 1:
            joint = " x " if name == "context_parallel" else ", "
            split += f"{joint}{name.replace('_', ' ')} {getattr(training, name)}"
    algorithm = config.algorithm
    teacher = [f"teacher    {algorithm.teacher}, loaded by the trainer ranks"] if algorithm.teacher is not None else []
    if algorithm.teacher_url is not None:
        teacher = [f"teacher    the server at {algorithm.teacher_url}, asked by the generator"]
    if config.model.warmup is not None:
        model += f", warmed up by {config.model.warmup}"
    return [
        f"model      {model}",
        f"algorithm  {algorithm.name}, {training.steps} steps of"
        f" {rollout.prompts_per_step} x {rollout.samples_per_prompt} = {plan.samples_per_step} samples",
        *_data_lines(config),
        *teacher,
        f"trainer    {training.ranks} ranks = data parallel {plan.data_parallel} x tensor parallel {split},"
        f" {training.dtype}",
        *([f"request    {_request(plan, plan.time_limit)}"] if plan.time_limit is not None else []),
        *_memory_lines(config),
        *_checkpoint_line(config, plan),
        f"run        {config.run.root / (config.run.name or f'{plan.recipe}-<time>-<random>')}",
    ]
