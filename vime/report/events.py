"""events.jsonl -> what happened besides the steps: evaluations, weight updates, dropped samples, restarts, results."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from vime.config.section import Frozen
from vime.report.series import Gather, Series, as_number
from vime.run.jsonl import Record, read_lines

REASONS = 8  # kinds of drop reason listed; a reason may carry free text, so the rest is summed


class HeldOut(Frozen):
    """Held-out accuracy over policy versions. A point's `step` is the version."""

    dataset: str
    samples: int
    """Responses of the newest evaluation."""
    accuracy: Series


class WeightUpdates(Frozen):
    """Updates of the engines' weights, those repeated after a resume included."""

    updates: int
    verified: int
    """Updates after which the engines' logprobs were compared with the trainer's and agreed."""
    worst_mean_diff: float | None
    """Largest mean |difference| of the probe's logprobs: the figure that the tolerance bounds."""
    worst_max_diff: float | None
    """Largest |difference| of any one probe token."""
    tolerance: float | None
    seconds_mean: float | None
    """Mean duration of one update of all engines."""
    bytes: int | None
    """Size of one update."""


@dataclass
class Roles:
    """Which roles of the newest attempt have started and which are ready, as `role-rank`."""

    attempt: int = 0
    started: set[str] = field(default_factory=set)
    ready: set[str] = field(default_factory=set)

    def add(self, record: Record) -> None:
        """Take any event."""
        attempt = _integer(record.get("attempt"), self.attempt)
        if attempt > self.attempt:
            self.attempt = attempt
            self.started.clear()
            self.ready.clear()
        role, event = record.get("role"), record.get("event")
        if role == "supervisor" or attempt < self.attempt or event not in ("started", "ready"):
            return
        name = f"{role}-{_integer(record.get('rank'), 0)}"
        self.started.add(name)
        if event == "ready":
            self.ready.add(name)


@dataclass
class Events:
    """What the file says."""

    held_out: list[HeldOut] = field(default_factory=list)
    weights: WeightUpdates | None = None
    drop_reasons: dict[str, int] = field(default_factory=dict)
    engine_restarts: dict[int, int] = field(default_factory=dict)
    """Engine index -> restarts."""
    export: str | None = None
    roles: Roles = field(default_factory=Roles)


def read_events(path: Path, tolerance: float | None = None) -> Events:
    """Read the file once. Events of unknown names and fields of unknown types are passed over."""
    events = Events()
    evaluations: dict[str, list[tuple[int, float, int]]] = {}
    updates = _Updates()
    for record in read_lines(path):
        name = record.get("event")
        if not isinstance(name, str):
            continue
        events.roles.add(record)
        rank = _integer(record.get("rank"), 0)
        if name == "evaluation":
            _note_evaluation(evaluations, record)
        elif name == "weights_updated":
            updates.add(record)
        elif name == "sample_dropped":
            reasons = record.get("reasons")
            for reason in reasons if isinstance(reasons, list) and reasons else ["unknown"]:
                _count_reason(events.drop_reasons, str(reason))
        elif name == "restarted":
            engine = _integer(record.get("engine"), rank)
            events.engine_restarts[engine] = events.engine_restarts.get(engine, 0) + 1
        elif name == "exported":
            events.export = str(record["path"]) if record.get("path") else events.export
    events.weights = updates.result(tolerance)
    events.held_out = [_held_out(dataset, points) for dataset, points in evaluations.items()]
    return events


class _Updates:
    def __init__(self) -> None:
        self.updates = self.verified = 0
        self._mean = Gather("low")
        self._max = Gather("low")
        self._seconds = Gather("low")
        self._bytes: int | None = None

    def add(self, record: Record) -> None:
        self.updates += 1
        self.verified += bool(record.get("verified"))
        version = _integer(record.get("version"), 0)
        self._mean.add(version, record.get("mean_abs_diff"))
        self._max.add(version, record.get("max_abs_diff"))
        self._seconds.add(version, record.get("seconds"))
        self._bytes = _integer(record.get("bytes"), 0) or self._bytes

    def result(self, tolerance: float | None) -> WeightUpdates | None:
        if not self.updates:
            return None
        mean, largest, seconds = self._mean.series(), self._max.series(), self._seconds.series()
        return WeightUpdates(
            updates=self.updates,
            verified=self.verified,
            worst_mean_diff=mean.worst.value if mean else None,
            worst_max_diff=largest.worst.value if largest else None,
            tolerance=tolerance,
            seconds_mean=seconds.mean if seconds else None,
            bytes=self._bytes,
        )


def _note_evaluation(evaluations: dict[str, list[tuple[int, float, int]]], record: Record) -> None:
    version, accuracy = record.get("version"), as_number(record.get("accuracy"))
    if not isinstance(version, int) or accuracy is None or not math.isfinite(accuracy):
        return
    points = evaluations.setdefault(str(record.get("dataset") or "held-out"), [])
    while points and points[-1][0] >= version:  # a resumed attempt evaluates again: what it says now counts
        points.pop()
    points.append((version, accuracy, _integer(record.get("samples"), 0)))


def _held_out(dataset: str, points: list[tuple[int, float, int]]) -> HeldOut:
    gather = Gather("high")
    for version, accuracy, _ in points:
        gather.add(version, accuracy)
    accuracy_series = gather.series()
    assert accuracy_series is not None  # a dataset is only listed once it has a finite accuracy
    return HeldOut(dataset=dataset, samples=points[-1][2], accuracy=accuracy_series)


def _count_reason(reasons: dict[str, int], reason: str) -> None:
    reason = reason[:80]
    if reason not in reasons and len(reasons) >= REASONS:
        reason = "other"
    reasons[reason] = reasons.get(reason, 0) + 1


def _integer(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
