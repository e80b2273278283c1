"""Checkpoints of the policy in training, and of PPO's critic with it, by Megatron's distributed checkpointing.

Tensors are saved by the ranks that hold them and can be loaded in another parallel layout. A rank gathers at most the
optimizer state of its own part of the model over its replicas.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import random as parallel_random

from vime.config import Config
from vime.errors import UserError
from vime.run.checkpoints import (
    Complete,
    Facts,
    Incomplete,
    begin,
    commit,
    fixed_settings,
    newest,
    prune,
)
from vime.run.directory import utc_now
from vime.run.files import wait_for_file
from vime.training.checkpoint.model_state import FORMAT, load_into, load_model, state_of, state_of_model
from vime.training.checkpoint.plain_load import check_index, check_owner, plain_pickles
from vime.training.checkpoint.writer import save_strategy
from vime.training.collectives import broadcast_json
from vime.training.learner import Learner


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was just completed. seconds: the whole, on this rank; bytes: of its files."""

    step: int
    path: str
    seconds: float
    bytes: int
    deleted: list[int]
    """Steps of older checkpoints that were deleted after it."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The checkpoint that training goes on from."""

    step: int
    path: str
    cursor: dict[str, Any]
    attempt: int
    """The attempt that saved it."""
    seconds: float
    bytes: int
    same_layout: bool
    """Whether tensor and pipeline sizes are those it was saved with; else random states start anew from the seed."""
    incomplete: list[dict[str, str]]
    """path and reason of the incomplete checkpoints that were passed over."""


class Checkpoints:
    """Saves and loads one learner. Both are collectives over all trainer ranks."""

    def __init__(self, learner: Learner, folder: Path, config: Config, attempt: int) -> None:
        self._learner = learner
        self._folder = folder
        self._config = config
        self._attempt = attempt
        self._strategy = save_strategy()
        self._checked = False

    def save(self, step: int, cursor: Mapping[str, Any]) -> SavedCheckpoint:
        """Save the state after `step` optimizer steps; then delete all but the newest `training.keep_checkpoints`.

        The checkpoint appears whole or not at all. cursor: of the prompt stream after the last batch that was trained.
        """
        started = time.monotonic()
        first = dist.get_rank() == 0
        writing = Path(broadcast_json(str(begin(self._folder, step)) if first else None))
        dist_checkpointing.save(
            self._state(loading=False, with_random=True),
            str(writing),
            self._strategy,
            # What ranks hold does not change from save to save.
            validate_access_integrity=not self._checked,
            content_metadata=dict(FORMAT),
        )
        self._checked = True
        result: dict[str, Any] = {}
        if first:
            training = self._config.training
            checkpoint = commit(
                writing,
                Facts(
                    step=step,
                    cursor=dict(cursor),
                    attempt=self._attempt,
                    time=utc_now(),
                    tensor_parallel=training.tensor_parallel,
                    pipeline_parallel=training.pipeline_parallel,
                    settings=fixed_settings(self._config),
                ),
            )
            deleted = prune(self._folder, training.keep_checkpoints)
            result = {"path": str(checkpoint.path), "bytes": checkpoint.bytes, "deleted": deleted}
        result = broadcast_json(result)
        return SavedCheckpoint(step=step, seconds=time.monotonic() - started, **result)

    def load(self) -> LoadedCheckpoint:
        """Load the newest complete checkpoint into the learner.

        Raises UserError on every rank when there is none, or it belongs to another configuration.
        """
        started = time.monotonic()
        checkpoint, incomplete = self._newest()
        facts = checkpoint.facts
        training = self._config.training
        same_layout = (facts.tensor_parallel, facts.pipeline_parallel) == (
            training.tensor_parallel,
            training.pipeline_parallel,
        )
        for name, size in facts.files.items():
            wait_for_file(checkpoint.path / name, size, self._config.buffer.file_timeout)
        with plain_pickles():
            loaded = dist_checkpointing.load(self._state(loading=True, with_random=same_layout), str(checkpoint.path))
        learner = self._learner
        load_into(learner.trainable, loaded["policy"])
        if learner.critic is not None:
            load_into(learner.critic.trainable, loaded["critic"])
        if "reference" in loaded and learner.reference is not None:
            load_model(learner.reference.chunks, loaded["reference"])
        if same_layout:
            _set_random_states(loaded["random"][0])
        return LoadedCheckpoint(
            step=facts.step,
            path=str(checkpoint.path),
            cursor=facts.cursor,
            attempt=facts.attempt,
            seconds=time.monotonic() - started,
            bytes=checkpoint.bytes,
            same_layout=same_layout,
            incomplete=[{"path": str(one.path), "reason": one.reason} for one in incomplete],
        )

    def _newest(self) -> tuple[Complete, list[Incomplete]]:
        """Rank 0's choice, on every rank: nodes may see a shared folder at different times."""
        choice: dict[str, Any] = {}
        incomplete: list[Incomplete] = []
        if dist.get_rank() == 0:
            try:
                checkpoint, incomplete = newest(self._folder, self._config)
                check_owner(checkpoint.path)
                check_index(checkpoint.path)  # here, so that all ranks refuse it together
                choice = {"path": str(checkpoint.path), "facts": checkpoint.facts.model_dump(mode="json")}
            except UserError as error:
                choice = {"error": str(error)}
        choice = broadcast_json(choice)
        if "error" in choice:
            raise UserError(choice["error"])
        return Complete(Path(choice["path"]), Facts.model_validate(choice["facts"])), incomplete

    def _state(self, *, loading: bool, with_random: bool) -> dict[str, Any]:
        learner = self._learner
        state = {"policy": state_of(learner.trainable, "", loading=loading)}
        if learner.critic is not None:
            state["critic"] = state_of(learner.critic.trainable, "critic.", loading=loading)
        if learner.reference is not None and self._config.algorithm.reference_refresh:
            state["reference"] = state_of_model(learner.reference.chunks, "reference.")
        if with_random:
            state["random"] = ShardedObject(
                "random",
                [_random_states()],
                (
                    parallel_state.get_pipeline_model_parallel_world_size(),
                    parallel_state.get_tensor_model_parallel_world_size(),
                ),
                (
                    parallel_state.get_pipeline_model_parallel_rank(),
                    parallel_state.get_tensor_model_parallel_rank(),
                ),
                replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
            )
        return state


def _random_states() -> dict[str, Any]:
    """The states of every random number generator that training may use."""
    name, keys, position, has_gauss, gauss = np.random.get_state()  # for code that users bring
    return {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "device": parallel_random._get_cuda_rng_state(),
        "tracker": parallel_random.get_cuda_rng_tracker().get_states(),
    }


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    parallel_random._set_cuda_rng_state(states["device"])
    parallel_random.get_cuda_rng_tracker().set_states(states["tracker"])
