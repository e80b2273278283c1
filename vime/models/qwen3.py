"""Qwen3, dense: grouped-query attention with normalised queries and keys, gated SiLU feed-forward, RMSNorm."""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator

from vime.models.family import Architecture
from vime.models.weight import Weight, join_qkv, join_rows, split_halves, split_qkv


class Rope(BaseModel):
    """Rotary embedding; only the unscaled kind."""

    model_config = ConfigDict(extra="forbid", strict=True)
    rope_theta: float
    rope_type: Literal["default"] = "default"


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
    rope_parameters: Rope | None = None

    @property
    def rotary_base(self) -> float:
        """The rotary base, from either place that configs keep it in."""
        if self.rope_parameters is not None:
            return self.rope_parameters.rope_theta
        assert self.rope_theta is not None  # checked below
        return self.rope_theta

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> HfConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of"
                f" num_key_value_heads={self.num_key_value_heads}"
            )
        if self.rope_theta is None and self.rope_parameters is None:
            raise ValueError("the rotary base is missing: give rope_theta or rope_parameters.rope_theta")
        if (
            self.rope_theta is not None
            and self.rope_parameters is not None
            and self.rope_theta != self.rope_parameters.rope_theta
        ):
            raise ValueError(
                f"rope_theta={self.rope_theta} contradicts rope_parameters.rope_theta={self.rope_parameters.rope_theta}"
            )
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for num_hidden_layers={self.num_hidden_layers}"
            )
        return self


def architecture(hf: HfConfig) -> Architecture:
    """The Megatron side of a Qwen3 configuration."""
    per_group = hf.num_attention_heads // hf.num_key_value_heads
    join, split = join_qkv(hf.head_dim, per_group), split_qkv(hf.head_dim, per_group)

    def layer_weights(layer: int, local: int) -> list[Weight]:
        ours, theirs = f"decoder.layers.{local}.", f"model.layers.{layer}."
        attention = theirs + "self_attn."
        return [
            Weight(ours + "input_layernorm.weight", (theirs + "input_layernorm.weight",)),
            Weight(
                ours + "self_attention.linear_qkv.weight",
                tuple(f"{attention}{name}_proj.weight" for name in "qkv"),
                axis=0,
                join=join,
                split=split,
            ),
            Weight(ours + "self_attention.q_layernorm.weight", (attention + "q_norm.weight",)),
            Weight(ours + "self_attention.k_layernorm.weight", (attention + "k_norm.weight",)),
            Weight(ours + "self_attention.linear_proj.weight", (attention + "o_proj.weight",), axis=1),
            Weight(ours + "pre_mlp_layernorm.weight", (theirs + "post_attention_layernorm.weight",)),
            Weight(
                ours + "mlp.linear_fc1.weight",
                (theirs + "mlp.gate_proj.weight", theirs + "mlp.up_proj.weight"),
                axis=0,
                join=join_rows,
                split=split_halves,
            ),
            Weight(ours + "mlp.linear_fc2.weight", (theirs + "mlp.down_proj.weight",), axis=1),
        ]

    transformer: dict[str, Any] = dict(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=hf.head_dim,
        layernorm_epsilon=hf.rms_norm_eps,
        init_method_std=hf.initializer_range,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
    )
    return Architecture(
        model_type="qwen3",
        transformer=transformer,
        layers=hf.num_hidden_layers,
        vocabulary=hf.vocab_size,
        context=hf.max_position_embeddings,
        rotary_base=hf.rotary_base,
        rotary_share=1.0,
        tied=hf.tie_word_embeddings,
        layer_weights=layer_weights,
        embedding=Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), axis=0),
        final_norm=Weight("decoder.final_layernorm.weight", ("model.norm.weight",)),
        output=None if hf.tie_word_embeddings else Weight("output_layer.weight", ("lm_head.weight",), axis=0),
        qk_norm=True,
    )
