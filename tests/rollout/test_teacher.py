"""A teacher behind HTTP: what it is asked, what is taken from its answers, and each way it can be of no use."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.buffer.made import make_sample
from tests.conftest import stack_config
from tests.rollout.played_teacher import PlayedTeacher, logprob
from tests.rollout.test_pipeline import Run
from vime.buffer.sample import Group
from vime.config import TinyModel
from vime.config.algorithm import TEACHER_KEY, Algorithm
from vime.config.compose import dump_resolved
from vime.errors import UserError
from vime.models.tiny import make_tiny
from vime.rollout import teacher
from vime.rollout.generator import Generator
from vime.rollout.teacher import Teacher, read_prompt_logprobs
from vime.run.directory import RunDir
from vime.run.http_client import BadResponse
from vime.run.role import Role

T = TypeVar("T")
IDS = [5, 6, 7]


def with_teacher(
    played: PlayedTeacher, use: Callable[[Teacher], Awaitable[T]], patience: float = 30, end: str = ""
) -> T:
    """What `use` makes of a client of the played server."""

    async def run() -> T:
        async with played.serving() as url, Teacher(url + end, 5.0, patience, concurrency=2) as asking:
            return await use(asking)

    return asyncio.run(run())


def refusal(played: PlayedTeacher) -> str:
    """The line with which the check before a run ends."""
    with pytest.raises(UserError) as caught:
        with_teacher(played, lambda asking: asking.check(264, 128))
    line = str(caught.value)
    assert line.startswith("algorithm.teacher=http://127.0.0.1:")
    assert "\n" not in line
    return line


def group(*sizes: tuple[int, int], **changes: Any) -> Group:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 264, p + r).astype(np.int32) for p, r in sizes]
    samples = [make_sample(rng, *size, token_ids=i, **changes) for size, i in zip(sizes, ids, strict=True)]
    return Group("p", 0, tuple(samples))


@pytest.mark.parametrize("end", ["", "/", "/v1"])
def test_each_trained_token_gets_the_teacher_s_logprob(end: str) -> None:
    asked_about = group((3, 5), (1, 9), (4, 1), (2, 0))
    played = PlayedTeacher()

    async def use(asking: Teacher) -> Group:
        await asking.check(264, 128)
        played.asked.clear()
        return await asking.judge(asked_about)

    judged = with_teacher(played, use, end=end)
    trained = [sample for sample in asked_about.samples if sample.loss_mask.any()]
    assert len(trained) < 4, "an empty response is not asked about"
    sent = {tuple(body["prompt"]): body for body in played.asked}
    assert sent.keys() == {tuple(sample.token_ids.tolist()) for sample in trained}, "the ids, as they were sampled"
    for body in played.asked:
        assert (body["model"], body["max_tokens"], body["prompt_logprobs"], body["temperature"]) == ("big", 1, 0, 1.0)
    assert judged.uid == asked_about.uid
    for before, after in zip(asked_about.samples, judged.samples, strict=True):
        assert after.token_ids is before.token_ids
        assert after.teacher_logprobs is not None
        ids = before.token_ids.tolist()
        for i, kept in enumerate(before.loss_mask):
            assert after.teacher_logprobs[i] == (logprob(ids, before.prompt_length + i) if kept else 0)


def test_a_teacher_that_comes_back_is_asked_again() -> None:
    played = PlayedTeacher(busy=3)
    judged = with_teacher(played, lambda asking: asking.judge(group((2, 3), loss_mask=np.ones(3, np.uint8))))
    assert judged.samples[0].teacher_logprobs is not None
    assert len(played.asked) == 4


def test_a_teacher_that_stays_away_ends_the_run_within_bounds() -> None:
    begun = time.monotonic()
    with pytest.raises(
        UserError, match=r"^algorithm.teacher=http.*: waited \d s and \d attempts .*status 503: .*restart"
    ):
        with_teacher(PlayedTeacher(busy=1000), lambda asking: asking.judge(group((2, 3), (2, 4), (2, 5))), patience=1.0)
    assert time.monotonic() - begun < 5


def test_the_key_is_the_environment_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TEACHER_KEY, raising=False)
    played = PlayedTeacher(key="secret")
    line = refusal(played)
    assert line.endswith("; its API key belongs into the environment's VIME_TEACHER_API_KEY")
    assert "answered 401" in line
    monkeypatch.setenv(TEACHER_KEY, "wrong")
    assert "wrong" not in refusal(played)
    monkeypatch.setenv(TEACHER_KEY, "secret")
    with_teacher(played, lambda asking: asking.check(264, 128))


def drop_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    del answer["choices"][0]["prompt_logprobs"]
    return answer


@pytest.mark.parametrize(
    ("played", "words"),
    [
        (PlayedTeacher(vocabulary=263), "has a smaller vocabulary than the policy's 264 tokens"),
        (PlayedTeacher(vocabulary=265), "has a larger vocabulary than the policy's 264 tokens"),
        (PlayedTeacher(longest=128), "serve it with --max-model-len 129, or set rollout.context=127"),
        (PlayedTeacher(change=drop_logprobs), "no prompt_logprobs, as a vLLM server gives them"),
        (PlayedTeacher(change=lambda answer: []), "no prompt_logprobs"),
        (PlayedTeacher(busy=1000), "status 503"),
    ],
    ids=["smaller", "larger", "short", "without", "strange", "busy"],
)
def test_a_server_that_cannot_be_the_teacher_is_found_before_the_run(
    played: PlayedTeacher, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "CHECK_PATIENCE", 1.0)
    assert words in refusal(played)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([None, {"6": {"logprob": -1.0}}], "of 2 tokens, 3 were sent"),
        ([None, {"6": {"logprob": -1.0}}, {"8": {"logprob": -1.0}}], "no logprob of token 2, which is 7"),
        ([None, None, {"7": {"logprob": -1.0}}], "no logprob of token 1, which is 6"),
        ([None, {"6": {"logprob": None}}, {"7": {"logprob": -1.0}}], "no logprob of token 1"),
        ([None, {"6": {"logprob": float("nan")}}, {"7": {"logprob": -1.0}}], "token 1, which is 6, is not finite: nan"),
        ([None, {"6": {"logprob": float("-inf")}}, {"7": {"logprob": -1.0}}], "is not finite: -inf"),
        ([None, {"6": {"logprob": -9999.0}}, {"7": {"logprob": -1.0}}], "is not finite: -9999"),
        ([None, {"6": {"logprob": -1.0}}, {"7": {"logprob": 3.5}}], "token 2 is 3.5, above 0: these are logits"),
        ("", "no prompt_logprobs"),
    ],
)
def test_logprobs_that_cannot_be_used_are_named(rows: Any, words: str) -> None:
    with pytest.raises(BadResponse, match=words):
        read_prompt_logprobs({"choices": [{"prompt_logprobs": rows}]}, IDS, [1, 2])


def test_what_a_teacher_says_of_masked_tokens_does_not_matter() -> None:
    rows = [None, {"6": {"logprob": float("nan")}}, {"7": {"logprob": -1.5}}]
    assert read_prompt_logprobs({"choices": [{"prompt_logprobs": rows}]}, IDS, [2]) == [-1.5]


def test_groups_that_a_batch_may_not_have_are_not_asked_about() -> None:
    played = PlayedTeacher(vocabulary=1 << 20)

    async def fill(asking: Teacher) -> list[Group]:
        made = Run(lambda number, seed: "gb"[number % 2 and seed % 2], 3, group_filter="nonzero_std", teacher=asking)
        try:
            return (await made.batch())[1]
        finally:
            made.pipeline.close()

    kept = with_teacher(played, fill)
    assert [one.index % 2 for one in kept] == [1, 1, 1]
    assert {body["prompt"][0] % 2 for body in played.asked} == {1}
    for sample in (sample for one in kept for sample in one.samples):
        assert sample.teacher_logprobs is not None
        assert sample.teacher_logprobs.tolist() == [logprob(sample.token_ids.tolist(), i) for i in (1, 2)]


def test_a_generator_ends_before_it_waits_for_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "CHECK_PATIENCE", 0.5)
    make_tiny(TinyModel(context=128, layers=1), tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    config = stack_config(tmp_path / "model").model_copy(update={"algorithm": Algorithm(teacher=url)})
    run_dir = RunDir.create(tmp_path, "run", "test")
    run_dir.config.write_text(dump_resolved(config))
    role = Role(run_dir.path, "127.0.0.1", 1, "generator", 1, "token", 0, 1, "127.0.0.1", tmp_path / "model")
    with pytest.raises(
        UserError, match=f"^algorithm.teacher={url}: waited .* for an answer of {url}/v1/models: Client"
    ):
        asyncio.run(Generator(role, config).run())
