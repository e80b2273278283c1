"""Core attention on torch's scaled_dot_product_attention for packed sequences.

Used where Transformer Engine is not installed. Sequences in a pack do not see each other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class PackedAttention(torch.nn.Module):
    """Causal self-attention over a pack of sequences, in the signature of Megatron's core attention.

    Sequences of one length are computed in one call, so the cost is a call a distinct length, not one a sequence. With
    context parallelism each rank has its tokens' queries and gathers the keys and values of whole sequences.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale if softmax_scale is not None else config.softmax_scale
        self._group = None
        if config.context_parallel_size > 1:
            self._group = pg_collection.cp if pg_collection is not None else None
            self._group = self._group or parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [tokens, heads, dim], key and value [tokens, groups, dim] -> [tokens, heads * dim]."""
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("PackedAttention takes packed sequences (qkv_format thd) only")
        tokens, heads, dim = query.shape
        lengths, starts = _lengths(packed_seq_params)
        size, rank = 1, 0
        if self._group is not None:
            size, rank = self._group.size(), self._group.rank()
            key, value = (self._whole(tensor, lengths, size) for tensor in (key, value))
        distinct = torch.unique(lengths).tolist()
        output = torch.empty_like(query)
        for length in distinct:
            if len(distinct) == 1:
                output = self._attend(query, key, value, length, rank, size)
                break
            # rows that belong to sequences of this length, sequence after sequence
            of_length = starts[lengths == length, None]
            rows = (of_length + torch.arange(length, device=starts.device)).flatten()
            local = (of_length // size + torch.arange(length // size, device=starts.device)).flatten()
            part = self._attend(query[local], key[rows], value[rows], length, rank, size)
            output = output.index_copy(0, local, part)
        return output.reshape(tokens, heads * dim)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, length: int, rank: int, size: int) -> Tensor:
        """Sequences of equal length, one after the other: [n * length / size, heads, dim] -> the same."""
        repeat = query.shape[1] // key.shape[1]
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        q = query.unflatten(0, (-1, length // size)).transpose(1, 2)
        k, v = (tensor.unflatten(0, (-1, length)).transpose(1, 2) for tensor in (key, value))
        if size == 1:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            places = torch.arange(length, device=q.device)
            visible = places[_pieces(length, rank, size, q.device)][:, None] >= places
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.scale)
        return attended.transpose(1, 2).reshape(query.shape)

    def _whole(self, local: Tensor, lengths: Tensor, size: int) -> Tensor:
        """Keys or values of this rank's tokens [tokens / size, ...] -> those of the whole pack, in its order."""
        gathered = gather_from_sequence_parallel_region(local, group=self._group)
        # Where each row of the pack is among the gathered ones: rank after rank, and there sequence after sequence.
        order, first = [], 0
        for length in lengths.tolist():
            sources = torch.empty(length, dtype=torch.int64, device=local.device)
            for rank in range(size):
                piece = torch.arange(length // size, device=local.device)
                sources[_pieces(length, rank, size, local.device)] = rank * local.shape[0] + first // size + piece
            order.append(sources)
            first += length
        return gathered[torch.cat(order)]


def _pieces(length: int, rank: int, size: int, device: torch.device) -> Tensor:
    """Places in a sequence that a context-parallel rank has: pieces r and 2n-1-r of 2n. int64 [length / size]."""
    piece = length // (2 * size)
    places = torch.arange(piece, device=device)
    return torch.cat([places + rank * piece, places + (2 * size - 1 - rank) * piece])


def _lengths(packed: PackedSeqParams) -> tuple[Tensor, Tensor]:
    """Lengths and first rows of the pack's sequences."""
    bounds = packed.cu_seqlens_q
    assert bounds is not None
    bounds = bounds.to(torch.int64)
    lengths = bounds[1:] - bounds[:-1]
    return lengths, bounds[:-1]


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm in Megatron's norm signature.

    Megatron-core's own wrapper refuses sequence parallelism, because each rank then sees only its tokens and the
    weight's gradients must be summed over the tensor-parallel group; the mark on the weight asks Megatron for that sum.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
