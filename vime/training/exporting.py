"""The policy as a Hugging Face folder, written as it is streamed to rank 0."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist

from vime.models.hf_folder import HfWriter, copy_sidecars, torch_dtype
from vime.training import hf_weights, parallel
from vime.training.learner import Learner


def export(learner: Learner, origin: Path, target: Path, dtype: str) -> None:
    """Write the policy to `target`, which appears whole or not at all. A collective over all trainer ranks.

    origin: the initial model's folder, from which configuration and tokenizer are copied.
    """
    if parallel.is_first_replica():
        writing = target.with_name(f".{target.name}.tmp")
        writer = None
        if dist.get_rank() == 0:
            shutil.rmtree(writing, ignore_errors=True)
            copy_sidecars(origin, writing)
            writer = HfWriter(writing)
        for name, tensor in hf_weights.export(learner.policy, torch_dtype(dtype)):
            if writer is not None and tensor is not None:
                writer.write([(name, tensor)])
        if writer is not None:
            writer.close()
            shutil.rmtree(target, ignore_errors=True)
            writing.rename(target)
    dist.barrier()
