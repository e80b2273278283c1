"""The generator role: prompts through the engines, scored, into the buffer; one batch a training step."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from pydantic import Field, ValidationError

from vime.buffer.control import Control
from vime.buffer.sample import Group
from vime.buffer.writer import BufferWriter
from vime.config import Config
from vime.config.compose import load_resolved
from vime.config.section import Strict
from vime.errors import UserError
from vime.models.family import read_shape
from vime.models.routing import replayed_routing
from vime.rollout.client import RolloutClient, Sampling
from vime.rollout.data.fingerprint import fingerprint
from vime.rollout.data.format import Turns, answer_end, load_tokenizer, make_format, probe_format
from vime.rollout.data.sources import load_problems, started_facts
from vime.rollout.data.user_calls import UserCalls, worker_count
from vime.rollout.evaluate import EvaluationTask, evaluate, evaluated_versions, evaluation_due, evaluation_tasks
from vime.rollout.filters import Filters
from vime.rollout.group import Generation, load_generate
from vime.rollout.limits import read_limits
from vime.rollout.pipeline import Pipeline, TooManyLost
from vime.rollout.policy_version import PolicyVersion
from vime.rollout.prompts import PromptFeed
from vime.rollout.rewards.references import check_references
from vime.rollout.rewards.scorer import Scorer
from vime.rollout.teacher import Teacher
from vime.run.directory import RunDir
from vime.run.jsonl import read_lines
from vime.run.network import allow_many_connections
from vime.run.role import Role, die_with_parent
from vime.run.tokens import router_token


class Start(Strict):
    """Where the trainers begin: optimizer steps done, and the prompt cursor of their checkpoint."""

    step: int = Field(ge=0)
    cursor: dict[str, Any] = {}


def read_start(control: Control, timeout: float) -> Start:
    """What trainer rank 0 published at its start."""
    value = control.get("start", timeout, "trainer rank 0 to say at which step it starts")
    try:
        return Start.model_validate(value)
    except ValidationError as error:
        raise UserError(f"the store's start has the wrong shape: {error.errors()[0]['msg']}") from error


class Generator:
    """The role's parts, made once. Whatever can be wrong with the data is found before anything is waited for.

    To be made outside of an event loop.
    """

    def __init__(self, role: Role, config: Config) -> None:
        self.config = config
        self.role = role
        self.run_dir = RunDir(role.run_dir)
        self.limits = read_limits(config.rollout, role.model)
        self.tokenizer = load_tokenizer(role.model)
        self.calls = UserCalls(worker_count(config.rollout.reward_workers))
        self.render = make_format(config.data, self.tokenizer, config.rollout, self.calls)
        answer_end(config.data, self.tokenizer, self.limits.stop_token_ids)
        self.problems = load_problems(config.data, config.run.seed, config.cluster.startup_timeout)
        self.scorer = Scorer(config.data, config.rollout.reward_timeout, self.calls)
        self.evaluations: list[EvaluationTask] = []
        self.scorers: list[Scorer] = []
        self.filters = Filters(config.rollout, self.calls)
        self.generate = load_generate(config.rollout, self.calls)
        self.report = partial(self.run_dir.append_event, role)
        self.routing = replayed_routing(config, role.model)
        self.served = PolicyVersion()
        self.evaluated: set[int] = set()

    async def run(self) -> None:
        """From the first step that the trainers need to the evaluation of the last version."""
        try:
            await self._prepare()
            self.report("started", **started_facts(self.problems))
            async with self._teacher() as teacher:
                if teacher is not None:
                    await teacher.check(read_shape(self.role.model).vocabulary, self.limits.context)
                await self._start(teacher)
        finally:
            self.calls.close()
        self.report("stopped")

    async def _start(self, teacher: Teacher | None) -> None:
        config = self.config
        control = Control.connect(self.role, config.cluster.startup_timeout)
        startup = config.cluster.startup_timeout
        start = await asyncio.to_thread(read_start, control, startup)
        url = await asyncio.to_thread(control.router, startup)
        following = asyncio.create_task(self.served.follow(control.clone(), config.training.steps))
        token = router_token(self.role.token)
        async with RolloutClient(url, token, config.rollout.request_timeout, startup, self.routing) as client:
            try:
                await self._run(client, control, start, teacher)
            finally:
                following.cancel()
                for scorer in (self.scorer, *self.scorers):
                    await scorer.close()

    async def _prepare(self) -> None:
        """Render a prompt, and all of evaluation's; read the references."""
        config = self.config
        await probe_format(self.render, self.problems.training)
        held_out = self.problems.held_out
        self.evaluations = await evaluation_tasks(config, held_out, self.render, self.limits, self.report)
        timeout = config.rollout.reward_timeout
        self.scorers = [Scorer(task.data, timeout, self.calls) for task in self.evaluations]
        await check_references(config.data, self.problems.training, self.calls, self.report, "data")
        for task in self.evaluations:
            asked = [prompt.problem for prompt in task.prompts]
            await check_references(task.data, asked, self.calls, self.report, task.name)

    async def _run(self, client: RolloutClient, control: Control, start: Start, teacher: Teacher | None) -> None:
        config = self.config
        experts = self.routing.experts if self.routing is not None else None
        writer = BufferWriter(self.run_dir, control, config.buffer, experts)
        resumed = await asyncio.to_thread(writer.resume, start.step)
        for reason in resumed.damaged:
            self.report("buffer_damaged", reason=reason)
        # A batch is committed only after the evaluation of the version before it: see `_before_commit`.
        known = start.step if resumed.discarded else resumed.step - 1
        self.evaluated = evaluated_versions(read_lines(self.run_dir.events), known) | set(range(resumed.step - 1))
        cursor = resumed.cursor if resumed.cursor is not None else start.cursor
        feed = self._feed(cursor, resumed.groups)
        generation = self._generation(client)
        pipeline = Pipeline(config, generation, feed, self.filters, self.served, resumed.groups, teacher)
        self.report("ready", step=resumed.step, resumed_groups=len(resumed.groups))
        try:
            for step in range(resumed.step, config.training.steps + 1):
                if config.buffer.max_staleness == 0:  # the engines have nothing else to do
                    await self._evaluate(generation, step - 1)
                evaluation = asyncio.create_task(self._evaluate(generation, step - 1))
                try:
                    statistics, cursor = await pipeline.batch(step, partial(keep, writer))
                    await evaluation
                finally:
                    evaluation.cancel()
                await asyncio.to_thread(writer.commit_batch, step, statistics.metrics(step), cursor)
        finally:
            pipeline.close()
        # The last batch is trained when the version that it makes is served.
        await self.served.reach(config.training.steps, config.buffer.wait_timeout)
        await self._evaluate(generation, config.training.steps)

    def _teacher(self) -> contextlib.AbstractAsyncContextManager[Teacher | None]:
        url, rollout = self.config.algorithm.teacher_url, self.config.rollout
        if url is None:
            return contextlib.nullcontext()
        return Teacher(url, rollout.request_timeout, self.config.cluster.startup_timeout, rollout.concurrency)

    def _feed(self, cursor: dict[str, Any], written: frozenset[int]) -> PromptFeed:
        config = self.config
        return PromptFeed(
            self.problems.training,
            config.run.seed,
            config.data.shuffle,
            self.render,
            self.limits,
            config.rollout,
            self.report,
            cursor,
            written,
            fingerprint(self.problems, config.data, self.tokenizer.chat_template),
            config.data.allow_change,
        )

    def _generation(self, client: RolloutClient) -> Generation:
        rollout = self.config.rollout
        return Generation(
            client=client,
            scorer=self.scorer,
            tokenizer=self.tokenizer,
            turns=Turns(self.config.data, self.tokenizer, self.limits.stop_token_ids),
            sampling=Sampling(rollout.temperature, rollout.top_p, self.limits.stop_token_ids),
            samples=rollout.samples_per_prompt,
            tries=rollout.tries,
            seed=f"{self.config.run.seed}/train" if rollout.seeded else None,
            report=self.report,
            least=min(2, rollout.samples_per_prompt),
            mask_off_policy=rollout.mask_off_policy,
            generate=self.generate,
        )

    async def _evaluate(self, generation: Generation, version: int) -> None:
        """Evaluate `version`, once it is served, if it is due and was not evaluated yet.

        The batch that makes the next version is held back until this is done, however far generation runs ahead, so
        that every due version is evaluated, once, and all of its answers come from that version.
        """
        config = self.config
        due = evaluation_due(version, config.evaluation.every, config.training.steps)
        if not self.evaluations or not due or version in self.evaluated:
            return
        self.evaluated.add(version)
        await self.served.reach(version, config.buffer.wait_timeout)
        for task, scorer in zip(self.evaluations, self.scorers, strict=True):
            asking = replace(
                generation,
                scorer=scorer,
                sampling=replace(generation.sampling, temperature=task.temperature, top_p=task.top_p),
                samples=task.samples,
                least=1,
                mask_off_policy=False,
                # Versions are compared on the same draws.
                seed=f"{config.run.seed}/evaluation",
            )
            result = await evaluate(asking, task, config.rollout.concurrency)
            self.report("evaluation", version=version, **asdict(result))


async def keep(writer: BufferWriter, group: Group) -> None:
    """Put a finished group into the batch."""
    if writer.next_commits:  # files are written beside the event loop, which has requests to serve
        await asyncio.to_thread(writer.add, group)
    else:
        writer.add(group)


def main() -> int:
    """Entry point of the role."""
    die_with_parent()
    role = Role.from_environment()
    allow_many_connections()
    try:
        asyncio.run(Generator(role, load_resolved(RunDir(role.run_dir).config)).run())
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except TooManyLost as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
