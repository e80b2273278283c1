"""metrics.jsonl -> one Series a metric, in bounded memory, with the steps that a later attempt repeated left out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from vime.config.section import Frozen
from vime.report.series import Gather, Series, as_number
from vime.run.jsonl import Record, read_lines

REWARD = "rollout/raw_reward"
LOSS = "train/loss"
LOGPROB_DIFF = "train/train_rollout_logprob_abs_diff"
STEP_TIME = "perf/step_time"
WAIT_RATIO = "perf/wait_time_ratio"
DROPPED = "rollout/dropped_samples"
ROLLOUT_TIME = "perf/rollout_time"
TRAINER_TIMES = {
    "log_probs": "perf/log_probs_time",
    "actor_train": "perf/actor_train_time",
    "update_weights": "perf/update_weights_time",
}
"""What trainer rank 0 does in a step besides waiting for a batch: these and the wait cannot overlap."""

BETTER: dict[str, Literal["high", "low"]] = {
    REWARD: "high",
    LOSS: "low",
    LOGPROB_DIFF: "low",
    STEP_TIME: "low",
    "train/grad_norm": "low",
    "train/routing_replay_coverage": "high",
    "rollout/response_len/mean": "high",
    "rollout/truncated_ratio": "low",
    "rollout/zero_std_ratio": "low",
    "rollout/staleness/max": "low",
}
RATES = {
    "perf/rollout_tok_per_s": ROLLOUT_TIME,
    "perf/actor_train_tok_per_s": "perf/actor_train_time",
    "perf/tokens_per_gpu_per_sec": STEP_TIME,
}
"""A rate and the seconds it was measured over, so that its mean is tokens over time and not a mean of ratios."""


class AttemptSteps(Frozen):
    """The steps that one attempt wrote, those included that a later attempt repeated."""

    attempt: int
    first_step: int
    last_step: int


@dataclass
class Metrics:
    """What the file says about the steps that count."""

    series: dict[str, Series] = field(default_factory=dict)
    nonfinite: dict[str, int] = field(default_factory=dict)
    """Metric -> steps whose value was NaN or infinite."""
    seconds: dict[str, float] = field(default_factory=dict)
    """step, wait, rollout and the names of TRAINER_TIMES -> seconds, summed over the steps that have a step time."""
    steps: int = 0
    """Lines that count: one a step."""
    repeated: int = 0
    """Lines left out because a later attempt resumed before them."""
    first_step: int = 0
    last_step: int = 0
    dropped: int = 0
    above_tolerance: int = 0
    """Steps whose logprob difference is above the tolerance."""
    attempts: list[AttemptSteps] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Steps between the first and the last that have no line."""
        return self.last_step - self.first_step + 1 - self.steps if self.steps else 0


def read_metrics(path: Path, tolerance: float | None = None) -> Metrics:
    """Read the file once, or twice when a resumed attempt repeated steps: the later attempt's line wins.

    What an earlier attempt did beyond the step that a later one resumed from is not part of the policy any more, so
    those lines are left out even where the later attempt has not come so far again.
    """
    every = _Pass(tolerance)
    attempts: list[list[int]] = []  # attempt, first step, last step
    rewinds: list[tuple[int, int]] = []  # (line, step) at which the steps went back
    previous = lines = 0
    for step, record in _steps(path):
        if step <= previous:
            rewinds.append((lines, step))
        every.add(step, record)
        _note_attempt(attempts, step, record)
        previous = step
        lines += 1
    if not rewinds:
        return every.result(attempts, repeated=0)
    kept = _Pass(tolerance)
    for line, (step, record) in enumerate(islice(_steps(path), lines)):
        if all(step < back or line >= at for at, back in rewinds):
            kept.add(step, record)
    return kept.result(attempts, repeated=lines - kept.metrics.steps)


class _Pass:
    """One reading of the lines, in step order."""

    def __init__(self, tolerance: float | None) -> None:
        self.metrics = Metrics(seconds=dict.fromkeys(("step", "rollout", "wait", *TRAINER_TIMES), 0.0))
        self._tolerance = tolerance
        self._gather = {name: Gather(better) for name, better in BETTER.items()}
        self._gather.update({name: Gather() for name in RATES})

    def add(self, step: int, record: Record) -> None:
        metrics = self.metrics
        metrics.steps += 1
        metrics.first_step = metrics.first_step or step
        metrics.last_step = step
        for name, gather in self._gather.items():
            weight = _seconds(record, RATES[name]) if name in RATES else 1.0
            gather.add(step, record.get(name), weight)
        metrics.dropped += int(_seconds(record, DROPPED))
        difference = as_number(record.get(LOGPROB_DIFF))
        if self._tolerance is not None and difference is not None and difference > self._tolerance:
            metrics.above_tolerance += 1
        whole = _seconds(record, STEP_TIME)
        if whole:
            metrics.seconds["step"] += whole
            metrics.seconds["wait"] += whole * min(1.0, _seconds(record, WAIT_RATIO))
            metrics.seconds["rollout"] += _seconds(record, ROLLOUT_TIME)
            for name, key in TRAINER_TIMES.items():
                metrics.seconds[name] += _seconds(record, key)

    def result(self, attempts: list[list[int]], repeated: int) -> Metrics:
        for name, gather in self._gather.items():
            if (series := gather.series()) is not None:
                self.metrics.series[name] = series
            if gather.nonfinite:
                self.metrics.nonfinite[name] = gather.nonfinite
        self.metrics.attempts = [AttemptSteps(attempt=n, first_step=a, last_step=b) for n, a, b in attempts]
        self.metrics.repeated = repeated
        return self.metrics


def _steps(path: Path) -> Iterator[tuple[int, Record]]:
    """(step, record) of each line that has a step."""
    for record in read_lines(path):
        step = record.get("step")
        if isinstance(step, int) and not isinstance(step, bool) and step > 0:
            yield step, record


def _note_attempt(attempts: list[list[int]], step: int, record: Record) -> None:
    number = record.get("attempt", attempts[-1][0] if attempts else 1)
    if not isinstance(number, int):
        return
    if attempts and attempts[-1][0] == number:
        attempts[-1][2] = step
    else:
        attempts.append([number, step, step])


def _seconds(record: Record, name: str) -> float:
    """A finite, non-negative number, or 0."""
    value = as_number(record.get(name))
    return value if value is not None and math.isfinite(value) and value > 0 else 0.0
