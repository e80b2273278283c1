"""One prompt's group of samples: ask the engines, score, ask again for what failed, and give up within bounds."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vime.buffer.sample import Group, Sample
from vime.config import Rollout
from vime.config.import_path import load_function
from vime.errors import UserError
from vime.rollout.client import Completion, RolloutClient, Sampling
from vime.rollout.data.format import Turns
from vime.rollout.data.user_calls import CallFailed, UserCalls, is_async
from vime.rollout.episode import Draft, Episode, EpisodeEnded, ask_from_another_loop
from vime.rollout.prompts import Prompt, Report
from vime.rollout.rewards.scorer import Answer, Scorer, Unscored
from vime.run.http_client import BadResponse


@dataclass
class Tally:
    """What happened while groups were made."""

    tokens: int = 0
    """Tokens sampled, those of failed samples included."""
    dropped: int = 0
    """Samples given up for good."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why samples failed, each failed try counted."""

    def add(self, other: Tally) -> None:
        """Counts `other` in."""
        self.tokens += other.tokens
        self.dropped += other.dropped
        self.reasons += other.reasons


@dataclass(frozen=True)
class Generate:
    """A custom generate: its import path, the function, and how it is called."""

    name: str
    function: Callable[..., Any]
    timeout: float
    calls: UserCalls


def load_generate(rollout: Rollout, calls: UserCalls) -> Generate | None:
    """The run's custom generate, if it has one. Raises UserError when it is not an async function."""
    if rollout.generate is None:
        return None
    function = load_function(rollout.generate, "rollout.generate")
    if not is_async(function):
        raise UserError(f"rollout.generate={rollout.generate} must be an async function of one argument, the episode")
    return Generate(rollout.generate, function, rollout.generate_timeout, calls)


@dataclass(frozen=True)
class Generation:
    """What it takes to make groups."""

    client: RolloutClient
    scorer: Scorer
    tokenizer: Any
    turns: Turns
    sampling: Sampling
    samples: int
    tries: int
    seed: str | None
    """Root of the requests' seeds: what distinguishes this use from others of the run. None: unseeded."""
    report: Report
    least: int = 1
    """Samples without which a group is of no use: 2 where they are compared with each other."""
    mask_off_policy: bool = False
    generate: Generate | None = None

    async def group(self, prompt: Prompt) -> tuple[Group | None, Tally]:
        """The samples of one prompt, scored; None when fewer than `least` could be had within the tries.

        A sample whose request or reward failed is drawn again with another seed, the others of its group are kept; what
        still fails after the last try is left out and counted.
        Raises UserError, RequestRefused, BadRoutes or WaitTimeout for what another try would not mend.
        """
        tally = Tally()
        drafts: list[Draft] = []
        rewards: list[float] = []
        for attempt in range(self.tries):
            made = await self._draw(prompt, self.samples - len(drafts), attempt, tally)
            fresh = [draft for draft in made if isinstance(draft, Draft)]
            tally.reasons.update(str(failure) for failure in made if not isinstance(failure, Draft))
            if self.scorer.by_group:  # they are scored together, those of earlier tries too
                fresh, drafts, rewards = [*drafts, *fresh], [], []
            if fresh:
                answered = [Answer(draft.text, draft.metadata) for draft in fresh]
                for draft, reward in zip(fresh, await self.scorer.score(prompt.problem, answered), strict=True):
                    if isinstance(reward, Unscored):
                        tally.reasons[str(reward)] += 1
                    else:
                        drafts.append(draft)
                        rewards.append(reward)
            if len(drafts) == self.samples:
                break
        missing = self.samples - len(drafts)
        if missing:
            lost = len(drafts) < self.least
            tally.dropped += self.samples if lost else missing
            common = [reason for reason, _ in tally.reasons.most_common(3)]
            self.report("sample_dropped", prompt=prompt.index, samples=tally.dropped, tries=self.tries, reasons=common)
            if lost:
                return None, tally
        samples = [self._sample(prompt, draft, reward) for draft, reward in zip(drafts, rewards, strict=True)]
        return Group(prompt.problem.uid, prompt.index, tuple(samples)), tally

    async def _draw(self, prompt: Prompt, samples: int, attempt: int, tally: Tally) -> Sequence[Draft | Exception]:
        if self.generate is not None:
            generate = self.generate
            return await asyncio.gather(
                *(self._episode(generate, prompt, f"{attempt}/{i}", tally) for i in range(samples))
            )
        try:
            completions = await self._ask(
                prompt.token_ids, samples, prompt.max_tokens, self.sampling, f"{prompt.index}/{attempt}", tally
            )
        except BadResponse as error:
            return [error] * samples
        return [self._draft(completion) for completion in completions]

    async def _ask(
        self, ids: list[int], samples: int, most: int, sampling: Sampling, place: str, tally: Tally
    ) -> list[Completion]:
        seed = None if self.seed is None else request_seed(self.seed, place)
        completions = await self.client.complete(ids, samples, most, sampling, seed)
        tally.tokens += sum(len(completion.token_ids) for completion in completions)
        return completions

    def _draft(self, completion: Completion) -> Draft:
        ids = completion.token_ids
        return Draft(
            response=ids,
            loss_mask=np.ones(len(ids), np.uint8),
            logprobs=completion.logprobs,
            versions=completion.versions,
            truncated=completion.finish_reason == "length",
            text=self.turns.text(ids.tolist()),
            metadata={},
            routes=completion.routes,
        )

    async def _episode(self, generate: Generate, prompt: Prompt, place: str, tally: Tally) -> Draft | Exception:
        """One response by the user's function."""
        turn = 0
        failures: list[Exception] = []

        async def ask(ids: list[int], most: int, ends: tuple[int, ...], stop: tuple[str, ...]) -> Completion:
            nonlocal turn
            turn += 1
            sampling = replace(self.sampling, stop_token_ids=(*self.sampling.stop_token_ids, *ends), stop=stop)
            try:
                (completion,) = await self._ask(ids, 1, most, sampling, f"{prompt.index}/{place}/{turn}", tally)
            except Exception as error:
                failures.append(error)  # an engine's failure is not the function's, which only passes it on
                raise
            return completion

        episode = Episode(
            prompt.problem,
            prompt.token_ids,
            prompt.max_tokens,
            ask_from_another_loop(ask, asyncio.get_running_loop()),
            self.tokenizer,
            self.turns,
        )
        what = f"try/sample {place} of prompt {prompt.problem.uid}"
        try:
            function = _to_its_end(generate.function)
            await generate.calls.call(generate.name, function, generate.timeout, what, episode=episode)
            return episode.draft()
        except CallFailed as error:
            if failures and not isinstance(failures[0], BadResponse):
                raise failures[0] from None
            return failures[0] if failures else CallFailed(f"rollout.generate={error}")
        except (BadResponse, ValueError) as error:
            return BadResponse(f"rollout.generate={generate.name}: {error}")

    def _sample(self, prompt: Prompt, draft: Draft, reward: float) -> Sample:
        sample = Sample(
            token_ids=np.concatenate([np.asarray(prompt.token_ids, np.int32), draft.response]),
            prompt_length=len(prompt.token_ids),
            loss_mask=draft.loss_mask,
            rollout_logprobs=draft.logprobs,
            versions=draft.versions,
            reward=reward,
            finish_reason="truncated" if draft.truncated else "stop",
            metadata=draft.metadata,
            routed_experts=draft.routes.ids if draft.routes is not None else None,
            first_route=draft.routes.first if draft.routes is not None else 0,
        )
        if self.mask_off_policy and len(draft.versions) > 1:
            newest = sample.version_per_token() == sample.newest_version
            return replace(sample, loss_mask=sample.loss_mask * newest.astype(np.uint8))
        return sample


def _to_its_end(function: Callable[..., Any]) -> Callable[..., Any]:
    async def generate(episode: Episode) -> None:
        try:
            await function(episode)
        except EpisodeEnded:
            pass  # no room is left: what there is counts

    return generate


def request_seed(root: str, place: str) -> int:
    """A seed of 62 bits for one request. vLLM draws its sample i with seed + i, so seeds must lie far apart."""
    digest = hashlib.sha256(f"{root}/{place}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2
