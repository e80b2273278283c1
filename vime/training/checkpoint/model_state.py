"""One model of a checkpoint, with or without its optimizer: what is saved of it, and how it is put back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding, extract_sharded_base
from megatron.core.optimizer import MegatronOptimizer

from vime.training.model import Policy
from vime.training.trainable import Trainable

FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Optimizer state as tensors of the parameters' shapes and names, which fit every layout: with expert parallelism
Megatron chains two optimizers, without it has one. Pass a copy: Megatron adds to it."""


def state_of_model(chunks: Sequence[Policy], prefix: str) -> dict[str, Any]:
    """Weights by chunk. prefix: of the tensors' names, by which models of one checkpoint differ."""
    state = _chunks_state(chunks)
    add_prefix_for_sharding(state, prefix)
    return state


def load_model(chunks: Sequence[Policy], loaded: dict[str, Any]) -> None:
    """Put back what `state_of_model` described."""
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[_chunk_key(index)])


def state_of(trainable: Trainable, prefix: str, *, loading: bool) -> dict[str, Any]:
    """Weights, optimizer and place in the learning rate's schedule."""
    state = _chunks_state(trainable.chunks)
    state["optimizer"], settings = _optimizer_state(trainable, state, loading=loading)
    add_prefix_for_sharding(state, prefix)
    if not loading:
        state["scheduler"] = trainable.scheduler.state_dict()
        state["adam_steps"] = _steps(settings)
    return state


def load_into(trainable: Trainable, loaded: dict[str, Any]) -> None:
    """Put back what `state_of` described.

    Adam's settings and the schedule are this configuration's: only its place in the schedule is the checkpoint's, and
    how often Adam has stepped.
    """
    load_model(trainable.chunks, loaded)
    _, settings = _optimizer_state(trainable, _chunks_state(trainable.chunks), loading=True)
    steps = loaded["adam_steps"]
    _set_steps(settings, steps)
    _load_optimizer(trainable.optimizer, merge(settings, loaded["optimizer"]), steps)
    trainable.scheduler.step(increment=loaded["scheduler"]["num_steps"] - trainable.scheduler.num_steps)


def _optimizer_state(
    trainable: Trainable, model: dict[str, Any], *, loading: bool
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The optimizer's tensors, and the rest of its state, which is the same in every rank and depends on the layout."""
    give_state(trainable.optimizer)
    whole = trainable.optimizer.sharded_state_dict(dict(model), is_loading=loading, metadata=dict(FORMAT))
    tensors, settings = extract_sharded_base(whole)
    return tensors, dict_list_map_inplace(_unwrapped, settings)


def _unwrapped(value: Any) -> Any:
    return value.unwrap() if isinstance(value, LocalNonpersistentObject) else value


def _steps(settings: Any) -> float:
    """How often Adam has stepped, which is the same for all parameters."""
    found = {float(value) for key, value in _entries(settings) if key in ("step", "common_step")}
    return max(found, default=0.0)


def _set_steps(settings: Any, steps: float) -> None:
    if isinstance(settings, dict):
        for key, value in settings.items():
            if key in ("step", "common_step"):
                settings[key] = torch.full_like(value, steps) if isinstance(value, torch.Tensor) else type(value)(steps)
            else:
                _set_steps(value, steps)
    elif isinstance(settings, list):
        for value in settings:
            _set_steps(value, steps)


def _entries(settings: Any) -> Iterator[tuple[Any, Any]]:
    """(key, value) of every entry of nested dictionaries and lists."""
    for key, value in settings.items() if isinstance(settings, dict) else enumerate(settings):
        if isinstance(value, dict | list):
            yield from _entries(value)
        else:
            yield key, value


def _chunks_state(chunks: Sequence[Policy]) -> dict[str, Any]:
    # Tensors are found by their layer in the whole model: how layers are dealt out may change between attempts.
    return {_chunk_key(index): chunk.sharded_state_dict(metadata=dict(FORMAT)) for index, chunk in enumerate(chunks)}


def _chunk_key(index: int) -> str:
    """Where a chunk's state is: Megatron's optimizers look for these names."""
    return f"model{index}"


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Megatron chains an optimizer of dense and one of expert parameters, or has one alone."""
    return [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if part.optimizer is not None]


def _counts_steps(part: Any) -> bool:
    """Whether it is torch's Adam, which counts steps a parameter; Transformer Engine's counts once."""
    return isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)


def _load_optimizer(optimizer: MegatronOptimizer, loaded: dict[Any, Any], steps: float) -> None:
    parts = _parts(optimizer)
    for index, part in enumerate(parts):
        state = loaded if len(parts) == 1 else loaded[index]
        tensors = state.pop("param_state", None)
        if tensors is None:  # not distributed: its tensors are among the rest
            if _counts_steps(part):  # of which Megatron leaves out a count of 0
                state.get("optimizer", state)["state"]["common_step"] = torch.tensor(steps)
            part.load_state_dict(state)
            _count_in_groups(part, steps)
            continue
        part.load_state_dict(state)
        _count_in_groups(part, steps)
        # Megatron looks up every entry of torch Adam's state among the loaded tensors, but keeps the count of steps
        # elsewhere. Restored above, it is one tensor for all parameters, which each of them would count up.
        adam = part.optimizer.state
        counted = [state for state in adam.values() if state.pop("step", None) is not None]
        part.load_parameter_state_from_fully_reshardable(tensors)
        for state in counted:
            state["step"] = torch.tensor(steps)


def _count_in_groups(part: Any, steps: float) -> None:
    """Restore the count of an optimizer that keeps it in its parameter groups, as Transformer Engine's Adam does.

    It has no such entry before its first step, so that none is among the settings of a fresh one.
    """
    if steps and not _counts_steps(part):
        for group in part.optimizer.param_groups:
            group["step"] = int(steps)


def give_state(optimizer: MegatronOptimizer) -> None:
    """Give every parameter that was never stepped the state that Adam begins with.

    Megatron can neither save nor load an optimizer without it.
    """
    for part in _parts(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        if _counts_steps(part):
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))
