"""The example of docs/custom-logic.md, executed: its module is the code block that the page prints."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import EngineStack
from tests.pages import printed_file
from tests.rollout.reference import logprobs
from vime.buffer.sample import Group, Sample
from vime.config import Config, Data, Rollout
from vime.rollout.client import Completion, RolloutClient, Sampling
from vime.rollout.data.format import Turns, load_tokenizer, make_format
from vime.rollout.data.sources import load_problems
from vime.rollout.data.user_calls import UserCalls
from vime.rollout.episode import Episode
from vime.rollout.filters import Filters
from vime.rollout.group import Generation, Tally, load_generate
from vime.rollout.limits import Limits, read_limits
from vime.rollout.prompts import PromptFeed
from vime.rollout.rewards.scorer import Answer, Scorer
from vime.run.tokens import router_token

LOGIC = {
    "data": {"source": "my_logic:source", "format": "my_logic:render", "reward": "my_logic:score"},
    "rollout": {
        "generate": "my_logic:generate",
        "group_filter": "my_logic:keep",
        "batch_filter": "my_logic:balance",
        "max_response_tokens": 60,
        "samples_per_prompt": 4,
    },
}


@pytest.fixture
def my_logic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module of the page, importable."""
    (tmp_path / "my_logic.py").write_text(printed_file("my_logic.py"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_logic", None)


class Parts:
    """What a generator makes of a configuration with the page's functions, around a client."""

    def __init__(self, data: Data, rollout: Rollout, tokenizer: Any, limits: Limits, client: Any) -> None:
        self.calls = UserCalls(4)
        self.tokenizer = tokenizer
        self.scorer = Scorer(data, 5, self.calls)
        self.filters = Filters(rollout, self.calls)
        self.problems = load_problems(data, 0, 5)
        self.events: list[dict[str, Any]] = []
        self.render = make_format(data, tokenizer, rollout, self.calls)
        self.feed = PromptFeed(self.problems.training, 0, False, self.render, limits, rollout, self.report)
        self.generation = Generation(
            client=client,
            scorer=self.scorer,
            tokenizer=tokenizer,
            turns=Turns(data, tokenizer, limits.stop_token_ids),
            sampling=Sampling(1.0, 1.0, limits.stop_token_ids),
            samples=rollout.samples_per_prompt,
            tries=rollout.tries,
            seed="0",
            report=self.report,
            generate=load_generate(rollout, self.calls),
        )

    def report(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})


class Scripted:
    """An engine that says what it is told, and remembers what it was asked."""

    def __init__(self, tokenizer: Any, *answers: str) -> None:
        self.tokenizer = tokenizer
        self.answers = list(answers)
        self.asked: list[list[int]] = []

    async def complete(
        self, prompt: list[int], samples: int, max_tokens: int, sampling: Sampling, seed: int | None
    ) -> list[Completion]:
        self.asked.append(prompt)
        text = self.answers.pop(0)
        ids = np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"][:max_tokens], np.int32)
        reason = "length" if len(ids) == max_tokens else "stop"
        values = np.linspace(-1, -2, len(ids)).astype(np.float32)
        return [Completion(ids, values, reason, np.array([[0, len(self.asked)]], np.int32))]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vime.config import TinyModel
    from vime.models.tiny import make_tiny

    folder = tmp_path_factory.mktemp("model")
    make_tiny(TinyModel(layers=1, hidden=32, context=128), folder)
    return folder


def sections() -> tuple[Data, Rollout]:
    return Data.model_validate(LOGIC["data"]), Rollout.model_validate(LOGIC["rollout"])


def one_group(tiny: Path, *answers: str, **changes: Any) -> tuple[Group | None, Tally, Scripted, Parts]:
    data, rollout = sections()
    rollout = rollout.model_copy(update={"samples_per_prompt": 1, **changes})
    tokenizer = load_tokenizer(tiny)
    engine = Scripted(tokenizer, *answers)
    parts = Parts(data, rollout, tokenizer, read_limits(rollout, tiny), engine)

    async def run() -> tuple[Group | None, Tally]:
        return await parts.generation.group(await parts.feed.take())

    try:
        group, tally = asyncio.run(run())
    finally:
        parts.calls.close()
    return group, tally, engine, parts


def text(tokenizer: Any, ids: Any) -> str:
    return str(tokenizer.decode(ids))


def test_a_tool_is_called_and_its_tokens_are_masked(my_logic: None, tiny: Path) -> None:
    """Two calls of the calculator, then an answer: ids, masks, logprobs and versions token by token."""
    group, tally, engine, parts = one_group(tiny, "20+30=", "so 50+1=", "50<|end|>")
    assert group is not None
    (sample,) = group.samples
    response = sample.token_ids[sample.prompt_length :]
    turns = ["20+30=", "50;", "so 50+1=", "51;", "50<|end|>"]
    assert text(parts.tokenizer, response) == "".join(turns)
    lengths = [6, 3, 8, 3, 3]
    sampled = [1, 0, 1, 0, 1]
    assert sample.loss_mask.tolist() == [bit for bit, n in zip(sampled, lengths, strict=True) for _ in range(n)]
    assert (sample.rollout_logprobs[sample.loss_mask == 0] == 0).all()
    assert sample.rollout_logprobs[9:17].tolist() == np.linspace(-1, -2, 8).astype(np.float32).tolist()
    assert sample.versions.tolist() == [[0, 1], [9, 2], [20, 3]], "a tool's tokens count with the turn before them"
    assert sample.metadata == {"calls": 2}
    assert sample.reward == pytest.approx(1.0 - 0.2)
    assert sample.finish_reason == "stop"
    assert tally.tokens == 6 + 8 + 3
    whole = sample.token_ids.tolist()
    assert engine.asked == [whole[: sample.prompt_length + n] for n in (0, 9, 20)], "each turn's ids begin the next"


def test_the_ids_that_were_sampled_are_carried_though_text_would_give_others(my_logic: None, tmp_path: Path) -> None:
    """Case 9: vocabulary {he, llo, hello}; the engine samples [he, llo], and a second turn follows."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"he": 0, "llo": 1, "hello": 2, "=": 3, "x": 4, "<e>": 5}
    inner = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="x"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>")
    assert tokenizer("hello", add_special_tokens=False)["input_ids"] == [2]
    asked: list[list[int]] = []

    async def ask(ids: list[int], most: int, ends: tuple[int, ...], stop: tuple[str, ...]) -> Completion:
        asked.append(ids)
        sampled = np.array([0, 1] if len(asked) == 1 else [2, 5], np.int32)
        return Completion(sampled, np.zeros(2, np.float32), "stop", np.array([[0, 0]], np.int32))

    problem = load_problems(sections()[0], 0, 5).training[0]

    async def run() -> Episode:
        episode = Episode(problem, [4], 20, ask, tokenizer, Turns(Data(), tokenizer, (5,)))
        assert (await episode.sample()).token_ids == (0, 1)
        episode.append("hello")
        await episode.sample()
        return episode

    draft = asyncio.run(run()).draft()
    assert asked == [[4], [4, 0, 1, 2]]
    assert draft.response.tolist() == [0, 1, 2, 2, 5]
    assert draft.loss_mask.tolist() == [1, 1, 0, 1, 1]


def test_an_episode_without_room_ends_as_truncated(my_logic: None, tiny: Path) -> None:
    """Case 6: only the sample concerned ends; what the tool could not say is not there."""
    group, *_ = one_group(tiny, "20+30=", "1+1=", max_response_tokens=14)
    assert group is not None
    (sample,) = group.samples
    assert sample.finish_reason == "truncated"
    assert sample.loss_mask.tolist() == [1] * 6 + [0] * 3 + [1] * 4
    assert sample.response_length == 13


def test_a_generate_that_fails_is_tried_again_then_given_up(
    my_logic: None, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import my_logic as module  # type: ignore[import-not-found]

    async def fails(episode: Episode) -> None:
        await episode.sample()
        raise KeyError("calculator")

    module.generate = fails
    group, tally, *_ = one_group(tiny, "1", "2", "3")
    assert group is None
    assert tally.dropped == 1
    assert tally.reasons == {"rollout.generate=my_logic:generate raised KeyError: 'calculator'": 3}
    assert "my_logic:generate failed on try/sample 0/0 of prompt" in capsys.readouterr().err


def test_a_generate_that_hangs_is_cut_off(my_logic: None, tiny: Path) -> None:
    import my_logic as module

    async def hangs(episode: Episode) -> None:
        await asyncio.sleep(60)

    module.generate = hangs
    group, tally, *_ = one_group(tiny, generate_timeout=0.1)
    assert group is None
    assert tally.reasons == {"rollout.generate=my_logic:generate took more than 0.1 s": 3}


def test_the_pages_other_functions(my_logic: None, tiny: Path) -> None:
    data, rollout = sections()
    tokenizer = load_tokenizer(tiny)

    parts = Parts(data, rollout, tokenizer, read_limits(rollout, tiny), None)

    async def run() -> None:
        problem = parts.problems.training[0]
        assert len(parts.problems.training) + len(parts.problems.held_out) == 400
        assert text(tokenizer, await parts.render(problem)) == f"<|user|>{problem.prompt}<|assistant|>"
        answers = [Answer(problem.answer, {"calls": 1}), Answer("", {"calls": 0}), Answer("1", {"calls": 0})]
        right, unsaid, wrong = await parts.scorer.score(problem, answers)
        assert (right, wrong) == (pytest.approx(0.9), 0.0)
        assert "my_logic:score returned None" in str(unsaid)
        together = Scorer(data.model_copy(update={"reward": "my_logic:score_group"}), 5, parts.calls)
        assert await together.score(problem, [answers[0], answers[0], answers[2]]) == [0.5, 0.5, 0.0]
        groups = [Group(str(i), i, (made_sample(reward), made_sample(1.0))) for i, reward in enumerate((0.0, 1.0))]
        assert [await parts.filters.rejected(group, problem) for group in groups] == [
            None, "rollout.group_filter=my_logic:keep said no"
        ]  # fmt: skip
        assert await parts.filters.batch(groups) == [None, None]
        parts.calls.close()

    asyncio.run(run())


def made_sample(reward: float) -> Sample:
    return Sample(
        token_ids=np.array([1, 2], np.int32),
        prompt_length=1,
        loss_mask=np.ones(1, np.uint8),
        rollout_logprobs=np.zeros(1, np.float32),
        versions=np.array([[0, 0]], np.int32),
        reward=reward,
        finish_reason="stop",
    )


def test_messages_are_appended_as_the_chat_template_writes_them(tiny: Path) -> None:
    """The delta of a tool's turn, and an error where a template rewrites what came before."""
    tokenizer = load_tokenizer(tiny)
    turns = Turns(Data(), tokenizer, (tokenizer.eos_token_id,))
    following = turns.following([{"role": "user", "content": "2"}])
    assert text(tokenizer, following) == "<|user|>2<|assistant|>"
    tokenizer.chat_template = "{{ messages | length }}{{ messages[-1]['content'] }}"
    from vime.errors import UserError

    with pytest.raises(UserError, match="does not end an answer with the end-of-sequence token"):
        turns.following([{"role": "user", "content": "2"}])


@pytest.mark.slow
def test_a_calculator_on_a_real_engine(my_logic: None, engine_stack: EngineStack) -> None:
    """The page's generate on vLLM, with a stop that a random model often says: every token is accounted for."""
    import my_logic as module

    stack = engine_stack
    config: Config = stack.config
    data, rollout = sections()
    rollout = rollout.model_copy(update={"context": config.rollout.context})
    tokenizer = load_tokenizer(stack.model)
    limits = read_limits(rollout, stack.model)
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + [str(digit) for digit in range(10)]
    ids = {letter: tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in letters}

    async def generate(episode: Episode) -> None:
        """As the page's, but whatever precedes a letter or a digit is a question: the model is random."""
        episode.metadata["calls"] = 0
        for _ in range(3):
            turn = await episode.sample(max_tokens=12, stop=letters[:4], stop_token_ids=[ids[c] for c in letters[4:]])
            said = tokenizer.decode(turn.token_ids[-1:])
            if said not in letters:
                return
            episode.metadata["calls"] += 1
            episode.append(f"={ord(said)};")

    async def score(response: str, metadata: dict[str, Any]) -> float:
        """Async, so that it runs here, where the module's function is replaced."""
        return float(metadata["calls"])

    module.generate = generate
    module.score = score

    client = RolloutClient(stack.router_url, router_token(stack.role.token), 120, 30)
    parts = Parts(data, rollout, tokenizer, limits, client)

    async def run() -> list[Group]:
        async with client:
            prompts = [await parts.feed.take() for _ in range(6)]
            made = await asyncio.gather(*(parts.generation.group(prompt) for prompt in prompts))
            parts.calls.close()
            return [group for group, _ in made if group is not None]

    groups = asyncio.run(run())
    assert len(groups) == 6
    samples = [sample for group in groups for sample in group.samples]
    assert sum(sample.metadata["calls"] for sample in samples) > 20
    for sample in samples:
        response = sample.token_ids[sample.prompt_length :]
        said = [tokenizer.decode([token]) for token in response]
        # The tool's tokens, and no others, are masked out; they are what the tool was asked for.
        expected, position, calls = np.zeros(len(response), np.uint8), 0, 0
        while position < len(response):
            expected[position] = 1
            answered = f"={ord(said[position])};" if said[position] in letters else ""
            if answered and "".join(said[position + 1 : position + 1 + len(answered)]) == answered:
                position, calls = position + len(answered), calls + 1
            position += 1
        assert sample.loss_mask.tolist() == expected.tolist()
        assert calls == min(sample.metadata["calls"], 2), "nothing is sampled behind the third answer: it is left out"
        under = logprobs(stack.model, sample.token_ids[: sample.prompt_length].tolist(), response)
        kept = sample.loss_mask == 1
        np.testing.assert_allclose(sample.rollout_logprobs[kept], under[kept], atol=5e-5)
