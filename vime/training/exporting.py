"""The policy as a Hugging Face folder. Each rank writes what it owns: no process sees the whole model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from vime.models.hf_folder import HfReader, HfWriter, copy_sidecars, join_shards, torch_dtype
from vime.training import parallel
from vime.training.hf_export import Exporter
from vime.training.learner import Learner


def export(learner: Learner, origin: Path, target: Path, dtype: str) -> None:
    """Write the policy to `target`, which appears whole or not at all. A collective over all trainer ranks.

    origin: the initial model's folder, from which configuration, tokenizer and the tensors that took no part in
    training are copied.
    """
    writing = target.with_name(f".{target.name}.tmp")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(writing, ignore_errors=True)
        copy_sidecars(origin, writing)
    dist.barrier()
    if parallel.is_leading():
        writer = HfWriter(writing, dist.get_rank())
        writer.write(Exporter(learner.policy, torch_dtype(dtype)).owned())
        if first:
            writer.write(_kept_aside(origin, learner.policy[0].architecture.kept_aside))
        writer.close()
    dist.barrier()
    if first:
        join_shards(writing, parallel.leading_ranks(learner.config.training), learner.config.buffer.file_timeout)
        shutil.rmtree(target, ignore_errors=True)
        writing.rename(target)
    dist.barrier()


def _kept_aside(origin: Path, prefixes: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    if not prefixes:
        return
    reader = HfReader(origin)
    for name in sorted(reader.names):
        if name.startswith(prefixes):
            yield name, reader.part(name, None, 0, 1)
