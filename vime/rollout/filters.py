"""Which groups a batch is made of: dynamic sampling by a rule or by functions of the user's.

A group filter is called with those of these arguments that it names: `rewards` (list of numbers), `record` (the
source's own), `group` (all samples with their tokens); it returns whether to keep the group. A batch filter is called
with `groups` (all groups of a batch) and returns a list that says of each whether to keep it. Both may be async.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vime.algorithms.spread import spread_is_residue
from vime.buffer.sample import Group
from vime.config import Rollout
from vime.config.import_path import load_function, named_arguments
from vime.rollout.data.problem import Problem
from vime.rollout.data.results import Judgements, judgement
from vime.rollout.data.user_calls import CallFailed, UserCalls


class FilterFailed(Exception):
    """A filter of the user's gave no judgement: it raised, took too long, or returned what is neither yes nor no."""


def rewards_are_equal(rewards: Sequence[float]) -> bool:
    """Whether the advantages will take these rewards, which reach them in float32, for equal."""
    seen = np.asarray(rewards, np.float32).astype(np.float64)
    return bool(spread_is_residue(seen.min(), seen.max()))


class Filters:
    """The filters of a run. Raises UserError when one cannot be had."""

    def __init__(self, rollout: Rollout, calls: UserCalls) -> None:
        self._timeout, self._tries = rollout.reward_timeout, rollout.tries
        self._calls = calls
        self._group_name, self._batch_name = rollout.group_filter, rollout.batch_filter
        if self._group_name or self._batch_name:
            calls.import_for_calls(Group.__module__)
        self._group: Callable[..., Any] | None = None
        self._batch: Callable[..., Any] | None = None
        self._takes: list[str] = []
        if self._group_name not in (None, "nonzero_std"):
            assert self._group_name is not None
            self._group = load_function(self._group_name, "rollout.group_filter")
            offered = ("rewards", "record", "group")
            self._takes = named_arguments(self._group, offered, self._group_name, "rollout.group_filter")
        if self._batch_name is not None:
            self._batch = load_function(self._batch_name, "rollout.batch_filter")
            named_arguments(self._batch, ("groups",), self._batch_name, "rollout.batch_filter")

    @property
    def whole_batches(self) -> bool:
        """Whether there is a batch filter, so that no group may be written before the batch is whole."""
        return self._batch is not None

    async def rejected(self, group: Group, problem: Problem) -> str | None:
        """Why the batch may not have this group; None when it may. Raises FilterFailed after the last try."""
        rewards = [sample.reward for sample in group.samples]
        if self._group_name is None:
            return None
        if self._group is None:
            return "all rewards are equal" if rewards_are_equal(rewards) else None
        offered = {"rewards": rewards, "record": problem.record, "group": group}
        given = {name: offered[name] for name in self._takes}
        field = f"rollout.group_filter={self._group_name}"
        what = f"group {group.uid}"
        kept = await self._ask(self._group_name, self._group, "rollout.group_filter", what, judgement, given)
        return None if kept else f"{field} said no"

    async def batch(self, groups: Sequence[Group]) -> list[str | None]:
        """For each group of a batch why it may not have it, or None.

        Raises FilterFailed after the last try, UserError for a list of another length.
        """
        if self._batch is None:
            return [None] * len(groups)
        assert self._batch_name is not None
        what, field = f"the {len(groups)} groups of a batch", f"rollout.batch_filter={self._batch_name}"
        given = {"groups": list(groups)}
        judged = Judgements(field, len(groups))
        kept = await self._ask(self._batch_name, self._batch, "rollout.batch_filter", what, judged, given)
        return [None if keep else f"{field} said no" for keep in kept]

    async def _ask(
        self,
        name: str,
        function: Callable[..., Any],
        key: str,
        what: str,
        returns: Callable[[Any], Any],
        given: dict[str, Any],
    ) -> Any:
        try:
            return await self._calls.call_again(self._tries, name, function, self._timeout, what, returns, **given)
        except CallFailed as error:
            raise FilterFailed(f"{key}={error}") from error
