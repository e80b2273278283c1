"""One microbatch as the model takes it: sequences laid end to end.

With context parallelism each rank takes two pieces of every sequence, one from each end, so that all ranks have as much
attention to compute: of 2n equal pieces rank r has r and 2n-1-r, which is the order that Transformer Engine expects.
"""

from __future__ import annotations

import itertools
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
class PackLayout:
    """What of a pack a rank takes, and how its token count must divide.

    tensor: tensor-parallel ranks, which divide the tokens once more under sequence parallelism.
    context_rank, context_size: place among the ranks that share each sequence.
    """

    tensor: int = 1
    context_rank: int = 0
    context_size: int = 1

    @property
    def sequence_multiple(self) -> int:
        """Every sequence is padded to a multiple of this many tokens."""
        return 2 * self.context_size if self.context_size > 1 else 1

    def padded(self, tokens: int) -> int:
        """Tokens that a sequence takes in a pack."""
        return -(-tokens // self.sequence_multiple) * self.sequence_multiple

    def size(self, lengths: Sequence[int]) -> int:
        """Tokens of a pack of such sequences, never 0."""
        multiple = self.sequence_multiple * self.tensor
        return max(-(-sum(self.padded(length) for length in lengths) // multiple), 1) * multiple


@dataclass(frozen=True)
class Pack:
    """Sequences laid end to end, on the rank's device. "Local" tokens are this context-parallel rank's, else all.

    token_ids, position_ids: int64 [local tokens].
    labels: int64 [local tokens]; at each position the next token of its sequence when that token is a response token
        with loss mask 1, else IGNORE.
    params: bounds of the whole sequences, for the attention.
    rows: int64 [local tokens], place in the whole pack of each local token; None when all are local.
    columns: int64 [local labelled tokens], place among the labelled tokens of the whole pack; None when all are local.
    sample: int64 [labelled tokens], index into the samples given to `pack` of each labelled token, in order.
    rollout_logprobs: float32 [labelled tokens], the engine's.
    versions: int32 [labelled tokens], the policy version that sampled each.
    teacher_logprobs: float32 [labelled tokens], a teacher's, where all samples bring them; else None.
    tokens, size: of the whole pack, before and after padding.
    starts: first row in the whole pack of each sample.
    routes: int [layers of this rank, local tokens, top-k] in the host's memory, experts to replay
        (`vime.training.replay`); None for none.
    """

    token_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    params: PackedSeqParams
    rows: Tensor | None
    columns: Tensor | None
    sample: Tensor
    rollout_logprobs: Tensor
    versions: Tensor
    tokens: int
    size: int
    starts: tuple[int, ...]
    teacher_logprobs: Tensor | None = None
    routes: Tensor | None = None


def pack_all(parts: Sequence[Sequence[Sample]], layout: PackLayout, *, equal: bool) -> list[Pack]:
    """A pack of each part; with `equal` all are padded to the size of the largest."""
    sizes = [layout.size([len(sample.token_ids) for sample in part]) for part in parts]
    return [pack(part, layout, max(sizes) if equal else size) for part, size in zip(parts, sizes, strict=True)]


def pack(samples: Sequence[Sample], layout: PackLayout = PackLayout(), size: int | None = None) -> Pack:
    """Lay samples end to end, padded with one more sequence to `size`; default: so that the local token count divides.

    Raises ValueError for a trained token that no token precedes.
    """
    lengths = [len(sample.token_ids) for sample in samples]
    sizes = [layout.padded(length) for length in lengths]
    padding = (size or layout.size(lengths)) - sum(sizes)
    if padding:
        sizes.append(padding)
    bounds = np.cumsum([0, *sizes], dtype=np.int32)
    total = int(bounds[-1])
    token_ids = np.zeros(total, dtype=np.int64)
    position_ids = np.zeros_like(token_ids)
    labels = np.full_like(token_ids, IGNORE)
    owners, logprobs, versions, teacher = [], [], [], []
    for i, sample in enumerate(samples):
        start, end = int(bounds[i]), int(bounds[i]) + lengths[i]
        token_ids[start:end] = sample.token_ids
        position_ids[start:end] = np.arange(end - start)
        kept = np.flatnonzero(sample.loss_mask)
        if sample.prompt_length == 0 and len(kept) and kept[0] == 0:
            raise ValueError(f"sample {i} trains its first token, which nothing predicts: give it a prompt")
        # the token at position p is predicted at p - 1
        labels[start + sample.prompt_length + kept - 1] = sample.token_ids[sample.prompt_length + kept]
        owners.append(np.full(len(kept), i, dtype=np.int64))
        logprobs.append(np.asarray(sample.rollout_logprobs, dtype=np.float32)[kept])
        versions.append(sample.version_per_token()[kept])
        if sample.teacher_logprobs is not None:
            teacher.append(np.asarray(sample.teacher_logprobs, dtype=np.float32)[kept])
    rows = columns = None
    if layout.context_size > 1:
        rows = _context_rows(bounds, layout)
        of_label = np.cumsum(labels != IGNORE) - 1
        columns = of_label[rows][labels[rows] != IGNORE]
        token_ids, position_ids, labels = token_ids[rows], position_ids[rows], labels[rows]
    device = torch.device(torch.cuda.current_device())
    longest = max(sizes)
    edges = torch.from_numpy(bounds).to(device)

    def on_device(array: np.ndarray | None) -> Tensor | None:
        return None if array is None else torch.from_numpy(array).to(device)

    def joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *arrays])

    return Pack(
        token_ids=torch.from_numpy(token_ids).to(device),
        position_ids=torch.from_numpy(position_ids).to(device),
        labels=torch.from_numpy(labels).to(device),
        params=PackedSeqParams("thd", edges, edges, max_seqlen_q=longest, max_seqlen_kv=longest),
        rows=on_device(rows),
        columns=on_device(columns),
        sample=torch.from_numpy(joined(owners, np.int64)).to(device),
        rollout_logprobs=torch.from_numpy(joined(logprobs, np.float32)).to(device),
        versions=torch.from_numpy(joined(versions, np.int32)).to(device),
        teacher_logprobs=on_device(joined(teacher, np.float32) if len(teacher) == len(samples) else None),
        tokens=sum(lengths),
        size=total,
        starts=tuple(int(start) for start in bounds[: len(samples)]),
    )


def _context_rows(bounds: np.ndarray, layout: PackLayout) -> np.ndarray:
    """Rows of the whole pack that a context-parallel rank takes: two pieces of each sequence. int64 [local tokens]."""
    rows = []
    for start, end in itertools.pairwise(bounds.astype(np.int64)):
        piece = (end - start) // (2 * layout.context_size)
        for number in (layout.context_rank, 2 * layout.context_size - 1 - layout.context_rank):
            rows.append(np.arange(start + number * piece, start + (number + 1) * piece))
    return np.concatenate(rows)
