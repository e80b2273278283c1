"""Filling batches when samples, rewards or whole prompts fail: the engine is played, everything else is real."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.buffer.sample import Group
from vime.config import Buffer, Cluster, Config, Data, Model, Rollout, TinyModel, Training
from vime.errors import UserError, WaitTimeout
from vime.rollout.client import Completion, Sampling
from vime.rollout.data.format import Turns, make_format
from vime.rollout.data.problem import Problem
from vime.rollout.data.user_calls import UserCalls
from vime.rollout.filters import Filters
from vime.rollout.group import Generation, load_generate, request_seed
from vime.rollout.limits import Limits
from vime.rollout.metrics import StepStatistics
from vime.rollout.pipeline import Pipeline, TooManyLost
from vime.rollout.policy_version import PolicyVersion
from vime.rollout.prompts import PromptFeed
from vime.rollout.rewards.scorer import Scorer
from vime.rollout.teacher import Teacher
from vime.run.http_client import BadResponse

END = 0
FUNCTIONS = "tests.rollout.filters"
HERE = "tests.rollout.test_pipeline"
LIMITS = Limits(context=100, stop_token_ids=(END,), max_response=10)


class Letters:
    """A tokenizer of sorts: token n is the letter with that number."""

    bos_token_id = None

    def __len__(self) -> int:
        return 128

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in ids)


@dataclass
class Engine:
    """Answers with what `script(prompt number, sample seed)` says or raises. Remembers what it was asked."""

    script: Callable[[int, int], str]
    served: PolicyVersion
    asked: list[tuple[int, int, int]] = field(default_factory=list)
    hold: Callable[[int], asyncio.Event | None] = lambda number: None
    cancelled: list[int] = field(default_factory=list)
    pause: Callable[[], float] | None = None
    old: Callable[[int, int], bool] = lambda number, sample: False
    """Whether a sample of a prompt had ended before the weights changed."""
    busy: int = 0
    most_busy: int = 0

    async def complete(
        self, prompt: list[int], samples: int, max_tokens: int, sampling: Sampling, seed: int
    ) -> list[Completion]:
        number = prompt[0]
        self.asked.append((number, samples, seed))
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        started = self.served.version
        held = self.hold(number)
        try:
            # Later prompts may finish first.
            pause = self.pause() if self.pause else 0.02 / (1 + number % 3)
            await (held.wait() if held else asyncio.sleep(pause))
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        finally:
            self.busy -= 1
        texts = [self.script(number, seed + i) for i in range(samples)]
        ids = [[ord(letter) for letter in text] + [END] for text in texts]
        ended = self.served.version
        first = np.array([[0, started]], np.int32)
        spanning = np.array([[0, started], [1, ended]], np.int32) if ended > started else first
        versions = [first if self.old(number, i) else spanning for i in range(samples)]
        return [
            Completion(np.array(i, np.int32), np.zeros(len(i), np.float32), "stop", rows)
            for i, rows in zip(ids, versions, strict=True)
        ]


async def reward_of(response: str) -> float | None:
    """Rewards for letters: none for n, an exception for x."""
    if response == "x":
        raise ValueError("no reward for x")
    return None if response == "n" else float(response == "g")


async def reward_group(responses: list[str]) -> list[float | None]:
    """The share of the group that differs; none for n."""
    return [None if r == "n" else sum(r != other for other in responses) / len(responses) for r in responses]


async def by_number(problem: Problem) -> list[int]:
    return [problem.record["number"]]


class Run:
    """A generator's parts around a played engine; `batch` makes the next batch."""

    def __init__(
        self,
        script: Callable[[int, int], str],
        prompts: int,
        samples: int = 2,
        reward: str = "reward_of",
        staleness: int = 0,
        steps: int = 100,
        written: frozenset[int] = frozenset(),
        version: int = 0,
        cursor: dict[str, int] | None = None,
        problems: int = 50,
        teacher: Teacher | None = None,
        format: str | None = None,
        **rollout: Any,
    ) -> None:
        data = Data.model_validate({"source": "jsonl", "path": "x", "reward": f"{HERE}:{reward}"})
        made = {"prompts_per_step": prompts, "samples_per_prompt": samples, "concurrency": 4, **rollout}
        self.config = Config(
            recipe="test",
            cluster=Cluster(name="local"),
            model=Model(tiny=TinyModel()),
            data=data,
            rollout=Rollout.model_validate(made),
            buffer=Buffer(max_staleness=staleness, wait_timeout=2),
            training=Training(ranks=1, steps=steps),
        )
        self.served = PolicyVersion(version)
        self.engine = Engine(script, self.served)
        self.kept: list[Group] = []
        self.events: list[dict[str, Any]] = []
        self.step = version
        calls = UserCalls(4)
        rollout_config = self.config.rollout
        generation = Generation(
            client=self.engine,  # type: ignore[arg-type]
            scorer=Scorer(data, 5, calls),
            tokenizer=Letters(),
            turns=Turns(data, Letters(), (END,)),
            sampling=Sampling(1.0, 1.0, (END,)),
            samples=samples,
            tries=rollout_config.tries,
            seed="0",
            report=self.report,
            least=min(2, samples),
            mask_off_policy=rollout_config.mask_off_policy,
            generate=load_generate(rollout_config, calls),
        )
        made_problems = tuple(Problem(f"q{i}", "", {"number": i}) for i in range(problems))
        render = by_number
        if format is not None:
            made_data = data.model_copy(update={"format": f"{FUNCTIONS}:{format}"})
            render = make_format(made_data, Letters(), rollout_config, calls)
        feed = PromptFeed(made_problems, 0, False, render, LIMITS, rollout_config, self.report, cursor, written)
        filters = Filters(rollout_config, calls)
        self.pipeline = Pipeline(self.config, generation, feed, filters, self.served, written, teacher)

    def report(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    async def batch(self) -> tuple[StepStatistics, list[Group], dict[str, int]]:
        self.step += 1
        kept: list[Group] = []

        async def keep(group: Group) -> None:
            kept.append(group)

        statistics, cursor = await self.pipeline.batch(self.step, keep)
        self.kept += kept
        return statistics, kept, cursor


def fill(
    script: Callable[[int, int], str], prompts: int, **more: Any
) -> tuple[StepStatistics, list[Group], Engine, list[dict[str, Any]]]:
    """The first batch."""

    async def run() -> tuple[StepStatistics, list[Group], Engine, list[dict[str, Any]]]:
        made = Run(script, prompts, **more)
        try:
            statistics, kept, _ = await made.batch()
        finally:
            made.pipeline.close()
        return statistics, kept, made.engine, made.events

    return asyncio.run(run())


def indices(groups: list[Group]) -> list[int]:
    return [group.index for group in groups]


def test_groups_come_in_the_order_of_the_stream() -> None:
    statistics, kept, engine, _ = fill(lambda number, seed: "g", 7)
    assert [group.index for group in kept] == list(range(7))
    assert len({seed for _, _, seed in engine.asked}) == 7
    assert statistics.tally.dropped == 0


def test_only_the_failed_sample_is_drawn_again_with_another_seed() -> None:
    """Case 1: one sample of a group has no reward; the others stay."""
    first = request_seed("0", "1/0")
    _, kept, engine, events = fill(lambda number, seed: "n" if seed == first else "g", 3)
    assert [group.index for group in kept] == [0, 1, 2]
    assert all(len(group.samples) == 2 for group in kept)
    assert [(n, samples) for n, samples, _ in engine.asked if n == 1] == [(1, 2), (1, 1)]
    assert events == []


@pytest.mark.parametrize("letter", ["n", "x"])
def test_a_prompt_without_rewards_is_dropped_counted_and_replaced(letter: str) -> None:
    statistics, kept, engine, events = fill(lambda number, seed: letter if number == 1 else "g", 3)
    assert [group.index for group in kept] == [0, 2, 3]
    assert statistics.metrics(5)["rollout/dropped_samples"] == 2
    assert len([1 for number, _, _ in engine.asked if number == 1]) == 3
    assert [event["event"] for event in events] == ["sample_dropped"]
    assert ("returned None" if letter == "n" else "no reward for x") in events[0]["reasons"][0]


def test_when_nothing_is_scored_the_step_ends_with_the_share() -> None:
    with pytest.raises(
        TooManyLost,
        match=r"6 of 6 prompts \(100%\) gave no group of samples: \d+ x data.reward=.*reward_of returned None",
    ):
        fill(lambda number, seed: "n", 2)


def test_bad_responses_are_tries_too() -> None:
    def script(number: int, seed: int) -> str:
        if number == 0 and seed == request_seed("0", "0/0"):
            raise BadResponse("no logprobs")
        return "g"

    _, kept, engine, _ = fill(script, 2)
    assert [group.index for group in kept] == [0, 1]
    assert [samples for number, samples, _ in engine.asked if number == 0] == [2, 2]


def test_groups_of_an_earlier_attempt_are_not_made_again() -> None:
    _, kept, engine, _ = fill(lambda number, seed: "g", 4, written=frozenset({0, 1}))
    assert [group.index for group in kept] == [2, 3]
    assert {number for number, _, _ in engine.asked} == {2, 3}


def test_an_error_of_one_prompt_ends_the_step() -> None:
    def script(number: int, seed: int) -> str:
        if number == 2:
            raise RuntimeError("broken")
        return "g"

    with pytest.raises(RuntimeError, match="broken"):
        fill(script, 8)


def test_metrics() -> None:
    statistics, _, _, _ = fill(lambda number, seed: "g" if number == 0 or seed % 2 else "b", 2)
    metrics = statistics.metrics(step=3)
    assert metrics["rollout/raw_reward"] == 0.75
    assert metrics["rollout/wait_time_ratio"] < 0.5
    assert metrics["rollout/zero_std_ratio"] == 0.5
    assert metrics["rollout/response_len/mean"] == 2.0
    assert metrics["rollout/truncated_ratio"] == 0.0
    assert (metrics["rollout/staleness/mean"], metrics["rollout/staleness/max"]) == (2.0, 2.0)
    assert metrics["perf/rollout_tok_per_s"] == pytest.approx(8 / metrics["perf/rollout_time"])


def test_a_sample_that_cannot_be_scored_does_not_drop_its_group() -> None:
    """Case 1: that sample is given up and counted; the others of its group are trained on."""
    first = {request_seed("0", f"1/{attempt}") for attempt in range(3)}
    statistics, kept, engine, events = fill(lambda number, seed: "x" if seed in first else "g", 3, samples=4)
    assert [len(group.samples) for group in kept] == [4, 3, 4]
    assert [samples for number, samples, _ in engine.asked if number == 1] == [4, 1, 1]
    assert statistics.metrics(1)["rollout/dropped_samples"] == 1
    assert [(event["event"], event["samples"]) for event in events] == [("sample_dropped", 1)]


def test_a_group_that_is_scored_together_is_scored_anew_as_a_whole() -> None:
    first = request_seed("0", "0/0")
    texts = {first: "a", first + 1: "n", first + 2: "b"}
    _, kept, engine, _ = fill(lambda number, seed: texts.get(seed, "b"), 1, samples=3, reward="reward_group")
    assert [samples for _, samples, _ in engine.asked] == [3, 1]
    rewards = {chr(sample.token_ids[1]): sample.reward for sample in kept[0].samples}
    assert rewards == {"a": pytest.approx(2 / 3), "b": pytest.approx(1 / 3)}


def varied(number: int, seed: int) -> str:
    """Groups of even prompts have rewards that differ, those of odd ones do not."""
    return "g" if number % 2 or seed == request_seed("0", f"{number}/0") else "b"


def test_groups_without_spread_are_replaced() -> None:
    statistics, kept, _, _ = fill(varied, 4, group_filter="nonzero_std")
    assert indices(kept) == [0, 2, 4, 6]
    metrics = statistics.metrics(1)
    assert metrics["rollout/filtered_groups"] == 3
    assert metrics["rollout/zero_std_ratio"] == pytest.approx(3 / 7)
    assert metrics["rollout/raw_reward"] == 0.5
    assert metrics["rollout/unfiltered_reward"] == pytest.approx((4 * 0.5 + 3) / 7)
    assert metrics["rollout/dropped_samples"] == 0


@pytest.mark.parametrize("rewards", [(0.3, 0.1 + 0.2), (1.0, 1.0 + 2e-7), (0.0, 1e-9), (1.0, 1.0 + 1e-5), (2.0, 2.0)])
def test_no_spread_is_the_same_for_metric_filter_and_advantage(rewards: tuple[float, ...]) -> None:
    import torch

    from vime.algorithms.advantages import group_advantages
    from vime.rollout.filters import rewards_are_equal

    statistics = StepStatistics(all_rewards=[list(rewards)])
    in_float32 = torch.tensor(rewards, dtype=torch.float32)
    advantages = group_advantages(in_float32, torch.zeros(len(rewards), dtype=torch.int64), True)
    equal = not bool(advantages.any())
    assert statistics.metrics(1)["rollout/zero_std_ratio"] == float(equal)
    assert rewards_are_equal(rewards) == equal


def test_when_the_filter_keeps_nothing_the_error_reports_the_share() -> None:
    """Case 4."""
    with pytest.raises(TooManyLost, match=r"6 of 6 groups \(100%\) were filtered out: 6 x all rewards are equal"):
        fill(lambda number, seed: "g", 2, group_filter="nonzero_std", filter_tries=3)


def test_filters_of_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    statistics, kept, _, events = fill(lambda number, seed: "g", 4, group_filter=f"{FUNCTIONS}:low_numbers")
    assert indices(kept) == [0, 1, 2, 4]
    reason = f"rollout.group_filter={FUNCTIONS}:low_numbers raised KeyError: 'three'"
    assert events == [{"event": "sample_dropped", "prompts": [3], "samples": 2, "tries": 3, "reasons": [reason]}]
    assert statistics.metrics(1)["rollout/dropped_samples"] == 2
    assert statistics.metrics(1)["rollout/filtered_groups"] == 0
    assert capsys.readouterr().err.count(f"{FUNCTIONS}:low_numbers failed on group") == 1, "once, not once a try"
    statistics, kept, _, _ = fill(lambda number, seed: "g", 4, batch_filter=f"{FUNCTIONS}:every_other")
    assert indices(kept) == [0, 2, 4, 6]
    assert statistics.metrics(1)["rollout/filtered_groups"] == 3
    with pytest.raises(TooManyLost, match=r"nothing said no"):
        fill(lambda number, seed: "g", 4, batch_filter=f"{FUNCTIONS}:nothing", filter_tries=2)


filtered: list[str] = []


async def fails_on_odd(group: Group) -> bool:
    filtered.append(group.uid)
    if group.index % 2:
        raise ZeroDivisionError
    return True


@pytest.mark.parametrize(
    ("name", "what", "logged"),
    [
        ("fails_on_odd", "raised ZeroDivisionError", "failed on group"),
        ("hangs_on_odd", "took more than 0.5 s", "took more than 0.5 s on group"),
        ("waits_on_odd", "took more than 0.5 s", "took more than 0.5 s on group"),
        ("unsure_on_odd", "returned a ndarray, neither yes nor no", ""),
    ],
)
def test_groups_that_a_filter_fails_on_are_dropped_and_replaced(
    name: str, what: str, logged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 1, for filters: after some tries the samples are given up and counted; the log has each reason once."""
    filtered.clear()
    path = f"{HERE if name == 'fails_on_odd' else FUNCTIONS}:{name}"
    statistics, kept, _, events = fill(lambda number, seed: "g", 3, samples=4, group_filter=path, reward_timeout=0.5)
    assert indices(kept) == [0, 2, 4]
    assert statistics.metrics(1)["rollout/dropped_samples"] == 2 * 4
    assert statistics.metrics(1)["rollout/filtered_groups"] == 0
    assert {reason for event in events for reason in event["reasons"]} == {f"rollout.group_filter={path} {what}"}
    if logged:
        assert capsys.readouterr().err.count(f"{name} {logged}") == 1
    assert all(count == 1 + 2 * (name == "fails_on_odd") for uid, count in Counter(filtered).items() if uid == "1")


def test_a_group_filter_that_always_fails_ends_the_run_with_its_reason() -> None:
    message = (
        rf"6 of 6 prompts \(100%\) gave no group of samples: 6 x rollout.group_filter={FUNCTIONS}:always_fails raised"
    )
    with pytest.raises(TooManyLost, match=message):
        fill(lambda number, seed: "g", 2, group_filter=f"{FUNCTIONS}:always_fails")


batches = 0


async def fails_on_the_first_batch(groups: list[Group]) -> list[bool]:
    global batches
    batches += 1
    if batches <= 3:
        raise OSError("not now")
    return [True] * len(groups)


def test_a_batch_that_a_filter_fails_on_is_dropped_and_made_anew(capsys: pytest.CaptureFixture[str]) -> None:
    global batches
    name = f"{HERE}:fails_on_the_first_batch"
    for already, wanted, dropped in ((0, [3, 4, 5], 6), (1, [0, 1, 2], 0)):
        batches = already
        statistics, kept, _, events = fill(lambda number, seed: "g", 3, batch_filter=name)
        assert indices(kept) == wanted, "called again before its groups are given up"
        assert statistics.metrics(1)["rollout/dropped_samples"] == dropped
        assert [event["prompts"] for event in events] == ([[0, 1, 2]] if dropped else [])
        assert capsys.readouterr().err.count("OSError: not now") == 1
    with pytest.raises(
        TooManyLost, match=rf"9 of \d+ prompts .* 9 x rollout.batch_filter={FUNCTIONS}:always_fails raised"
    ):
        fill(lambda number, seed: "g", 3, batch_filter=f"{FUNCTIONS}:always_fails")


@pytest.mark.parametrize(("format", "what"), [("not_every_third", "raised"), ("hangs_on_every_third", "took more")])
def test_prompts_that_the_format_fails_on_are_dropped_and_replaced(
    format: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 1, for a format: the run goes on, what is asked is what could be made."""
    statistics, kept, engine, events = fill(lambda number, seed: "g", 5, format=format, reward_timeout=0.5)
    assert indices(kept) == [0, 1, 3, 4, 6]
    assert {number for number, _, _ in engine.asked} == {0, 1, 3, 4, 6}
    assert statistics.metrics(1)["rollout/dropped_samples"] == 2 * 2
    assert [(event["event"], event["prompt"]) for event in events] == [("sample_dropped", 2), ("sample_dropped", 5)]
    assert f"data.format={FUNCTIONS}:{format} {what}" in events[0]["reasons"][0]
    assert capsys.readouterr().err.count(f"{FUNCTIONS}:{format} ") == 1, "the log has it once"


def test_requests_are_served_while_a_format_hangs() -> None:
    """A group that is under way is finished meanwhile."""

    async def run() -> None:
        made = Run(lambda number, seed: "g", 3, format="hangs_on_every_third", reward_timeout=1)
        batch = asyncio.create_task(made.batch())
        async with asyncio.timeout(60):
            while {number for number, _, _ in made.engine.asked} != {0, 1}:
                await asyncio.sleep(0.01)
        assert not batch.done()
        statistics, kept, _ = await batch
        assert indices(kept) == [0, 1, 3]
        assert statistics.waited > 0.8, "all others had been answered"
        made.pipeline.close()

    asyncio.run(run())


def of_another_length(groups: list[Group]) -> list[bool]:
    return [True]


def with_other_arguments(rewards: list[float], loss: float) -> bool:
    return True


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"batch_filter": f"{HERE}:of_another_length"}, "got 2 groups and must judge each"),
        ({"group_filter": f"{HERE}:with_other_arguments"}, "asks for 'loss'; there are rewards, record, group"),
        ({"batch_filter": f"{FUNCTIONS}:low_numbers"}, "asks for 'record'; there are groups"),
        ({"group_filter": f"{HERE}:nowhere"}, "has no nowhere"),
        ({"generate": f"{FUNCTIONS}:nothing"}, "must be an async function"),
    ],
)
def test_what_no_other_try_would_mend_is_a_users_error(rollout: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fill(lambda number, seed: "g", 2, **rollout)


def test_over_sampling_starts_more_and_gives_the_surplus_back() -> None:
    async def run() -> None:
        made = Run(lambda number, seed: "g", 3, over_sampling=2.0, concurrency=16)
        never = asyncio.Event()
        made.engine.hold = lambda number: never if number > 2 and made.served.version == 0 else None
        statistics, kept, cursor = await made.batch()
        assert indices(kept) == [0, 1, 2]
        assert cursor == {"epoch": 0, "position": 3}
        assert sorted(number for number, _, _ in made.engine.asked) == [0, 1, 2, 3, 4, 5]
        made.served.set(1)
        statistics, kept, cursor = await made.batch()
        assert sorted(made.engine.cancelled) == [3, 4, 5]
        assert indices(kept) == [3, 4, 5]
        assert {sample.oldest_version for group in kept for sample in group.samples} == {1}
        assert statistics.metrics(2)["rollout/discarded_samples"] == 6
        assert statistics.metrics(2)["rollout/staleness/max"] == 0
        assert cursor == {"epoch": 0, "position": 6}
        made.pipeline.close()

    asyncio.run(run())


def test_what_is_begun_anew_keeps_to_the_concurrency_too() -> None:
    """The first prompt is slow; five others have ended behind it, and four of them are of no use to the next batch."""

    async def run() -> None:
        made = Run(lambda number, seed: "g", 2, over_sampling=3.0, concurrency=2)
        first = asyncio.Event()
        made.engine.hold = lambda number: first if number == 0 else None
        batch = asyncio.create_task(made.batch())
        await asyncio.sleep(0.2)
        first.set()
        assert indices((await batch)[1]) == [0, 1]
        assert {number for number, _, _ in made.engine.asked} == {0, 1, 2, 3, 4, 5}
        made.served.set(1)
        statistics, kept, _ = await made.batch()
        assert indices(kept) == [2, 3]
        assert statistics.metrics(2)["rollout/discarded_samples"] == 8
        assert made.engine.most_busy == 2
        made.pipeline.close()

    asyncio.run(run())


def test_with_the_mask_what_is_under_way_is_kept_on_policy() -> None:
    """Strictly on-policy with partial rollouts: of the surplus, what has ended with the old weights starts anew, what
    is still under way goes on with the new ones, and only their tokens are trained on."""

    async def run() -> None:
        made = Run(lambda number, seed: "gg", 3, over_sampling=2.0, concurrency=16, mask_off_policy=True)
        slow = asyncio.Event()
        made.engine.hold = lambda number: slow if number in (3, 5) else None
        _, kept, _ = await made.batch()
        assert indices(kept) == [0, 1, 2]
        await asyncio.sleep(0.05)
        made.served.set(1)
        next_batch = asyncio.create_task(made.batch())
        await asyncio.sleep(0.05)
        assert [number for number, _, _ in made.engine.asked].count(4) == 2, "at once, not when its turn comes"
        slow.set()
        statistics, kept, cursor = await next_batch
        made.pipeline.close()
        assert indices(kept) == [3, 4, 5]
        assert cursor == {"epoch": 0, "position": 6}
        assert made.engine.cancelled == []
        for group in kept:
            for sample in group.samples:
                assert sample.versions.tolist() == ([[0, 1]] if group.index == 4 else [[0, 0], [1, 1]])
                assert sample.loss_mask.tolist() == ([1, 1, 1] if group.index == 4 else [0, 1, 1])
        metrics = statistics.metrics(2)
        assert metrics["rollout/discarded_samples"] == 2
        assert metrics["rollout/staleness/max"] == 0
        assert metrics["rollout/spanning_ratio"] == pytest.approx(2 / 3)

    asyncio.run(run())


def test_with_the_mask_samples_of_old_weights_alone_are_not_trained_on() -> None:
    """One response of a group ends before the update, the other goes on; and a group whose reward came too late."""

    async def run() -> None:
        made = Run(lambda number, seed: "gg", 1, over_sampling=3.0, concurrency=16, mask_off_policy=True)
        slow = asyncio.Event()
        made.engine.hold = lambda number: slow if number > 0 else None
        made.engine.old = lambda number, sample: (number, sample) == (1, 0) or number == 2
        await made.batch()
        made.served.set(1)
        next_batch = asyncio.create_task(made.batch())
        await asyncio.sleep(0.05)
        slow.set()
        statistics, (group,), _ = await next_batch
        assert group.index == 1
        assert [sample.versions.tolist() for sample in group.samples] == [[[0, 0]], [[0, 0], [1, 1]]]
        assert [sample.loss_mask.tolist() for sample in group.samples] == [[0, 0, 0], [0, 1, 1]]
        assert statistics.metrics(2)["rollout/staleness/max"] == 0
        assert statistics.metrics(2)["rollout/discarded_samples"] == 0
        made.engine.old = lambda number, sample: False
        made.step -= 1  # the batch is trained on version 1 too
        statistics, (group,), cursor = await made.batch()
        assert group.index == 2
        assert [sample.versions.tolist() for sample in group.samples] == [[[0, 1]]] * 2, "it was made anew"
        assert statistics.metrics(2)["rollout/discarded_samples"] == 2
        assert cursor == {"epoch": 0, "position": 3}
        made.pipeline.close()

    asyncio.run(run())


def test_no_prompt_starts_before_the_version_that_its_batch_allows() -> None:
    """Strictly on-policy: nothing of the next batch is asked while this one is trained."""

    async def run() -> None:
        made = Run(lambda number, seed: "g", 2)
        await made.batch()
        next_batch = asyncio.create_task(made.batch())
        await asyncio.sleep(0.05)
        assert sorted(number for number, _, _ in made.engine.asked) == [0, 1]
        made.served.set(1)
        statistics, kept, _ = await next_batch
        assert indices(kept) == [2, 3]
        assert statistics.waited >= 0.04
        made.step += 1
        with pytest.raises(WaitTimeout, match="waited 2 s for policy version 3 from the trainer"):
            await made.batch()

    asyncio.run(run())


@pytest.mark.parametrize("staleness", [1, 3])
def test_running_ahead_keeps_the_bound_exactly(staleness: int) -> None:
    """The trainers are slow: generation goes on until the bound, and is let on by each version."""

    async def run() -> None:
        made = Run(lambda number, seed: "g", 3, staleness=staleness, steps=12, concurrency=64)
        for step in range(1, 13):
            if step - 1 - staleness > made.served.version:
                made.served.set(step - 1 - staleness)
            statistics, kept, cursor = await made.batch()
            await asyncio.sleep(0.03)
            ahead = {number // 3 + 1 for number, _, _ in made.engine.asked}
            assert max(ahead) == min(made.served.version + 1 + staleness, 12), "as far as the bound, and no further"
            assert indices(kept) == [3 * step - 3, 3 * step - 2, 3 * step - 1]
            assert cursor == {"epoch": 0, "position": 3 * step}
            assert statistics.metrics(step)["rollout/staleness/max"] <= staleness
        staleness_of = [
            step - sample.oldest_version
            for step in range(12)
            for group in made.kept[3 * step : 3 * step + 3]
            for sample in group.samples
        ]
        assert max(staleness_of) == staleness
        assert len({number for number, _, _ in made.engine.asked}) == len(made.engine.asked) == 36

    asyncio.run(run())


def test_samples_that_span_versions_are_marked_and_may_be_masked() -> None:
    async def run(mask: bool) -> tuple[list[Group], dict[str, float]]:
        made = Run(lambda number, seed: "gg", 1, staleness=1, mask_off_policy=mask)
        first = asyncio.Event()
        made.engine.hold = lambda number: first
        batch = asyncio.create_task(made.batch())
        await asyncio.sleep(0.02)
        made.served.set(1)
        first.set()
        statistics, kept, _ = await batch
        made.pipeline.close()
        return kept, statistics.metrics(step=2)

    for mask, loss_mask, behind in ((False, [1, 1, 1], (1 / 3, 1.0)), (True, [0, 1, 1], (0.0, 0.0))):
        (group,), metrics = asyncio.run(run(mask))
        assert metrics["rollout/spanning_ratio"] == 1.0
        assert (metrics["rollout/staleness/mean"], metrics["rollout/staleness/max"]) == behind
        for sample in group.samples:
            assert sample.versions.tolist() == [[0, 0], [1, 1]]
            assert sample.version_per_token().tolist() == [0, 1, 1]
            assert sample.loss_mask.tolist() == loss_mask


def test_an_engine_that_serves_older_weights_than_allowed_ends_the_run() -> None:
    async def run() -> None:
        made = Run(lambda number, seed: "g", 1, version=3)
        made.engine.served = PolicyVersion(1)
        with pytest.raises(RuntimeError, match="sampled by version 1, older than 3"):
            await made.batch()

    asyncio.run(run())


def test_a_resumed_batch_has_what_was_written_and_goes_on_behind_it() -> None:
    """What lay between written groups was lost or filtered out by the earlier attempt: it is not asked again."""
    _, kept, engine, _ = fill(lambda number, seed: "g", 4, written=frozenset({0, 3}))
    assert indices(kept) == [4, 5]
    assert {number for number, _, _ in engine.asked} == {4, 5}


def test_seeds_of_requests_lie_far_apart() -> None:
    seeds = sorted(
        request_seed(root, f"{index}/{attempt}")
        for root in ("1/train", "1/evaluation")
        for index in range(500)
        for attempt in range(3)
    )
    assert min(b - a for a, b in itertools.pairwise(seeds)) > 10_000
    assert seeds[-1] < 2**62


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1 << 30),
    staleness=st.integers(0, 3),
    prompts=st.integers(1, 4),
    concurrency=st.integers(1, 9),
    over_sampling=st.sampled_from([1.0, 1.5, 3.0]),
    bad=st.sets(st.integers(0, 40), max_size=8),
    equal=st.sets(st.integers(0, 40), max_size=8),
    mask=st.booleans(),
)
def test_any_speeds_and_failures_give_the_batches_of_the_stream(
    seed: int,
    staleness: int,
    prompts: int,
    concurrency: int,
    over_sampling: float,
    bad: set[int],
    equal: set[int],
    mask: bool,
) -> None:
    """Batches are full, in the order of the stream, without a group lost or doubled, and never older than allowed."""
    rng = random.Random(seed)

    def script(number: int, sample: int) -> str:
        if number in bad:
            return "n"
        return "g" if number in equal else "gb"[sample % 2]

    async def run() -> None:
        made = Run(
            script,
            prompts,
            staleness=staleness,
            steps=7,
            concurrency=concurrency,
            over_sampling=over_sampling,
            group_filter="nonzero_std",
            tries=9,
            filter_tries=9,
            mask_off_policy=mask,
        )
        made.engine.old = lambda number, sample: rng.random() < 0.3
        made.engine.pause = lambda: rng.choice([0, 0, 0.001, 0.004])
        batches = position = 0

        async def train() -> None:
            while True:  # the next version, some time after its batch is there
                await asyncio.sleep(rng.choice([0, 0.001, 0.003]))
                if batches > made.served.version:
                    made.served.set(made.served.version + 1)

        training = asyncio.create_task(train())
        for step in range(1, 8):
            _, kept, cursor = await made.batch()
            good = (index for index in itertools.count(position) if index not in bad | equal)
            wanted = list(itertools.islice(good, prompts))
            assert indices(kept) == wanted
            position = wanted[-1] + 1
            assert cursor == {"epoch": 0, "position": position}
            for group in kept:
                trained = [sample.version_per_token()[sample.loss_mask == 1] for sample in group.samples]
                seen = np.concatenate(trained)
                assert len(seen)
                assert step - 1 - staleness <= seen.min() <= seen.max() < step
                assert mask or len(seen) == sum(sample.response_length for sample in group.samples)
            batches = step
        training.cancel()
        made.pipeline.close()

    asyncio.run(run())
