"""Qwen3, dense: grouped-query attention with normalised queries and keys, gated SiLU feed-forward, RMSNorm."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from vime.models import decoder
from vime.models.family import Architecture
from vime.models.weight import Weight


class HfConfig(decoder.HfDecoder):
    """The Hugging Face configuration, as far as vime computes it. Anything else is refused by name."""

    head_dim: int = Field(128, ge=2)
    attention_bias: Literal[False] = False
    use_sliding_window: Literal[False] = False
    sliding_window: int | None = None
    layer_types: list[Literal["full_attention"]] | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> HfConfig:
        decoder.check_whole_rotary(self.rope_parameters)
        decoder.check_layer_types(self.layer_types, self.num_hidden_layers)
        return self


def architecture(hf: HfConfig) -> Architecture:
    """The Megatron side of a Qwen3 configuration."""

    def layer_weights(layer: int, local: int) -> list[Weight]:
        ours, theirs = f"decoder.layers.{local}.", f"model.layers.{layer}."
        return [
            *decoder.attention_weights(
                ours,
                theirs,
                head_dim=hf.head_dim,
                queries_per_group=hf.queries_per_group,
                qk_norm=True,
                qkv_bias=False,
            ),
            *decoder.mlp_weights(ours + "mlp.", theirs + "mlp."),
        ]

    return Architecture(
        model_type="qwen3",
        transformer=decoder.dense_transformer(hf, qk_norm=True, qkv_bias=False),
        layers=hf.num_hidden_layers,
        vocabulary=hf.vocab_size,
        context=hf.max_position_embeddings,
        rotary_base=hf.rotary_base,
        rotary_share=1.0,
        tied=hf.tie_word_embeddings,
        layer_weights=layer_weights,
        embedding=decoder.EMBEDDING,
        final_norm=decoder.FINAL_NORM,
        output=None if hf.tie_word_embeddings else decoder.OUTPUT,
        qk_norm=True,
    )
