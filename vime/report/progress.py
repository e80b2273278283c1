"""Progress of a run while it goes: one line that redraws itself on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from vime.errors import UserError
from vime.report.events import Roles
from vime.report.metrics import LOGPROB_DIFF, LOSS, REWARD, STEP_TIME
from vime.report.phase import finishing_or_step, starting, warming_up
from vime.report.series import as_number
from vime.report.settings import read_settings
from vime.report.sparkline import Curve, bar, sparkline
from vime.report.words import Glyphs, clean, duration, number
from vime.run.directory import TERMINAL, RunDir, State
from vime.run.jsonl import Record, Tail

POLL = 0.5  # seconds between two looks at the files
LINES = 20  # about as many lines a run leaves in a log file
QUIET = 60.0  # seconds after which a log file gets a line although nothing happened
RECENT = 10  # steps that the estimate of the remaining time rests on


class Watch:
    """What is known of a run so far, from the bytes appended since the last look."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.state: State = "pending"
        self.step = 0
        self.latest: Record = {}
        self.news: list[str] = []
        """What happened since it was last emptied: evaluations, restarts."""
        self.curve = Curve(32)
        """The reward, or for supervised fine-tuning the loss, over the steps."""
        self.roles = Roles()
        self._aim = ("reward", REWARD)
        self._metrics, self._events = Tail(run.metrics), Tail(run.events)
        self._times: deque[float] = deque(maxlen=RECENT)
        self.planned: int | None = None
        self._warmup = RunDir(run.path / "warmup")
        self._warmup_metrics = Tail(self._warmup.metrics)
        self._warmup_step = 0
        self._warmup_planned: int | None = None

    def look(self) -> None:
        """Read what is new."""
        with suppress(UserError):  # not written yet: as before
            self.state = self.run.read_status().state
        if self.planned is None:
            settings = read_settings(self.run.config)
            self.planned = settings.integer("training.steps")
            self._aim = ("loss", LOSS) if settings.text("algorithm.name") == "sft" else ("reward", REWARD)
        for record in self._events.poll():
            self._note(record)
        for record in self._metrics.poll():
            self._take(record)
        for record in self._warmup_metrics.poll():
            self._warmup_step = _whole(record.get("step")) or self._warmup_step
        if self._warmup_step and self._warmup_planned is None:
            self._warmup_planned = read_settings(self._warmup.config).integer("training.steps")

    def phase(self) -> str:
        """What the run does now."""
        if self.state in ("requeued", *TERMINAL):
            return self.state
        if self.roles.started:
            return starting(self.roles) or finishing_or_step(self.step, self.planned)
        if self._warmup.path.is_dir():
            return warming_up(self._warmup_step, self._warmup_planned)
        return "waiting to start" if self.state == "pending" else "preparing the model"

    def share(self) -> float | None:
        """Share of the present phase that is done, 0 to 1; None where nobody knows."""
        if self.step and self.planned:
            return min(1.0, self.step / self.planned)
        if not self.roles.started and self._warmup_step and self._warmup_planned:
            return min(1.0, self._warmup_step / self._warmup_planned)
        return None

    def remaining(self) -> float | None:
        """Seconds that the steps left will take, from the last ones' mean."""
        if not self._times or self.planned is None or self.step >= self.planned:
            return None
        return sum(self._times) / len(self._times) * (self.planned - self.step)

    def numbers(self) -> str:
        """Reward (or loss), logprob difference and speed of the newest step; empty before the first."""
        shown = (self._aim, ("logprob diff", LOGPROB_DIFF), ("tok/s", "perf/rollout_tok_per_s"))
        values = [(name, as_number(self.latest.get(key))) for name, key in shown]
        return "  ".join(f"{name} {number(value)}" for name, value in values if value is not None)

    def _take(self, record: Record) -> None:
        step = _whole(record.get("step"))
        if step is None:
            return
        self.step, self.latest = step, record
        value, seconds = as_number(record.get(self._aim[1])), as_number(record.get(STEP_TIME))
        if value is not None and math.isfinite(value):
            self.curve.add(value)
        if seconds is not None and math.isfinite(seconds) and seconds >= 0:
            self._times.append(seconds)

    def _note(self, record: Record) -> None:
        self.roles.add(record)
        event = record.get("event")
        accuracy = as_number(record.get("accuracy"))
        if event == "evaluation" and accuracy is not None:
            self.news.append(f"held-out accuracy {number(accuracy)} at version {record.get('version')}")
        elif event == "restarted":
            self.news.append(f"engine {record.get('engine', record.get('rank'))} restarted")
        elif event == "checkpoint_saved":
            self.news.append(f"checkpoint of step {record.get('step')} saved")
        elif event == "checkpoint_loaded":
            self.news.append(f"resumed from the checkpoint of step {record.get('step')}")
        elif event == "checkpoint_incomplete":
            self.news.append(f"{record.get('path')} is incomplete and not used: {record.get('reason')}")
        elif event == "exported":
            self.news.append(f"policy of step {record.get('step')} exported")


def follow(run: RunDir, is_alive: Callable[[], bool], console: Console | None = None, poll: float = POLL) -> None:
    """Show how a run goes until its status is terminal or `is_alive()` says that the job is gone.

    On a terminal two lines redraw themselves below the news; elsewhere a plain line comes with each phase and every
    few steps.
    """
    console = console or Console(highlight=False)
    watch = Watch(run)
    if console.is_terminal:
        _redraw(watch, is_alive, console, poll)
    else:
        _log(watch, is_alive, console, poll)


def _over(watch: Watch, is_alive: Callable[[], bool]) -> bool:
    """Look, and say whether that was the last look."""
    alive = is_alive()  # asked before looking, so that what a job wrote just before its end is still seen
    watch.look()
    return watch.state in TERMINAL or not alive


def _redraw(watch: Watch, is_alive: Callable[[], bool], console: Console, poll: float) -> None:
    begun = time.monotonic()
    glyphs = Glyphs.of(console.encoding)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        over = False
        while not over:
            over = _over(watch, is_alive)
            for news in _taken(watch):
                live.console.print(Text(news, style="dim"))
            live.update(_drawing(watch, time.monotonic() - begun, console.width, glyphs), refresh=True)
            if not over:
                time.sleep(poll)


def _drawing(watch: Watch, elapsed: float, width: int, glyphs: Glyphs) -> Text:
    """Two lines: the phase with its bar and times, and the numbers of the newest step."""
    share, left = watch.share(), watch.remaining()
    times = duration(elapsed) + (f", about {duration(left)} left" if left is not None else "")
    drawn = "" if share is None else f"{bar(share, 20, glyphs.full, glyphs.dot)} {share:4.0%}  "
    first = Text.assemble((drawn, "cyan"), (watch.phase(), "bold"), f"  {times}", no_wrap=True, overflow="ellipsis")
    first.truncate(width)
    if not watch.latest:
        return first
    curve = sparkline(watch.curve.means(), 24, glyphs.blocks)
    second = Text.assemble(watch.numbers(), "  ", (curve, "cyan"), no_wrap=True, overflow="ellipsis")
    second.truncate(width)
    return Text("\n").join([first, second])


def _log(watch: Watch, is_alive: Callable[[], bool], console: Console, poll: float) -> None:
    begun = time.monotonic()
    said: tuple[Any, ...] = ()
    said_at = begun
    over = False
    while not over:
        over = _over(watch, is_alive)
        for news in _taken(watch):
            _line(console, begun, news)
        now = time.monotonic()
        # The step is a part of the phrase, so it is compared by its twentieth of the run, not by its words.
        share = watch.share()
        told = watch.phase() if share is None else int(share * LINES)
        mark = (told, watch.step > 0)
        if mark != said or now - said_at >= QUIET:
            _line(console, begun, _sentence(watch))
            said, said_at = mark, now
        if not over:
            time.sleep(poll)


def _sentence(watch: Watch) -> str:
    if not watch.step:
        return watch.phase()
    left = watch.remaining()
    done = f"step {watch.step}" + (f"/{watch.planned}" if watch.planned else "")
    numbers = watch.numbers()
    return "  ".join(word for word in (done, numbers, f"{duration(left)} left" if left is not None else "") if word)


def _line(console: Console, begun: float, words: str) -> None:
    seconds = int(time.monotonic() - begun)
    console.print(Text(f"[{seconds // 60:3d}:{seconds % 60:02d}] {clean(words)}"), soft_wrap=True)
    console.file.flush()  # a log file must show it now


def _taken(watch: Watch) -> list[str]:
    news, watch.news = [clean(words) for words in watch.news], []
    return news


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
