"""RMSNorm for Megatron's local layer specs."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm in Megatron's norm signature.

    Megatron-core's own wrapper refuses sequence parallelism, because each rank then sees only its tokens and the
    weight's gradients must be summed over the tensor-parallel group; the mark on the weight asks Megatron for that sum.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
