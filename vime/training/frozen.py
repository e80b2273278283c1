"""Models that only score: the reference policy of a KL term, and the teacher of a distillation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vime.config import Config
from vime.errors import UserError
from vime.models.family import architecture
from vime.models.hf_folder import HfReader
from vime.training import hf_import, model
from vime.training.pack import Pack
from vime.training.trainable import forward


class Frozen:
    """A model without optimizer. Its methods are collectives over all trainer ranks."""

    def __init__(self, folder: Path, config: Config, vocabulary_size: int, field: str) -> None:
        """Raises UserError naming the configuration field when the folder's tokens are not the policy's."""
        found = architecture(folder)
        if found.shape.vocabulary != vocabulary_size:
            raise UserError(
                f"{field}={folder} has a vocabulary of {found.shape.vocabulary} tokens and the policy one of"
                f" {vocabulary_size}: their logprobs cannot be compared"
            )
        self.chunks = [chunk.requires_grad_(False).eval() for chunk in model.build(found, config, model.Policy)]
        hf_import.load(self.chunks, HfReader(folder))

    def logprobs(self, packs: Sequence[Pack]) -> list[Tensor | None]:
        """Float32 [labelled tokens] of each pack on the last stage, None on the others."""
        outputs = forward(self.chunks, packs)
        return [output[0] if output is not None else None for output in outputs]

    @torch.no_grad()
    def copy(self, policy: Sequence[model.Policy]) -> None:
        """Take over the weights of the policy, which has the same shape."""
        for mine, new in zip(self.chunks, policy, strict=True):
            mine.load_state_dict(new.state_dict())
