"""Qwen3, dense: grouped-query attention with normalised queries and keys, gated SiLU feed-forward, RMSNorm."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vime.models import decoder
from vime.models.family import Architecture
from vime.models.weight import Weight


class HfConfig(BaseModel):
    """The Hugging Face configuration, as far as vime computes it. Anything else is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(128, ge=2)
    vocab_size: int = Field(ge=1)
    max_position_embeddings: int = Field(32768, ge=1)
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    attention_dropout: float = Field(0.0, ge=0, le=0)
    use_sliding_window: Literal[False] = False
    sliding_window: int | None = None
    layer_types: list[Literal["full_attention"]] | None = None
    tie_word_embeddings: bool = False
    rope_theta: float | None = None
    rope_scaling: None = None
    rope_parameters: decoder.Rope | None = None

    @property
    def rotary_base(self) -> float:
        """The rotary base."""
        return decoder.rotary_base(self.rope_theta, self.rope_parameters)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> HfConfig:
        decoder.check_heads(self.num_attention_heads, self.num_key_value_heads)
        decoder.rotary_base(self.rope_theta, self.rope_parameters)
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
                queries_per_group=hf.num_attention_heads // hf.num_key_value_heads,
                qk_norm=True,
                qkv_bias=False,
            ),
            *decoder.mlp_weights(ours + "mlp.", theirs + "mlp."),
        ]

    return Architecture(
        model_type="qwen3",
        transformer=decoder.dense_transformer(
            layers=hf.num_hidden_layers,
            hidden=hf.hidden_size,
            ffn=hf.intermediate_size,
            heads=hf.num_attention_heads,
            kv_heads=hf.num_key_value_heads,
            head_dim=hf.head_dim,
            eps=hf.rms_norm_eps,
            initializer_range=hf.initializer_range,
            qk_norm=True,
            qkv_bias=False,
        ),
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
