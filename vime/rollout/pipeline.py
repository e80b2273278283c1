"""Prompts under way, batch after batch: as far ahead of the trainers as staleness allows, lost ones replaced.

The order of the stream is the order of the batches, whatever comes back first, so that which prompts a step trains on
does not depend on the speed of anything. A prompt is started when the batch that it can fall into at the latest may
still be trained on the version that is served now; being lost or filtered out before it only moves it forward.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from vime.buffer.sample import Group
from vime.config import Config
from vime.rollout.feed import Prompt, PromptFeed
from vime.rollout.filters import FilterFailed, Filters
from vime.rollout.generate import Generation, Tally
from vime.rollout.served import Served
from vime.rollout.step import StepStatistics
from vime.rollout.teacher import Teacher

Keep = Callable[[Group], Awaitable[None]]


class TooManyLost(Exception):
    """A step could not be filled: too many prompts gave no group that it may have."""


@dataclass(frozen=True, eq=False)
class _Made:
    """What became of a prompt: a group, or why there is none."""

    group: Group | None
    tally: Tally
    rejected: str | None


@dataclass(frozen=True, eq=False)
class _Started:
    """A prompt under way. version: served when it was started, so that no token of it is older."""

    prompt: Prompt
    cursor: dict[str, int]
    version: int
    task: asyncio.Task[_Made] | None
    """None: an earlier attempt has written its group."""


class Pipeline:
    """Makes the batches of a run, one after the other. `close` it at the end."""

    def __init__(
        self,
        config: Config,
        generation: Generation,
        feed: PromptFeed,
        filters: Filters,
        served: Served,
        written: frozenset[int] = frozenset(),
        teacher: Teacher | None = None,
    ) -> None:
        """teacher: what judges the groups that a batch may have.

        `written`: stream positions whose group an earlier attempt has put into the first batch. They count, and are
        not made again."""
        self._config = config
        self._generation = generation
        self._feed = feed
        self._filters = filters
        self._served = served
        self._written = written
        self._teacher = teacher
        self._running: deque[_Started] = deque()
        self._returned: deque[tuple[Prompt, dict[str, int]]] = deque()
        self._busy = 0
        self._idle_since: float | None = time.monotonic()
        self._idle = 0.0
        self._wake = asyncio.Event()
        self._failed: asyncio.Task[_Made] | None = None
        served.on_change = self._wake.set

    async def batch(self, step: int, keep: Keep) -> tuple[StepStatistics, dict[str, int]]:
        """Make the groups of a step and give each to `keep`, in order. Returns what was measured, and the cursor of the
        prompt stream after the batch's last prompt.

        Raises TooManyLost when more prompts were lost or filtered out than the tries allow, WaitTimeout when the
        trainers make no version that the step may be generated with.
        """
        config, wanted = self._config, self._config.rollout.prompts_per_step
        statistics = StepStatistics()
        begun, idle_before = time.monotonic(), self._idle_seconds()
        filtered_before, dropped_before = self._feed.filtered, self._feed.dropped
        oldest = step - 1 - config.buffer.max_staleness
        await self._served.reach(oldest, config.buffer.wait_timeout)
        statistics.discarded = self._discard(oldest) * config.rollout.samples_per_prompt
        good: list[Group | None] = []
        cursor: dict[str, int] = {}
        while len(good) < wanted:
            await self._start(step, len(good))
            await self._head()
            while len(good) < wanted and self._head_done():
                started = self._running.popleft()
                cursor = started.cursor
                if started.task is None:
                    good.append(None)
                    continue
                made = started.task.result()
                if self._count(made, statistics) and made.group is not None:
                    _require_fresh(made.group, oldest, step)
                    good.append(made.group)
                    if not self._filters.whole_batches:
                        statistics.add(made.group)
                        await keep(made.group)
                self._bound(statistics, wanted)
                await self._start(step, len(good))
            if len(good) == wanted and self._filters.whole_batches:
                good = await self._judge(good, statistics)
                self._bound(statistics, wanted)
        if self._filters.whole_batches:
            for group in good:
                if group is not None:
                    statistics.add(group)
                    await keep(group)
        statistics.waited = self._idle_seconds() - idle_before
        statistics.seconds = time.monotonic() - begun - statistics.waited
        statistics.too_long = self._feed.filtered - filtered_before
        statistics.tally.dropped += self._feed.dropped - dropped_before
        return statistics, cursor

    def close(self) -> None:
        """Ends what is under way."""
        for started in self._running:
            if started.task is not None:
                started.task.cancel()
        self._running.clear()

    async def _start(self, step: int, good: int) -> None:
        """Start as many prompts as the engines, staleness and the end of the run allow."""
        rollout = self._config.rollout
        wanted = rollout.prompts_per_step
        for_this = math.ceil((wanted - good) * rollout.over_sampling)
        while self._busy < rollout.concurrency:
            ahead = len(self._running)
            batch = step + (good + ahead) // wanted
            fresh = batch - 1 - self._config.buffer.max_staleness <= self._served.version
            if not (ahead < for_this or (fresh and batch <= self._config.training.steps)):
                return
            await self._start_one()

    async def _start_one(self) -> None:
        if self._returned:
            prompt, cursor = self._returned.popleft()
        else:
            prompt = await self._feed.take()
            cursor = self._feed.cursor()
        task = None
        if prompt.index not in self._written:
            task = asyncio.create_task(self._make(prompt))
            self._count_busy(1)
            task.add_done_callback(self._ended)
        self._running.append(_Started(prompt, cursor, self._served.version, task))

    async def _make(self, prompt: Prompt) -> _Made:
        group, tally = await self._generation.group(prompt)
        rejected = None
        if group is not None:
            try:
                rejected = await self._filters.rejected(group, prompt.problem)
            except FilterFailed as error:
                self._drop([group], str(error), tally)
                group = None
        if self._teacher is not None and group is not None and rejected is None:
            group = await self._teacher.judge(group)
        return _Made(group, tally, rejected)

    def _ended(self, task: asyncio.Task[_Made]) -> None:
        self._count_busy(-1)
        if not task.cancelled() and task.exception() is not None:
            self._failed = self._failed or task
        self._wake.set()

    async def _head(self) -> None:
        """Wait until the first prompt under way is done, or there may be room to start others."""
        if self._failed is not None:
            self._failed.result()  # one that failed ends the step at once, though earlier ones still run
        if not self._head_done():
            await self._wake.wait()
            self._wake.clear()
            if self._failed is not None:
                self._failed.result()

    def _head_done(self) -> bool:
        if not self._running:
            return False  # discarded ones have yet to end before others may start
        task = self._running[0].task
        return task is None or task.done()

    def _count(self, made: _Made, statistics: StepStatistics) -> bool:
        """Count a prompt that has ended; whether the batch may have its group."""
        statistics.ended += 1
        statistics.tally.add(made.tally)
        if made.group is None:
            statistics.lost += 1
            return False
        statistics.finished(made.group)
        if made.rejected is not None:
            statistics.rejected[made.rejected] += 1
            return False
        return True

    async def _judge(self, good: list[Group | None], statistics: StepStatistics) -> list[Group | None]:
        groups = [group for group in good if group is not None]
        try:
            reasons = await self._filters.batch(groups)
        except FilterFailed as error:
            self._drop(groups, str(error), statistics.tally)
            statistics.lost += len(groups)
            return [group for group in good if group is None]
        statistics.rejected.update(reason for reason in reasons if reason is not None)
        kept = {id(group) for group, reason in zip(groups, reasons, strict=True) if reason is None}
        return [group for group in good if group is None or id(group) in kept]

    def _drop(self, groups: Sequence[Group], reason: str, tally: Tally) -> None:
        """Count groups that a filter failed on, as if they could not have been made."""
        samples, tries = sum(len(group.samples) for group in groups), self._config.rollout.tries
        tally.dropped += samples
        tally.reasons[reason] += len(groups)
        indices = [group.index for group in groups]
        self._generation.report("sample_dropped", prompts=indices, samples=samples, tries=tries, reasons=[reason])

    def _bound(self, statistics: StepStatistics, wanted: int) -> None:
        rollout = self._config.rollout
        rejected = statistics.rejected.total()
        if statistics.lost >= wanted * rollout.tries or rejected >= wanted * rollout.filter_tries:
            raise TooManyLost(statistics.explain())

    def _discard(self, oldest: int) -> int:
        """Give up what was started, beyond a batch's need, with a version that no later batch may have.

        Its prompts come next again. Returns how many.
        """
        stale = [started for started in self._running if started.version < oldest and started.task is not None]
        if not stale:
            return 0
        # All of them, so that the order of the stream stays.
        for started in reversed(self._running):
            if started.task is not None:
                started.task.cancel()
            self._returned.appendleft((started.prompt, started.cursor))
        count = len(self._running)
        self._running.clear()
        return count

    def _count_busy(self, change: int) -> None:
        now = time.monotonic()
        self._busy += change
        if self._busy and self._idle_since is not None:
            self._idle += now - self._idle_since
            self._idle_since = None
        elif not self._busy and self._idle_since is None:
            self._idle_since = now

    def _idle_seconds(self) -> float:
        """Seconds so far in which nothing was under way."""
        return self._idle + (time.monotonic() - self._idle_since if self._idle_since is not None else 0.0)


def _require_fresh(group: Group, oldest: int, step: int) -> None:
    """The bound on staleness, at the last moment before a group is written."""
    seen = min(sample.oldest_version for sample in group.samples)
    if seen < oldest:
        raise RuntimeError(
            f"a group of the batch of step {step} was sampled by version {seen}, older than {oldest}, the oldest that"
            " buffer.max_staleness allows: an engine serves other weights than the trainer said"
        )
