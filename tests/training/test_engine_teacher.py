"""A real engine as the teacher: its logprobs are those of the model, and teach what the model in Megatron teaches."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import EngineStack
from tests.rollout.reference import logprobs
from tests.training.ranks import Ranks
from tests.training.test_algorithms import judged_batch, run_steps
from tests.training.test_model import TINY
from tests.training.test_step import write_batch
from vime.buffer.sample import Group
from vime.config.algorithm import TEACHER_KEY
from vime.errors import UserError
from vime.models.tiny import make_tiny
from vime.rollout.teacher import Teacher
from vime.run.tokens import engine_token

pytestmark = pytest.mark.slow

VOCABULARY, CONTEXT = 264, 127


def check(url: str, vocabulary: int = VOCABULARY, context: int = CONTEXT) -> None:
    async def run() -> None:
        async with Teacher(url, 60, 60, 8) as teacher:
            await teacher.check(vocabulary, context)

    asyncio.run(run())


def test_a_real_engine_teaches_what_the_model_teaches(
    engine_stack: EngineStack, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = engine_stack
    monkeypatch.setenv(TEACHER_KEY, engine_token(stack.role.token, 0))
    # Random tokens that no engine sampled, some of them masked, of a policy that is another model.
    folder, served = tmp_path / "loaded", tmp_path / "served"
    served.mkdir()
    make_tiny(TINY, folder / "hf")
    (folder / "teacher").symlink_to(stack.model)
    loaded = write_batch(folder)
    judged: list[Group] = []

    def judge(group: Group) -> Group:
        async def ask() -> Group:
            async with Teacher(stack.engine_url, 60, 60, 8) as teacher:
                await teacher.check(VOCABULARY, CONTEXT)
                return await teacher.judge(group)

        judged.append(asyncio.run(ask()))
        return judged[-1]

    manifest = judged_batch(folder, served, judge)
    for sample in (sample for group in judged for sample in group.samples):
        assert sample.teacher_logprobs is not None
        prompt, response = np.split(sample.token_ids, [sample.prompt_length])
        expected = logprobs(stack.model, prompt.tolist(), response)
        np.testing.assert_allclose(sample.teacher_logprobs, np.where(sample.loss_mask, expected, 0), atol=1e-5)
    own, asked = ({"teacher": teacher, "teacher_coefficient": 0.5} for teacher in ("TEACHER", stack.engine_url))
    (wanted,) = ranks.run(1, run_steps, folder, loaded, own, {})
    (seen,) = ranks.run(1, run_steps, served, manifest, asked, {})
    assert abs(wanted["metrics"][0]["train/opd_reverse_kl"]) > 0.1
    for one, other in zip(seen["metrics"], wanted["metrics"], strict=True):
        assert one == pytest.approx(other, abs=1e-5, rel=1e-5)
    for name, tensor in wanted["weights"].items():
        assert (seen["weights"][name] - tensor).abs().max() < 1e-5, name


def test_a_temperature_changes_nothing_about_the_logprobs_of_given_tokens(engine_stack: EngineStack) -> None:
    """Why a server may be the teacher at temperature 1 alone: vLLM would not scale what it is asked about."""
    ids = [257, 49, 43, 50, 258]
    hot, cold = (
        engine_stack.complete(ids, prompt_logprobs=0, max_tokens=1, temperature=temperature)["prompt_logprobs"]
        for temperature in (1.0, 0.25)
    )
    assert hot == cold
    seen = [next(iter(row.values()))["logprob"] for row in hot[1:]]
    np.testing.assert_allclose(seen, logprobs(engine_stack.model, ids[:1], np.array(ids[1:], np.int32)), atol=1e-5)


@pytest.mark.parametrize(
    ("vocabulary", "context", "words"),
    [
        (VOCABULARY + 1, CONTEXT, "has a smaller vocabulary than the policy's 265 tokens"),
        (VOCABULARY - 1, CONTEXT, "has a larger vocabulary than the policy's 263 tokens"),
        (VOCABULARY, 128, "takes at most 128 tokens, and needs one more than a sample's 128: serve it with"),
    ],
)
def test_a_real_engine_of_another_shape_is_refused(
    engine_stack: EngineStack, monkeypatch: pytest.MonkeyPatch, vocabulary: int, context: int, words: str
) -> None:
    monkeypatch.setenv(TEACHER_KEY, engine_token(engine_stack.role.token, 0))
    with pytest.raises(UserError, match=words):
        check(engine_stack.engine_url, vocabulary, context)


def test_an_engine_without_the_key_is_named(engine_stack: EngineStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TEACHER_KEY, raising=False)
    with pytest.raises(
        UserError, match=f"^algorithm.teacher={engine_stack.engine_url}: .* answered 401: .*{TEACHER_KEY}$"
    ):
        check(engine_stack.engine_url)
