"""A Summary as text: for a terminal, with or without colour, and for a log file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vime.report.outcome import Outcome
from vime.report.series import ENDS, Point, Series
from vime.report.sparkline import bar, sparkline
from vime.report.summary import Summary, TimeShare, Timing, summarize
from vime.report.words import Glyphs, clean, duration, number, plural, size, span
from vime.run.directory import Failure, RunDir

WIDTH = 100  # wider lines are harder to read than they are useful
LABEL = 18  # columns of the labels
COLOURS = {"completed": "green", "running": "cyan", "pending": "cyan", "requeued": "yellow", "cancelled": "yellow"}


def print_summary(run: RunDir, console: Console | None = None) -> None:
    """Print the report of a run, by default to standard output."""
    render(summarize(run), console or Console(highlight=False))


def render(summary: Summary, console: Console) -> None:
    """Print a summary, at most 100 columns wide. Paths and a log's tail are never cut, so that they can be copied."""
    glyphs = Glyphs.of(console.encoding)
    with tidy(console):
        _print(summary, console, glyphs)


@contextmanager
def tidy(console: Console) -> Iterator[None]:
    """Print at most 100 columns wide and, where the output is not a terminal, without blanks at the ends of lines."""
    console.width = min(console.width, WIDTH)
    if console.is_terminal:
        yield
        return
    with console.capture() as captured:
        yield
    text = "".join(line.rstrip() + "\n" for line in captured.get().splitlines())
    # A log's tail may hold what the output's encoding does not.
    console.file.write(text.encode(console.encoding, "replace").decode(console.encoding))
    console.file.flush()


def _print(summary: Summary, console: Console, glyphs: Glyphs) -> None:
    console.print()
    _print_head(summary, console, glyphs)
    rows = list(_rows(summary, glyphs, console.width - LABEL - 2))
    if rows:
        console.print(Padding(_grid(rows), (1, 0, 0, 0)))
    if summary.timing:
        console.print(Padding(_time_table(summary.timing, glyphs, console.width), (1, 0, 0, 0)))
    if summary.failure:
        _print_failure(summary.failure, console, glyphs)
    for index, warning in enumerate(summary.warnings):
        if not index:
            console.print()
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row(Text("warning", style="bold yellow"), Text(clean(warning), overflow="fold"))
        console.print(line)
    if summary.logs:
        console.print()
        console.print(Text(f"logs  {summary.logs}", style="dim"), soft_wrap=True)


def _print_head(summary: Summary, console: Console, glyphs: Glyphs) -> None:
    outcome = summary.outcome
    state, style = state_words(outcome)
    console.print(Text.assemble((clean(summary.run), "bold"), "  ", (state, f"bold {style}")), soft_wrap=True)
    where = [f"{summary.recipe or 'unknown recipe'} on {summary.cluster or 'unknown cluster'}"]
    if outcome.attempt > 1:
        where.append(f"attempt {outcome.attempt}")
    time = span(outcome.started, outcome.ended, glyphs.arrow)
    if outcome.duration is not None:
        time = f"{time} ({duration(outcome.duration)})".strip()
    console.print(Text(clean(f" {glyphs.dot} ".join([*where, *([time] if time else [])])), style="dim"))
    if summary.failure:
        console.print(Text(clean(failed_words(summary.failure)), style="red"))
    if summary.phase:
        quiet = outcome.heartbeat_age
        seen = f" {glyphs.dot} last sign of life {duration(quiet)} ago" if quiet is not None and quiet >= 30 else ""
        console.print(Text(summary.phase + seen))


def state_words(outcome: Outcome) -> tuple[str, str]:
    """How a state is called, and its colour."""
    if outcome.lost_contact:
        return f"lost contact {duration(outcome.heartbeat_age or 0)} ago (state: {outcome.state})", "red"
    return outcome.state, COLOURS.get(outcome.state, "red")


def _rows(summary: Summary, glyphs: Glyphs, width: int) -> Iterator[tuple[str, RenderableType]]:
    steps = summary.steps
    done = f"{steps.done:,} of {steps.planned:,}" if steps.planned else f"{steps.done:,}"
    repeated = f", {plural(steps.repeated, 'step')} repeated after a resume" if steps.repeated else ""
    yield "steps", Text(done + repeated)
    if summary.reward:
        yield from _series_rows("reward", summary.reward, "step", glyphs, width)
    elif summary.loss:
        yield from _series_rows("loss", summary.loss, "step", glyphs, width)
    for held_out in summary.held_out:
        accuracy = held_out.accuracy
        text = _course(accuracy, "version", glyphs)
        responses = f"{plural(held_out.samples, 'response')}" if held_out.samples else ""
        many = len(summary.held_out) > 1
        detail = ", ".join(word for word in (clean(held_out.dataset) if many else "", responses) if word)
        yield "held-out accuracy", Text(text + (f"  ({detail})" if detail else ""))
    if (diff := summary.logprob_diff) is not None:
        yield (
            "logprob difference",
            Text(
                f"{number(diff.first.value)} {glyphs.arrow} {number(diff.last.value)}, mean {number(diff.mean)},"
                f" max {number(diff.worst.value)} (step {diff.worst.step})"
            ),
        )
    if (weights := summary.weights) is not None:
        compared = (
            "" if weights.worst_mean_diff is None else f", worst mean difference {number(weights.worst_mean_diff)}"
        )
        style = "" if weights.verified == weights.updates else "yellow"
        verified = f"{weights.verified} of {weights.updates} verified"
        yield "weight updates", Text(verified + compared, style=style)
        if weights.seconds_mean is not None:
            bulk = f"{size(weights.bytes)} in " if weights.bytes is not None else ""
            token = f", worst token {number(weights.worst_max_diff)}" if weights.worst_max_diff is not None else ""
            yield "", Text(f"{bulk}{duration(weights.seconds_mean)} each{token}", style="dim")
    rates = [("rollout", summary.rates.rollout), ("training", summary.rates.actor_train)]
    spoken = [f"{name} {number(series.mean)}" for name, series in rates if series]
    if summary.rates.per_gpu:
        spoken.append(f"whole step {number(summary.rates.per_gpu.mean)} a rank")
    if spoken:
        yield "tokens per second", Text(", ".join(spoken))
    if summary.dropped.samples:
        reasons = ", ".join(f"{count} {clean(reason)}" for reason, count in summary.dropped.reasons.items())
        yield (
            "dropped samples",
            Text(f"{summary.dropped.samples:,}" + (f" ({reasons})" if reasons else ""), style="yellow"),
        )
    if summary.engine_restarts:
        each = ", ".join(f"engine {r.engine}: {r.restarts}" for r in summary.engine_restarts)
        yield "engine restarts", Text(each, style="yellow")
    if summary.checkpoint_step is not None:
        yield "newest checkpoint", Text(f"step {summary.checkpoint_step}")
    if summary.export is not None:
        yield "exported to", Text(clean(summary.export), overflow="fold")


def _series_rows(
    name: str, series: Series, unit: str, glyphs: Glyphs, width: int
) -> Iterator[tuple[str, RenderableType]]:
    yield name, Text(_course(series, unit, glyphs))
    if series.count > 2:
        ends = f"  first {ENDS}: {number(series.first_mean)}, last {ENDS}: {number(series.last_mean)}"
        line = sparkline(series.curve, max(8, min(48, width - len(ends))), glyphs.blocks)
        yield "", Text.assemble((line, "cyan"), (ends, "dim") if series.count >= 2 * ENDS else "")


def _course(series: Series, unit: str, glyphs: Glyphs) -> str:
    """`0.2100 -> 0.8100, best 0.8300 (step 37)`."""

    def at(point: Point) -> str:
        return f"{number(point.value)} ({unit} {point.step})"

    if series.count == 1:
        return at(series.first)
    best = "" if series.best.step == series.last.step else f", best {at(series.best)}"
    return f"{at(series.first)} {glyphs.arrow} {at(series.last)}{best}"


def _grid(rows: list[tuple[str, RenderableType]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=LABEL, no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(label, value)
    return grid


def _time_table(timing: Timing, glyphs: Glyphs, width: int) -> Table:
    """What the trainer did, as bars; generation below, because it overlaps with them."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=LABEL, no_wrap=True)
    for _ in range(2):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    bars = max(10, min(40, width - LABEL - 30))
    step = timing.step_time
    head = f"{_seconds(step.best.value)} to {_seconds(step.worst.value)}"
    table.add_row(
        *(Text(cell, style="bold") for cell in ("time of a step", _seconds(step.mean), "")), Text(head, style="dim")
    )

    def row(share: TimeShare, style: str, note: str = "") -> None:
        drawn = Text(bar(share.share, bars, glyphs.full).rstrip(), style=style).append(note, style="dim")
        table.add_row(f"  {share.name}", _seconds(share.per_step), f"{share.share:.1%}", drawn)

    for share in timing.trainer:
        row(share, "blue" if share.name != "wait" else "yellow")
    if timing.rollout.seconds:
        row(timing.rollout, "dim", "  meanwhile")
    return table


def _seconds(value: float) -> str:
    """Seconds to a hundredth, so that a column of them can be compared at a glance."""
    return f"{value:,.2f} s"


def _print_failure(failure: Failure, console: Console, glyphs: Glyphs) -> None:
    console.print()
    console.print(Text(clean(f"{failed_words(failure)}, {failure.time}"), style="bold red"))
    console.print(Text(clean(f"log  {failure.log}")), soft_wrap=True)
    for line in failure.tail:
        for row in clean(line).split("\n"):
            console.print(Text(f"{glyphs.edge} {row}", style="dim"), soft_wrap=True)


def failed_words(failure: Failure) -> str:
    """`engine 0 on node03 was ended by SIGKILL`, or `... exited with code 42`."""
    if failure.signal:
        how = f"was ended by {failure.signal}"
    elif failure.exit_code is not None:
        how = f"exited with code {failure.exit_code}"
    else:
        how = "ended; nobody learnt its exit code"
    return f"{failure.role} {failure.rank} on {failure.node} {how}"
