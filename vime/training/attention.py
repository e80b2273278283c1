"""Core attention on torch's scaled_dot_product_attention for packed sequences.

Used where Transformer Engine is not installed. Sequences in a pack do not see each other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class PackedAttention(torch.nn.Module):
    """Causal self-attention over a pack of sequences, in the signature of Megatron's core attention.

    Sequences of one length are computed in one call, so the cost is a call a distinct length, not one a sequence.
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
        pg_collection: object | None = None,
    ) -> None:
        super().__init__()
        if config.context_parallel_size > 1:
            raise ValueError("context parallelism needs Transformer Engine's attention")
        self.scale = softmax_scale if softmax_scale is not None else config.softmax_scale

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
        distinct = torch.unique(lengths).tolist()
        if len(distinct) == 1:
            return self._attend(query, key, value, distinct[0]).reshape(tokens, heads * dim)
        output = torch.empty_like(query)
        for length in distinct:
            # rows of the pack that belong to sequences of this length, sequence after sequence
            offsets = torch.arange(length, device=starts.device)
            rows = (starts[lengths == length, None] + offsets).flatten()
            part = self._attend(query[rows], key[rows], value[rows], length)
            output = output.index_copy(0, rows, part)
        return output.reshape(tokens, heads * dim)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, length: int) -> Tensor:
        """Sequences of equal length, one after the other: [n * length, heads, dim] -> the same."""
        repeat = query.shape[1] // key.shape[1]
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        q, k, v = (t.unflatten(0, (-1, length)).transpose(1, 2) for t in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return attended.transpose(1, 2).reshape(query.shape)


def _lengths(packed: PackedSeqParams) -> tuple[Tensor, Tensor]:
    """Lengths and first rows of the pack's sequences."""
    bounds = packed.cu_seqlens_q
    assert bounds is not None
    bounds = bounds.to(torch.int64)
    lengths = bounds[1:] - bounds[:-1]
    return lengths, bounds[:-1]
