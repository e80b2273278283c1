"""One prompt's group of samples: ask the engines, score, ask again for what failed, and give up within bounds."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vime.buffer.sample import Group, Sample
from vime.rollout.client import BadResponse, Completion, RolloutClient, Sampling
from vime.rollout.feed import Prompt
from vime.rollout.rewards import Scorer, Unscored

Report = Callable[..., None]
"""Called with an event's name and its fields."""


@dataclass
class Tally:
    """What happened while the groups of one step were made."""

    tokens: int = 0
    """Tokens sampled, those of failed samples included."""
    dropped: int = 0
    """Samples given up for good."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why samples failed, each failed try counted."""


@dataclass(frozen=True)
class Generation:
    """What it takes to make groups."""

    client: RolloutClient
    scorer: Scorer
    tokenizer: Any
    sampling: Sampling
    samples: int
    tries: int
    seed: str | None
    """Root of the requests' seeds: what distinguishes this use from others of the run. None: unseeded."""
    version: Callable[[], int]
    """The policy version that the engines serve now."""
    report: Report

    async def group(self, prompt: Prompt, tally: Tally) -> Group | None:
        """All samples of one prompt, scored; None when some could not be had within the tries.

        A sample whose request or reward failed is drawn again with another seed, the others of its group are kept.
        Raises UserError, RequestRefused, BadRoutes or WaitTimeout for what another try would not mend.
        """
        good: list[Sample] = []
        reasons: Counter[str] = Counter()
        for attempt in range(self.tries):
            missing = self.samples - len(good)
            for outcome in await self._try(prompt, missing, attempt, tally):
                if isinstance(outcome, Sample):
                    good.append(outcome)
                else:
                    reasons[str(outcome)] += 1
            if len(good) == self.samples:
                tally.reasons += reasons
                return Group(prompt.problem.uid, prompt.index, tuple(good))
        tally.dropped += self.samples
        tally.reasons += reasons
        common = [reason for reason, _ in reasons.most_common(3)]
        self.report("sample_dropped", prompt=prompt.index, samples=self.samples, tries=self.tries, reasons=common)
        return None

    async def _try(self, prompt: Prompt, samples: int, attempt: int, tally: Tally) -> list[Sample | Exception]:
        version = self.version()
        seed = None if self.seed is None else request_seed(self.seed, prompt.index, attempt)
        try:
            completions = await self.client.complete(prompt.token_ids, samples, prompt.max_tokens, self.sampling, seed)
        except BadResponse as error:
            return [error] * samples
        tally.tokens += sum(len(completion.token_ids) for completion in completions)
        rewards = await self.scorer.score(prompt.problem, [self.text(completion) for completion in completions])
        return [
            reward if isinstance(reward, Unscored) else _sample(prompt, completion, version, reward)
            for completion, reward in zip(completions, rewards, strict=True)
        ]

    def text(self, completion: Completion) -> str:
        """The response as a scorer sees it: without the token that ended it and without special tokens."""
        ids = completion.token_ids.tolist()
        if ids and ids[-1] in self.sampling.stop_token_ids:
            ids = ids[:-1]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def request_seed(root: str, index: int, attempt: int) -> int:
    """A seed of 62 bits for one request. vLLM draws its sample i with seed + i, so seeds must lie far apart."""
    digest = hashlib.sha256(f"{root}/{index}/{attempt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


def _sample(prompt: Prompt, completion: Completion, version: int, reward: float) -> Sample:
    length = len(completion.token_ids)
    return Sample(
        token_ids=np.concatenate([np.asarray(prompt.token_ids, np.int32), completion.token_ids]),
        prompt_length=len(prompt.token_ids),
        loss_mask=np.ones(length, np.uint8),
        rollout_logprobs=completion.logprobs,
        versions=np.array([[0, version]], np.int32),
        reward=reward,
        finish_reason="truncated" if completion.finish_reason == "length" else "stop",
        routed_experts=completion.routes.ids if completion.routes is not None else None,
        first_route=completion.routes.first if completion.routes is not None else 0,
    )
