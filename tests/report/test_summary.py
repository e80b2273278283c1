"""Run folders of every kind -> exact values."""

import json
import math
import os
import time
import tracemalloc
from pathlib import Path

import pytest

from tests.report.run_maker import (
    evaluate,
    make_completed,
    make_failed,
    make_run,
    metrics,
    role,
    start_roles,
    train,
    update,
)
from tests.supervise.test_lifecycle import save
from vime.report.progress import Watch
from vime.report.summary import Summary, summarize
from vime.run.directory import RunDir, Status

STARTED = "2026-11-29T19:43:08.000Z"


def reward(step: int) -> float:
    return 0.85 - 0.65 * math.exp(-step / 20)


def age(run: RunDir, seconds: float) -> float:
    """Pretend that everything in the run was last written `seconds` before the time returned."""
    now = time.time()
    for path in run.path.rglob("*"):
        if path.is_file():
            os.utime(path, (now - seconds, now - seconds))
    return now


def test_completed_run(tmp_path: Path) -> None:
    summary = summarize(make_completed(tmp_path))
    assert (summary.recipe, summary.cluster, summary.algorithm) == ("tiny_grpo", "local", "grpo")
    assert summary.outcome.state == "completed"
    assert not summary.outcome.going
    assert summary.outcome.duration == pytest.approx(432.5)
    assert (summary.steps.done, summary.steps.planned, summary.steps.repeated) == (60, 60, 0)
    assert summary.reward is not None
    assert (summary.reward.first.step, summary.reward.first.value) == (1, reward(1))
    assert (summary.reward.last.step, summary.reward.last.value) == (60, reward(60))
    assert (summary.reward.best.step, summary.reward.worst.step) == (60, 1)
    assert summary.reward.first_mean == pytest.approx(sum(map(reward, range(1, 6))) / 5)
    assert summary.reward.last_mean == pytest.approx(sum(map(reward, range(56, 61))) / 5)
    assert len(summary.reward.curve) == 60
    assert summary.logprob_diff is not None
    assert summary.logprob_diff.worst.value == pytest.approx(2.6e-7)
    assert summary.logprob_diff.mean == pytest.approx(2e-7 + 30.5e-9)
    (held_out,) = summary.held_out
    assert (held_out.dataset, held_out.samples) == ("chain_sum", 128)
    assert (held_out.accuracy.first.value, held_out.accuracy.last.value, held_out.accuracy.last.step) == (0.2, 0.8, 60)
    assert summary.weights is not None
    assert (summary.weights.updates, summary.weights.verified) == (61, 61)
    assert (summary.weights.worst_mean_diff, summary.weights.worst_max_diff) == (3e-7, 9e-7)
    assert summary.export == str(tmp_path / summary.run / "export" / "step_60")
    assert (summary.phase, summary.failure, summary.warnings) == (None, None, [])


def test_time_shares(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.append_metrics(metrics(1))
    long_wait = {"perf/step_time": 12.0, "perf/wait_time_ratio": 0.85, "perf/rollout_time": 10.0}
    run.append_metrics(metrics(2, **long_wait))
    timing = summarize(run).timing
    assert timing is not None
    shares = {part.name: part.share for part in timing.trainer}
    assert shares == pytest.approx(
        {"wait": 12.6 / 16, "log_probs": 1 / 16, "actor_train": 1.5 / 16, "update_weights": 0.5 / 16, "other": 0.4 / 16}
    )
    assert sum(shares.values()) == pytest.approx(1)
    assert timing.rollout.share == pytest.approx(12.2 / 16)
    assert timing.rollout.per_step == pytest.approx(6.1)


def test_rates_are_tokens_over_time(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.append_metrics(metrics(1, **{"perf/rollout_time": 1.0, "perf/rollout_tok_per_s": 1000.0}))
    run.append_metrics(metrics(2, **{"perf/rollout_time": 3.0, "perf/rollout_tok_per_s": 200.0}))
    rates = summarize(run).rates
    assert rates.rollout is not None
    assert rates.rollout.mean == pytest.approx(1600 / 4)


def test_failed_run_names_the_role_and_keeps_its_tail(tmp_path: Path) -> None:
    summary = summarize(make_failed(tmp_path))
    assert summary.outcome.state == "failed"
    assert summary.failure is not None
    assert (summary.failure.role, summary.failure.rank, summary.failure.node) == ("engine", 0, "node03")
    assert (summary.failure.exit_code, summary.failure.signal) == (None, "SIGKILL")
    assert "can't allocate memory" in summary.failure.tail[-1]
    assert summary.steps.done == 7


def test_pending_run_without_any_metrics(tmp_path: Path) -> None:
    summary = summarize(make_run(tmp_path))
    assert summary.phase == "waiting to start"
    assert (summary.steps.done, summary.steps.planned) == (0, 60)
    assert (summary.reward, summary.timing, summary.weights, summary.held_out) == (None, None, None, [])
    assert summary.warnings == []


def test_a_run_that_waits_in_the_queue_for_days_is_not_lost(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert not summarize(run, age(run, 5 * 86400)).outcome.lost_contact


def test_running_and_lost_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    start_roles(run)
    train(run, 1, 23)
    run.write_status(Status("running", 1, 23, STARTED))
    going = summarize(run)
    assert going.outcome.going
    assert going.phase == "step 24 of 60"

    lost = summarize(run, age(run, 301))
    assert lost.outcome.lost_contact
    assert not lost.outcome.going
    assert lost.phase is None
    assert lost.outcome.state == "running"
    assert lost.outcome.heartbeat_age == pytest.approx(301, abs=0.1)
    assert lost.warnings[0].startswith("lost contact: the state is running, but nothing was written for 5 min 1 s")
    assert not summarize(run, age(run, 299)).outcome.lost_contact


def test_long_steps_and_working_logs_are_not_lost_contact(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.append_metrics(metrics(1, **{"perf/step_time": 200.0}))
    run.write_status(Status("running", 1, 1, STARTED))
    assert not summarize(run, age(run, 900)).outcome.lost_contact
    now = age(run, 1001)
    assert summarize(run, now).outcome.lost_contact
    log = run.log("engine", 0, 1)
    log.parent.mkdir(parents=True)
    log.write_text("still loading\n")
    (run.logs / "latest").symlink_to("attempt_1")
    assert not summarize(run, now).outcome.lost_contact


def test_phases_before_the_first_step(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.write_status(Status("running", started=STARTED))
    assert summarize(run).phase == "preparing the model"
    warmup = make_run(run.path, "warmup", steps=150)
    assert summarize(run).phase == "warming up the model, step 0 of 150"
    warmup.append_metrics(metrics(40))
    assert summarize(run).phase == "warming up the model, step 40 of 150"
    run.append_event(role("supervisor"), "run_started")
    for name in ("trainer", "engine"):
        run.append_event(role(name), "started")
    run.append_event(role("trainer"), "ready")
    assert summarize(run).phase == "starting: engine not ready yet"
    run.append_event(role("engine"), "ready")
    assert summarize(run).phase == "step 1 of 60"


def test_torn_last_lines(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    train(run, 1, 5)
    for path in (run.metrics, run.events):
        path.write_bytes(path.read_bytes()[:-20])
    summary = summarize(run)
    assert summary.steps.done == 4
    assert summary.weights is not None
    assert summary.weights.updates == 5


def test_later_attempt_wins(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for step in range(1, 11):
        run.append_metrics(metrics(step, 1, **{"rollout/raw_reward": 100.0 + step}))
    for step in range(6, 9):
        run.append_metrics(metrics(step, 2, **{"rollout/raw_reward": 200.0 + step}))
    summary = summarize(run)
    # Steps 9 and 10 of attempt 1 are not part of a policy that went back to step 5.
    assert (summary.steps.done, summary.steps.repeated) == (8, 5)
    assert summary.reward is not None
    assert summary.reward.curve == [101, 102, 103, 104, 105, 206, 207, 208]
    assert [(a.attempt, a.first_step, a.last_step) for a in summary.steps.attempts] == [(1, 1, 10), (2, 6, 8)]


def test_three_attempts_each_going_further_back(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for attempt, first, last in ((1, 1, 6), (2, 5, 8), (3, 3, 4)):
        for step in range(first, last + 1):
            run.append_metrics(metrics(step, attempt, **{"rollout/raw_reward": 10.0 * attempt + step}))
    summary = summarize(run)
    assert summary.reward is not None
    assert summary.reward.curve == [11, 12, 33, 34]
    assert summary.steps.repeated == 8


def test_evaluations_after_a_resume_replace_those_before(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for version in (0, 20, 40):
        evaluate(run, version)
    accuracy = {"dataset": "chain_sum", "accuracy": 0.9, "samples": 64}
    run.append_event(role("generator", attempt=2), "evaluation", version=20, **accuracy)
    (held_out,) = summarize(run).held_out
    assert held_out.accuracy.curve == [0.2, 0.9]
    assert held_out.samples == 64


def test_nan_unknown_keys_and_wrong_types(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.append_metrics(metrics(1))
    run.append_metrics(metrics(2, **{"rollout/raw_reward": math.nan, "train/grad_norm": math.inf}))
    run.append_metrics(metrics(3, **{"rollout/raw_reward": "high", "new/thing": [1], "perf/step_time": None}))
    run.append_metrics({"hello": 1})
    run.append_event(role("engine"), "something_new", detail={"a": 1})
    summary = summarize(run)
    assert summary.reward is not None
    assert (summary.reward.count, summary.reward.nonfinite, summary.reward.last.step) == (1, 1, 1)
    assert summary.steps.done == 3
    assert "rollout/raw_reward is not a finite number on 1 step" in summary.warnings
    assert "train/grad_norm is not a finite number on 1 step" in summary.warnings
    json.loads(summary.model_dump_json(), parse_constant=pytest.fail)


def test_unreadable_status_and_configuration(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.append_metrics(metrics(1))
    run.status.write_text('{"state": "runn')
    run.config.write_text("recipe: [unclosed")
    summary = summarize(run)
    assert (summary.outcome.state, summary.recipe, summary.steps.planned, summary.steps.done) == (
        "unknown",
        None,
        None,
        1,
    )
    assert summary.warnings == [
        f"the configuration does not read: {run.config}:1: not valid YAML: expected ',' or ']', but got '<stream end>'",
        "status.json is missing or does not read, so the state is unknown",
    ]


@pytest.mark.parametrize(
    ("changed", "warning"),
    [
        (
            {"train/train_rollout_logprob_abs_diff": 3e-3},
            "step 1 already differs: trainer and engine logprobs are 0.003",
        ),
        (
            {"train/train_rollout_logprob_abs_diff": 3e-3},
            "logprob difference above weights.tolerance=0.0001 on 12 of 12",
        ),
        ({"rollout/zero_std_ratio": 0.97}, "97% of the groups have equal rewards"),
        ({"rollout/truncated_ratio": 0.6}, "60% of the responses are cut at the length limit"),
        ({"rollout/dropped_samples": 32}, "384 samples dropped, 11.1% of all"),
        ({"rollout/raw_reward": 0.5}, "the reward has not risen: first steps 0.500, last 0.500"),
        ({"rollout/staleness/max": 2}, "a sample was 2 versions old, above buffer.max_staleness=0"),
        ({"train/routing_replay_coverage": 0.93}, "routing replay covered 93.0% of the tokens"),
    ],
)
def test_warnings_of_metrics(tmp_path: Path, changed: dict[str, float], warning: str) -> None:
    run = make_run(tmp_path)
    for step in range(1, 13):
        run.append_metrics(metrics(step, **changed))
    assert [w for w in summarize(run).warnings if w.startswith(warning)]


def test_warnings_of_events(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    update(run, 0)
    found = {"verified": False, "mean_abs_diff": 0.07, "max_abs_diff": 0.2}
    run.append_event(role("trainer"), "weights_updated", version=1, seconds=0.2, bytes=4, **found)
    for _ in range(2):
        run.append_event(role("engine", 1), "restarted")
    summary = summarize(run)
    assert summary.warnings == [
        "1 of 2 weight updates not verified",
        "a weight update differed by 0.07 on the probe, above weights.tolerance=0.0001",
        "engine 1 was restarted 2 times",
    ]
    assert [(r.engine, r.restarts) for r in summary.engine_restarts] == [(1, 2)]


def test_missing_steps_and_an_early_end_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for step in (1, 2, 5):
        run.append_metrics(metrics(step))
    run.write_status(Status("completed", 1, 5, STARTED, STARTED))
    assert summarize(run).warnings == [
        "the run says completed, but metrics end at step 5 of 60",
        "2 steps between 1 and 5 left no metrics line",
    ]


def test_drop_reasons_are_bounded(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for index in range(30):
        run.append_event(role("generator"), "sample_dropped", samples=8, reasons=[f"reward raised: {index}"])
    dropped = summarize(run).dropped
    assert dropped.samples == 30
    assert len(dropped.reasons) == 9
    assert dropped.reasons["other"] == 22


def test_json_round_trip(tmp_path: Path) -> None:
    for summary in (summarize(make_completed(tmp_path)), summarize(make_failed(tmp_path, name="failed"))):
        assert Summary.model_validate_json(summary.model_dump_json()) == summary


def test_long_metrics_file_in_bounded_memory(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=100_000)
    line = '{"step":%d,"rollout/raw_reward":0.5,"perf/step_time":4.0,"perf/wait_time_ratio":0.5}\n'
    with run.metrics.open("w") as file:
        file.writelines(line % step for step in range(1, 100_001))
    size = run.metrics.stat().st_size
    tracemalloc.start()
    try:
        summary = summarize(run)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 8e6
    assert peak < 1e6
    assert (summary.steps.done, summary.steps.repeated) == (100_000, 0)
    assert summary.reward is not None
    assert len(summary.reward.curve) <= 64


def test_what_is_no_regular_file_is_said_and_not_read(tmp_path: Path) -> None:
    """A pipe would be waited for, a device read for ever."""
    run = make_completed(tmp_path)
    for path, make in ((run.status, os.mkfifo), (run.config, Path.mkdir), (run.metrics, os.mkfifo)):
        path.unlink()
        make(path)
    run.events.unlink()
    run.events.symlink_to("/dev/zero")
    begun = time.monotonic()
    summary = summarize(run)
    Watch(run).look()
    assert time.monotonic() - begun < 5
    assert summary.outcome.state == "unknown"
    assert summary.warnings[:4] == [
        "status.json is a pipe, not a file: it was not read",
        "config.yaml is a folder, not a file: it was not read",
        "metrics.jsonl is a pipe, not a file: it was not read",
        "events.jsonl is a device, not a file: it was not read",
    ]


def test_a_line_without_end_is_left_out_and_said(tmp_path: Path) -> None:
    run = make_completed(tmp_path)
    whole = summarize(run).reward
    with run.metrics.open("ab") as file:
        file.write(b'{"step": 61, "x": "' + b'{"' * 25_000_000)
    begun = time.process_time()
    summary = summarize(run)
    Watch(run).look()
    assert time.process_time() - begun < 2
    assert summary.reward == whole
    assert summary.warnings == ["metrics.jsonl: 1 line of over 1,048,576 bytes were left out"]


@pytest.mark.parametrize(
    "status",
    [
        '{"state": "running", "attempt": [1]}',
        '{"state": "running", "step": "many"}',
        '{"state": "failed", "started": 5}',
        '{"state": {}}',
        '{"state": "failed", "failure": {"role": []}}',
        '{"state": "failed", "failure": ' + "[" * 5000,
        "[]",
        "null",
    ],
)
def test_a_status_of_wrong_types_is_unknown(tmp_path: Path, status: str) -> None:
    run = make_run(tmp_path)
    run.status.write_text(status)
    summary = summarize(run)
    assert summary.outcome.state == "unknown"
    assert "status.json is missing or does not read, so the state is unknown" in summary.warnings


def test_the_newest_checkpoint_is_the_newest_complete_one(tmp_path: Path) -> None:
    run = make_completed(tmp_path)
    assert summarize(run).checkpoint_step is None
    for step in (20, 40, 60):
        save(run, step)
    (run.checkpoints / "step_60" / "weights").write_bytes(b"")
    assert summarize(run).checkpoint_step == 40


def test_a_reader_whose_clock_is_ahead_does_not_lose_a_live_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence is measured by the clock that dates the files."""
    run = make_run(tmp_path)
    run.write_status(Status("running", started=STARTED))
    ahead = time.time() + 310
    monkeypatch.setattr(time, "time", lambda: ahead)
    assert not summarize(run).outcome.lost_contact
    before = sorted(path.name for path in run.path.iterdir())
    age(run, 310)
    assert summarize(run).outcome.lost_contact is False, "the files are of 310 s after the disk's time"
    assert sorted(path.name for path in run.path.iterdir()) == before, "nothing is left behind"
    os.utime(run.status, (1, 1))
    for path in (run.metrics, run.events, run.config):
        path.unlink(missing_ok=True)
    assert summarize(run).outcome.lost_contact
