"""Prompts under way, batch after batch: as far ahead of the trainers as staleness allows, lost ones replaced.

The order of the stream is the order of the batches, whatever comes back first, so that which prompts a step trains on
does not depend on the speed of anything. A prompt is started when the batch that it can fall into at the latest may
still be trained on the version that is served now; being lost or filtered out before it only moves it forward.

What over-sampling has begun beyond a batch's need goes on into the next one, through the weight update. What would be
older than `buffer.max_staleness` allows is discarded and made anew; with `rollout.mask_off_policy` only what has no
token of an allowed version is, since older tokens are not trained on then.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vime.buffer.sample import Group
from vime.config import Config
from vime.rollout.filters import FilterFailed, Filters
from vime.rollout.group import Generation, Tally
from vime.rollout.metrics import StepStatistics
from vime.rollout.policy_version import PolicyVersion
from vime.rollout.prompts import Prompt, PromptFeed
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
    """A prompt at its place in the stream. version: served when it was started, so that no token of it is older."""

    prompt: Prompt
    cursor: dict[str, Any]
    version: int
    task: asyncio.Task[_Made] | None
    """None: an earlier attempt has written its group, or what was made of it is discarded and it has to start anew."""


class Pipeline:
    """Makes the batches of a run, one after the other. `close` it at the end."""

    def __init__(
        self,
        config: Config,
        generation: Generation,
        feed: PromptFeed,
        filters: Filters,
        served: PolicyVersion,
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
        self._busy = 0
        self._idle_since: float | None = time.monotonic()
        self._idle = 0.0
        self._wake = asyncio.Event()
        self._failed: asyncio.Task[_Made] | None = None
        served.on_change = self._wake.set

    async def batch(self, step: int, keep: Keep) -> tuple[StepStatistics, dict[str, Any]]:
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
        self._discard(oldest, statistics)
        good: list[Group | None] = []
        cursor: dict[str, Any] = {}
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
                if started.version < oldest and _outdated(made.group, oldest):  # the update came as it was being scored
                    self._running.appendleft(self._given_up(started, statistics))
                elif self._count(made, statistics) and made.group is not None:
                    if started.version >= oldest:
                        _require_fresh(made.group, oldest, step)
                    allowed = _masked(made.group, oldest)
                    good.append(allowed)
                    if not self._filters.whole_batches:
                        statistics.add(allowed)
                        await keep(allowed)
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
        for place, started in enumerate(list(self._running)):
            if self._busy < rollout.concurrency and started.task is None and not self._is_written(started.prompt):
                self._running[place] = self._begin(started.prompt, started.cursor)
        for_this = math.ceil((wanted - good) * rollout.over_sampling)
        while self._busy < rollout.concurrency:
            ahead = len(self._running)
            batch = step + (good + ahead) // wanted
            fresh = batch - 1 - self._config.buffer.max_staleness <= self._served.version
            if not (ahead < for_this or (fresh and batch <= self._config.training.steps)):
                return
            await self._start_one()

    async def _start_one(self) -> None:
        prompt = await self._feed.take()
        cursor = self._feed.cursor()
        if self._is_written(prompt):
            self._running.append(_Started(prompt, cursor, self._served.version, None))
        else:
            self._running.append(self._begin(prompt, cursor))

    def _begin(self, prompt: Prompt, cursor: dict[str, Any]) -> _Started:
        task = asyncio.create_task(self._make(prompt))
        self._count_busy(1)
        task.add_done_callback(self._ended)
        return _Started(prompt, cursor, self._served.version, task)

    def _is_written(self, prompt: Prompt) -> bool:
        return prompt.index in self._written

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
            return False
        head = self._running[0]
        # One that was discarded may have to wait for others to end before it starts anew.
        return self._is_written(head.prompt) if head.task is None else head.task.done()

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

    def _discard(self, oldest: int, statistics: StepStatistics) -> None:
        """Give up what was started, beyond a batch's need, with a version that this batch may not have.

        With the mask of off-policy tokens that is what has ended without a token that it may have.
        """
        for place, started in enumerate(list(self._running)):
            if started.task is None or started.version >= oldest:
                continue
            partial = not started.task.done() or not _outdated(started.task.result().group, oldest)
            if not (partial and self._config.rollout.mask_off_policy):
                self._running[place] = self._given_up(started, statistics)

    def _given_up(self, started: _Started, statistics: StepStatistics) -> _Started:
        """The same prompt, to be started anew at its place in the stream."""
        assert started.task is not None
        started.task.cancel()
        statistics.discarded += self._config.rollout.samples_per_prompt
        return replace(started, task=None)

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


def _outdated(group: Group | None, oldest: int) -> bool:
    """Whether there is a group, and no token of it was sampled by `oldest` or a newer version."""
    return group is not None and all(sample.newest_version < oldest for sample in group.samples)


def _masked(group: Group, oldest: int) -> Group:
    """The group without tokens to train on in those samples that no version from `oldest` on has sampled."""
    if all(sample.newest_version >= oldest for sample in group.samples):
        return group
    samples = (
        sample if sample.newest_version >= oldest else replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
        for sample in group.samples
    )
    return replace(group, samples=tuple(samples))
