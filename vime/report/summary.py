"""A run's files -> one Summary: everything the report says, as data."""

from __future__ import annotations

from vime.config.section import Frozen
from vime.report.events import Events, HeldOut, WeightUpdates, read_events
from vime.report.metrics import (
    LOGPROB_DIFF,
    LOSS,
    REWARD,
    STEP_TIME,
    TRAINER_TIMES,
    AttemptSteps,
    Metrics,
    read_metrics,
)
from vime.report.outcome import Outcome, read_outcome
from vime.report.phase import read_phase
from vime.report.series import Series
from vime.report.settings import read_settings
from vime.report.warnings import find_warnings
from vime.run.checkpoints import newest_checkpoint
from vime.run.directory import Failure, RunDir


class Steps(Frozen):
    """How far the run came. A step is an optimizer update of the policy."""

    done: int
    planned: int | None
    repeated: int
    """Steps trained again because an attempt ended after its last checkpoint."""
    attempts: list[AttemptSteps]


class TimeShare(Frozen):
    """One of the things that the steps' wall time went to."""

    name: str
    seconds: float
    """Summed over all steps."""
    share: float
    """Of the steps' total time, 0 to 1."""
    per_step: float
    """Mean seconds a step."""


class Timing(Frozen):
    """Where the time of the steps went."""

    step_time: Series
    trainer: list[TimeShare]
    """What trainer rank 0 did: waiting for the batch (wait), its own work, and `other`. Shares sum to 1."""
    rollout: TimeShare
    """Generation. It goes on while the trainer waits or trains, so the sum above leaves it out."""


class Rates(Frozen):
    """Tokens per second: total tokens over total seconds in `mean`."""

    rollout: Series | None
    actor_train: Series | None
    per_gpu: Series | None


class Dropped(Frozen):
    """Samples given up after the allowed tries."""

    samples: int
    reasons: dict[str, int]


class Restarts(Frozen):
    """Restarts of one engine."""

    engine: int
    restarts: int


class Summary(Frozen):
    """What there is to say about a run. Parts that it has no data for are None or empty."""

    run: str
    path: str
    recipe: str | None
    cluster: str | None
    algorithm: str | None
    outcome: Outcome
    phase: str | None
    """What a run that is going does now."""
    steps: Steps
    reward: Series | None
    loss: Series | None
    held_out: list[HeldOut]
    logprob_diff: Series | None
    """train/train_rollout_logprob_abs_diff; its `worst` is the largest."""
    timing: Timing | None
    rates: Rates
    weights: WeightUpdates | None
    dropped: Dropped
    engine_restarts: list[Restarts]
    checkpoint_step: int | None
    export: str | None
    failure: Failure | None
    logs: str | None
    """Folder of the newest attempt's logs."""
    warnings: list[str]


def summarize(run: RunDir, now: float | None = None) -> Summary:
    """Read a run's files. Nothing in them makes this fail: what is missing, torn or unknown is left out.

    `now`: seconds since the epoch, by default the present.
    """
    settings = read_settings(run.config)
    tolerance = settings.number("weights.tolerance")
    metrics = read_metrics(run.metrics, tolerance)
    events = read_events(run.events, tolerance)
    step_time = metrics.series.get(STEP_TIME)
    outcome, status = read_outcome(run, step_time.worst.value if step_time else None, now)
    steps = Steps(
        done=metrics.last_step or (status.step if status else 0),
        planned=settings.integer("training.steps"),
        repeated=metrics.repeated,
        attempts=metrics.attempts,
    )
    failure = status.failure if status else None
    logs = run.logs / "latest"
    return Summary(
        run=run.path.name,
        path=str(run.path),
        recipe=settings.text("recipe"),
        cluster=settings.text("cluster.name"),
        algorithm=settings.text("algorithm.name"),
        outcome=outcome,
        phase=read_phase(run, events.roles, steps.done, steps.planned, outcome.state) if outcome.going else None,
        steps=steps,
        reward=metrics.series.get(REWARD) if settings.text("algorithm.name") != "sft" else None,
        loss=metrics.series.get(LOSS),
        held_out=events.held_out,
        logprob_diff=metrics.series.get(LOGPROB_DIFF) if settings.text("algorithm.name") != "sft" else None,
        timing=_timing(metrics, step_time) if step_time else None,
        rates=Rates(
            rollout=metrics.series.get("perf/rollout_tok_per_s"),
            actor_train=metrics.series.get("perf/actor_train_tok_per_s"),
            per_gpu=metrics.series.get("perf/tokens_per_gpu_per_sec"),
        ),
        weights=events.weights,
        dropped=_dropped(metrics, events),
        engine_restarts=[Restarts(engine=i, restarts=n) for i, n in sorted(events.engine_restarts.items())],
        checkpoint_step=newest_checkpoint(run) or None,
        export=events.export,
        failure=failure,
        logs=str(logs) if logs.is_dir() else None,
        warnings=find_warnings(settings, metrics, events, outcome, failure, steps.done, run),
    )


def _dropped(metrics: Metrics, events: Events) -> Dropped:
    # Events know the drops of a batch that is not trained yet; after a resume they also hold those of repeated steps.
    happened = sum(events.drop_reasons.values())
    samples = metrics.dropped if metrics.repeated else max(metrics.dropped, happened)
    return Dropped(samples=samples, reasons=events.drop_reasons)


def _timing(metrics: Metrics, step_time: Series) -> Timing:
    total, count = metrics.seconds["step"], step_time.count

    def share_of(name: str, seconds: float) -> TimeShare:
        share = seconds / total if total > 0 else 0.0
        return TimeShare(name=name, seconds=seconds, share=share, per_step=seconds / count)

    names = ("wait", *TRAINER_TIMES)
    other = max(0.0, total - sum(metrics.seconds[name] for name in names))
    return Timing(
        step_time=step_time,
        trainer=[*(share_of(name, metrics.seconds[name]) for name in names), share_of("other", other)],
        rollout=share_of("rollout", metrics.seconds["rollout"]),
    )
