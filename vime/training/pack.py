"""One microbatch as the model takes it: sequences laid end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from vime.buffer.sample import Sample

IGNORE = -100
"""Label of a position whose prediction nobody asks for."""


@dataclass(frozen=True)
class Pack:
    """Sequences laid end to end, on the rank's device.

    token_ids, position_ids: int64 [tokens].
    labels: int64 [tokens]; at each position the next token of its sequence when that token is a response token with
        loss mask 1, else IGNORE.
    params: sequence bounds for the attention.
    sample: int64 [labelled tokens], index into the samples given to `pack` of each labelled token, in order.
    rollout_logprobs: float32 [labelled tokens], the engine's. tokens: before padding.
    """

    token_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    params: PackedSeqParams
    sample: Tensor
    rollout_logprobs: Tensor
    tokens: int


def pack(samples: Sequence[Sample], multiple: int = 1) -> Pack:
    """Lay samples end to end, padded with one more sequence so that the token count divides by `multiple`.

    Raises ValueError for a trained token that no token precedes.
    """
    lengths = [len(sample.token_ids) for sample in samples]
    tokens = sum(lengths)
    padding = -tokens % multiple if tokens else multiple
    bounds = np.cumsum([0, *lengths, *([padding] if padding else [])], dtype=np.int32)
    token_ids = np.zeros(tokens + padding, dtype=np.int64)
    position_ids = np.zeros_like(token_ids)
    labels = np.full_like(token_ids, IGNORE)
    owners, logprobs = [], []
    for i, sample in enumerate(samples):
        start, end = int(bounds[i]), int(bounds[i + 1])
        token_ids[start:end] = sample.token_ids
        position_ids[start:end] = np.arange(end - start)
        kept = np.flatnonzero(sample.loss_mask)
        if sample.prompt_length == 0 and len(kept) and kept[0] == 0:
            raise ValueError(f"sample {i} trains its first token, which nothing predicts: give it a prompt")
        # the token at position p is predicted at p - 1
        labels[start + sample.prompt_length + kept - 1] = sample.token_ids[sample.prompt_length + kept]
        owners.append(np.full(len(kept), i, dtype=np.int64))
        logprobs.append(np.asarray(sample.rollout_logprobs, dtype=np.float32)[kept])
    device = torch.device(torch.cuda.current_device())
    longest = max([*lengths, padding])
    edges = torch.from_numpy(bounds).to(device)
    return Pack(
        token_ids=torch.from_numpy(token_ids).to(device),
        position_ids=torch.from_numpy(position_ids).to(device),
        labels=torch.from_numpy(labels).to(device),
        params=PackedSeqParams("thd", edges, edges, max_seqlen_q=longest, max_seqlen_kv=longest),
        sample=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *owners])).to(device),
        rollout_logprobs=torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *logprobs])).to(device),
        tokens=tokens,
    )
