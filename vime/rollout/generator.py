"""The generator role: prompts through the engines, scored, into the buffer; one batch a training step."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vime.buffer.control import Control
from vime.buffer.sample import Group
from vime.buffer.writer import BufferWriter
from vime.compose import load_resolved
from vime.config import Config
from vime.errors import UserError
from vime.models.routing import replayed_routing
from vime.role import Role, die_with_parent
from vime.rollout.client import RolloutClient, Sampling
from vime.rollout.evaluate import dataset_name, evaluate, evaluation_due, evaluation_prompts
from vime.rollout.feed import PromptFeed
from vime.rollout.format import load_tokenizer, make_format
from vime.rollout.generate import Generation
from vime.rollout.limits import read_limits
from vime.rollout.rewards import Scorer
from vime.rollout.sources import load_problems
from vime.rollout.step import fill_step
from vime.run_dir import RunDir


class Start(BaseModel):
    """Where the trainers begin: optimizer steps done, and the prompt cursor of their checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

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
    """The role's parts, made once: whatever can be wrong with the data is found before anything is waited for."""

    def __init__(self, role: Role, config: Config) -> None:
        self.config = config
        self.role = role
        self.run_dir = RunDir(role.run_dir)
        self.limits = read_limits(config.rollout, role.model)
        self.tokenizer = load_tokenizer(role.model)
        self.render = make_format(config.data, self.tokenizer)
        self.problems = load_problems(config.data, config.run.seed)
        self.render(self.problems.training[0])
        self.held_out = evaluation_prompts(config, self.problems.held_out, self.render, self.limits)
        self.scorer = Scorer(config.data, config.rollout.reward_timeout)
        self.report = partial(self.run_dir.append_event, role)
        self.routing = replayed_routing(config, role.model)

    async def run(self) -> None:
        """From the first step that the trainers need to the evaluation of the last version."""
        config = self.config
        self.report("started", problems=len(self.problems.training), held_out=len(self.problems.held_out))
        control = Control.connect(self.role, config.cluster.startup_timeout)
        waiting = control.clone()  # for waits, which block a connection, in worker threads
        startup = config.cluster.startup_timeout
        start = await asyncio.to_thread(read_start, waiting, startup)
        url = await asyncio.to_thread(waiting.router, startup)
        async with RolloutClient(url, self.role.token, config.rollout.request_timeout, startup, self.routing) as client:
            try:
                await self._run(client, control, waiting, start)
            finally:
                self.scorer.close()
        self.report("stopped")

    async def _run(self, client: RolloutClient, control: Control, waiting: Control, start: Start) -> None:
        config = self.config
        experts = self.routing.experts if self.routing is not None else None
        writer = BufferWriter(self.run_dir, waiting, config.buffer, experts)
        resumed = await asyncio.to_thread(writer.resume, start.step)
        feed = self._feed(resumed.cursor if resumed.cursor is not None else start.cursor)
        generation = self._generation(client, control)
        written = resumed.groups
        self.report("ready", step=resumed.step, resumed_groups=len(written))
        for step in range(resumed.step, config.training.steps + 1):
            needed = max(0, step - 1 - config.buffer.max_staleness)
            await self._wait_version(waiting, needed)
            version = control.version() or 0
            await self._evaluate(generation, version)
            statistics = await fill_step(
                generation,
                feed,
                config.rollout.prompts_per_step,
                written,
                config.rollout.concurrency,
                partial(_keep, writer),
            )
            metrics = statistics.metrics(step)
            await asyncio.to_thread(writer.commit_batch, step, metrics, feed.cursor())
            written = frozenset()
        # The last batch is trained when the version that it makes is served.
        await self._wait_version(waiting, config.training.steps)
        await self._evaluate(generation, config.training.steps)

    async def _wait_version(self, waiting: Control, version: int) -> None:
        await asyncio.to_thread(waiting.wait_version, version, self.config.buffer.wait_timeout)

    def _feed(self, cursor: dict[str, Any]) -> PromptFeed:
        config = self.config
        return PromptFeed(
            self.problems.training, config.run.seed, config.data.shuffle, self.render, self.limits, cursor
        )

    def _generation(self, client: RolloutClient, control: Control) -> Generation:
        rollout = self.config.rollout
        return Generation(
            client=client,
            scorer=self.scorer,
            tokenizer=self.tokenizer,
            sampling=Sampling(rollout.temperature, rollout.top_p, self.limits.stop_token_ids),
            samples=rollout.samples_per_prompt,
            tries=rollout.tries,
            seed=f"{self.config.run.seed}/train" if rollout.seeded else None,
            version=lambda: control.version() or 0,
            report=self.report,
        )

    async def _evaluate(self, generation: Generation, version: int) -> None:
        config = self.config
        if not self.held_out or not evaluation_due(version, config.evaluation.every, config.training.steps):
            return
        held_out = replace(
            generation,
            sampling=replace(generation.sampling, temperature=config.evaluation.temperature, top_p=1.0),
            samples=config.evaluation.samples_per_prompt,
            # Versions are compared on the same draws.
            seed=f"{config.run.seed}/evaluation",
        )
        result = await evaluate(held_out, self.held_out, config.rollout.concurrency, dataset_name(config))
        self.report("evaluation", version=version, **asdict(result))


async def _keep(writer: BufferWriter, group: Group) -> None:
    if writer.next_commits:  # files are written beside the event loop, which has requests to serve
        await asyncio.to_thread(writer.add, group)
    else:
        writer.add(group)


def main() -> int:
    """Entry point of the role."""
    die_with_parent()
    role = Role.from_environment()
    try:
        asyncio.run(Generator(role, load_resolved(RunDir(role.run_dir).config)).run())
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
