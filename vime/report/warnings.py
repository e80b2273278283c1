"""What in a run deserves a second look although nothing stopped it, each in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator

from vime.report.events import Events
from vime.report.metrics import LOGPROB_DIFF, REWARD, Metrics
from vime.report.outcome import Outcome
from vime.report.settings import Settings
from vime.report.unreadable import unreadable
from vime.report.words import duration, plural
from vime.run.directory import Failure, RunDir
from vime.run.files import RESERVED

DEAD_GROUPS = 0.9  # share of groups without spread in reward, above which there is next to nothing to learn from
TRUNCATED = 0.5  # share of responses cut at the length limit
DROPPED = 0.01  # share of samples given up
ENOUGH_STEPS = 10  # before that many, a reward that has not risen says nothing


def find_warnings(
    settings: Settings,
    metrics: Metrics,
    events: Events,
    outcome: Outcome,
    failure: Failure | None,
    done: int,
    run: RunDir,
) -> list[str]:
    """Warnings in the order of their weight."""
    return [
        *unreadable(run),
        *([f"the configuration does not read: {settings.problem}"] if settings.problem else []),
        *_of_disk(run, outcome),
        *_of_outcome(settings, metrics, outcome, failure, done),
        *_of_numbers(settings, metrics),
        *_of_weights(settings, events),
        *_of_rollout(settings, metrics, events),
    ]


def _of_disk(run: RunDir, outcome: Outcome) -> Iterator[str]:
    if outcome.state == "completed":
        return
    try:
        state = os.statvfs(run.path)
    except OSError:
        return
    if state.f_blocks > 0 and state.f_bavail * state.f_frsize < RESERVED:
        yield f"no space is left on the disk of {run.path}: what its roles wrote last may be missing"


def _of_outcome(
    settings: Settings, metrics: Metrics, outcome: Outcome, failure: Failure | None, done: int
) -> Iterator[str]:
    planned = settings.integer("training.steps")
    if outcome.lost_contact:
        yield (
            f"lost contact: the state is {outcome.state}, but nothing was written for"
            f" {duration(outcome.heartbeat_age or 0)}; it was probably killed together with its supervisor"
        )
    if outcome.state == "unknown":
        yield "status.json is missing or does not read, so the state is unknown"
    if outcome.state == "failed" and failure is None:
        yield "the run failed without a record of which role did; see the logs"
    if outcome.state == "completed" and planned is not None and done < planned:
        yield f"the run says completed, but metrics end at step {done} of {planned}"
    if metrics.missing:
        missing = plural(metrics.missing, "step")
        yield f"{missing} between {metrics.first_step} and {metrics.last_step} left no metrics line"


def _of_numbers(settings: Settings, metrics: Metrics) -> Iterator[str]:
    for name, count in sorted(metrics.nonfinite.items()):
        yield f"{name} is not a finite number on {plural(count, 'step')}"
    tolerance = settings.number("weights.tolerance")
    difference = metrics.series.get(LOGPROB_DIFF)
    if settings.text("algorithm.name") == "sft" or difference is None or tolerance is None:
        return
    if difference.first.value > tolerance:
        yield (
            f"step {difference.first.step} already differs: trainer and engine logprobs are"
            f" {difference.first.value:.2g} apart, above weights.tolerance={tolerance:g}"
        )
    if metrics.above_tolerance > (difference.first.value > tolerance):
        yield (
            f"logprob difference above weights.tolerance={tolerance:g} on {metrics.above_tolerance} of"
            f" {plural(difference.count, 'step')}, at worst {difference.worst.value:.2g} (step {difference.worst.step})"
        )


def _of_weights(settings: Settings, events: Events) -> Iterator[str]:
    weights = events.weights
    if weights is None:
        return
    if settings.values.get("weights.verify") is False:
        yield "weights.verify is off: nothing proves that the engines served the trainer's weights"
    elif weights.verified < weights.updates:
        yield f"{weights.updates - weights.verified} of {plural(weights.updates, 'weight update')} not verified"
    worst = weights.worst_mean_diff
    if worst is not None and weights.tolerance is not None and worst > weights.tolerance:
        yield f"a weight update differed by {worst:.2g} on the probe, above weights.tolerance={weights.tolerance:g}"


def _of_rollout(settings: Settings, metrics: Metrics, events: Events) -> Iterator[str]:
    series = metrics.series
    if (dead := series.get("rollout/zero_std_ratio")) and dead.last_mean >= DEAD_GROUPS:
        yield f"{dead.last_mean:.0%} of the groups have equal rewards (last steps): next to nothing left to learn from"
    if (cut := series.get("rollout/truncated_ratio")) and cut.last_mean >= TRUNCATED:
        limit = settings.integer("rollout.max_response_tokens")
        yield f"{cut.last_mean:.0%} of the responses are cut at the length limit (last steps)" + (
            f"; rollout.max_response_tokens={limit}" if limit else ""
        )
    per_step = (settings.integer("rollout.prompts_per_step") or 0) * (
        settings.integer("rollout.samples_per_prompt") or 0
    )
    if per_step and metrics.dropped > DROPPED * per_step * metrics.steps:
        share = metrics.dropped / (metrics.dropped + per_step * metrics.steps)
        yield f"{plural(metrics.dropped, 'sample')} dropped, {share:.1%} of all"
    reward = series.get(REWARD)
    learning = settings.text("algorithm.name") != "sft"
    if reward and learning and reward.count >= ENOUGH_STEPS and reward.last_mean <= reward.first_mean:
        yield f"the reward has not risen: first steps {reward.first_mean:.3f}, last {reward.last_mean:.3f}"
    stale, bound = series.get("rollout/staleness/max"), settings.integer("buffer.max_staleness")
    if stale and bound is not None and stale.worst.value > bound:
        yield f"a sample was {stale.worst.value:.0f} versions old, above buffer.max_staleness={bound}"
    if (coverage := series.get("train/routing_replay_coverage")) and coverage.worst.value < 1:
        yield f"routing replay covered {coverage.worst.value:.1%} of the tokens at worst (step {coverage.worst.step})"
    for engine, restarts in sorted(events.engine_restarts.items()):
        yield f"engine {engine} was restarted {plural(restarts, 'time')}"
