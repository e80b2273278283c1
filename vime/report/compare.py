"""The runs of a folder side by side, best first: what a sweep came to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vime.config.file_kind import is_file
from vime.config.section import Frozen
from vime.report.render import state_words, tidy
from vime.report.settings import Settings, read_settings
from vime.report.summary import Summary, summarize
from vime.report.words import clean, number, plural
from vime.run.directory import RunDir


class Compared(Frozen):
    """One run of a comparison."""

    settings: dict[str, Any]
    """The settings that differ between the runs: dotted key -> value."""
    summary: Summary


class Comparison(Frozen):
    """Runs, best first."""

    folder: str
    varied: list[str]
    """Dotted keys whose values differ between the runs."""
    runs: list[Compared]


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory."""
    return is_file(folder / "status.json") or is_file(folder / "config.yaml")


def runs_in(folder: Path) -> list[Path]:
    """The run directories right below a folder, by name."""
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and is_run(entry))


def compare(folder: Path, now: float | None = None) -> Comparison:
    """Summarize every run of `folder` and order them by their last held-out accuracy, else by their last rewards.

    A run without either comes last, as does one whose recipe cannot be compared; equal runs keep the order of names.
    """
    runs = [RunDir(path) for path in runs_in(folder)]
    settings = [read_settings(run.config) for run in runs]
    varied = _varied(settings)
    rows = [
        Compared(settings={key: _plain(s.values.get(key)) for key in varied}, summary=summarize(run, now))
        for run, s in zip(runs, settings, strict=True)
    ]
    return Comparison(folder=str(folder), varied=varied, runs=sorted(rows, key=lambda row: _rank(row.summary)))


def render_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table. Where it gets too wide, the keys keep their last part and the columns wrap, none is dropped."""
    with tidy(console):
        _print(comparison, console)


def _print(comparison: Comparison, console: Console) -> None:
    states = [row.summary.outcome for row in comparison.runs]
    completed = sum(outcome.state == "completed" for outcome in states)
    console.print()
    heading = f"{plural(len(states), 'run')}, {completed} completed"
    console.print(Text.assemble((clean(comparison.folder), "bold"), f"  {heading}"), soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold", ratio=1)
    for key in comparison.varied:
        table.add_column(_short(key, comparison.varied), overflow="fold")
    for name in ("held-out", "reward", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for row in comparison.runs:
        table.add_row(*_cells(row, comparison.varied))
    console.print(table)


def _cells(row: Compared, varied: list[str]) -> list[Text]:
    summary = row.summary
    state, style = state_words(summary.outcome)
    state = "lost contact" if summary.outcome.lost_contact else state
    held_out = summary.held_out[0].accuracy.last.value if summary.held_out else None
    reward = summary.reward.last_mean if summary.reward else None
    steps = f"{summary.steps.done}/{summary.steps.planned}" if summary.steps.planned else str(summary.steps.done)
    return [
        Text(clean(summary.run)),
        *(Text(clean(str(row.settings[key]))) for key in varied),
        Text("" if held_out is None else number(held_out)),
        Text("" if reward is None else number(reward)),
        Text(steps),
        Text(state, style=style),
    ]


def _varied(settings: list[Settings]) -> list[str]:
    keys = dict.fromkeys(key for s in settings for key in s.values)
    # A run's name and place always differ; they are what the row is called, not what was varied.
    return [k for k in keys if k not in ("run.name", "run.root") and len({repr(s.values.get(k)) for s in settings}) > 1]


def _rank(summary: Summary) -> tuple[int, float]:
    if summary.held_out:
        return 0, -summary.held_out[0].accuracy.last.value
    if summary.reward:
        return 1, -summary.reward.last_mean
    if summary.loss:
        return 2, summary.loss.last_mean
    return 3, 0.0


def _short(key: str, keys: list[str]) -> str:
    """The last part of a dotted key when no other key shares it."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else key


def _plain(value: Any) -> Any:
    """A YAML value as JSON has it."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
