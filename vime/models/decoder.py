"""The weights and settings that the families' decoder layers have in common, by the names that both sides use.

Hugging Face keeps query, key and value apart, and gate and up projection too; Megatron joins them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator

from vime.models.weight import Weight, join_qkv, join_rows, split_halves, split_qkv


class Rope(BaseModel):
    """Rotary embedding; only the unscaled kind."""

    model_config = ConfigDict(extra="forbid", strict=True)
    rope_theta: float
    rope_type: Literal["default"] = "default"
    partial_rotary_factor: float | None = None


def rotary_base(rope_theta: float | None, parameters: Rope | None) -> float:
    """The rotary base, from either place that configs keep it in. Raises ValueError when none or two different are."""
    if rope_theta is None and parameters is None:
        raise ValueError("the rotary base is missing: give rope_theta or rope_parameters.rope_theta")
    if rope_theta is not None and parameters is not None and rope_theta != parameters.rope_theta:
        raise ValueError(f"rope_theta={rope_theta} contradicts rope_parameters.rope_theta={parameters.rope_theta}")
    return parameters.rope_theta if parameters is not None else rope_theta  # type: ignore[return-value]


def check_whole_rotary(parameters: Rope | None) -> None:
    """Raises ValueError when only a share of each head would be rotated, in families that rotate all of it."""
    if parameters is not None and parameters.partial_rotary_factor not in (None, 1.0):
        raise ValueError(
            f"rope_parameters.partial_rotary_factor={parameters.partial_rotary_factor} is not supported: it must be 1"
        )


def check_heads(heads: int, kv_heads: int) -> None:
    """Raises ValueError unless query heads divide over key-value heads."""
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")


def check_layer_types(layer_types: list[Any] | None, layers: int) -> None:
    """Raises ValueError when a list of layer kinds has another length than the layers."""
    if layer_types is not None and len(layer_types) != layers:
        raise ValueError(f"layer_types has {len(layer_types)} entries for num_hidden_layers={layers}")


class HfDecoder(BaseModel):
    """What the configurations of all families have; each adds its own. Anything else is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    # transformers takes hidden_size / num_attention_heads when this is missing; every published config has it
    head_dim: int = Field(ge=2)
    vocab_size: int = Field(ge=1)
    max_position_embeddings: int = Field(32768, ge=1)
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    hidden_act: Literal["silu"] = "silu"
    attention_dropout: float = Field(0.0, ge=0, le=0)
    tie_word_embeddings: bool = False
    rope_theta: float | None = None
    rope_scaling: None = None
    rope_parameters: Rope | None = None

    @property
    def rotary_base(self) -> float:
        """The rotary base."""
        return rotary_base(self.rope_theta, self.rope_parameters)

    @property
    def queries_per_group(self) -> int:
        """Query heads that share a key and a value."""
        return self.num_attention_heads // self.num_key_value_heads

    @model_validator(mode="after")
    def _heads_and_rotary_agree(self) -> HfDecoder:
        check_heads(self.num_attention_heads, self.num_key_value_heads)
        rotary_base(self.rope_theta, self.rope_parameters)
        return self


def dense_transformer(hf: HfDecoder, *, qk_norm: bool, qkv_bias: bool) -> dict[str, Any]:
    """Megatron's settings of a decoder with grouped-query attention, gated SiLU feed-forward and RMSNorm."""
    return dict(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=hf.head_dim,
        layernorm_epsilon=hf.rms_norm_eps,
        init_method_std=hf.initializer_range,
        normalization="RMSNorm",
        qk_layernorm=qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=qkv_bias,
    )


def moe_transformer(moe_layers: Sequence[bool], *, experts: int, top_k: int, ffn: int) -> dict[str, Any]:
    """Megatron's settings of routed experts in those layers; the family adds how its router scores."""
    return dict(
        num_moe_experts=experts,
        moe_router_topk=top_k,
        moe_ffn_hidden_size=ffn,
        moe_layer_freq=[int(has) for has in moe_layers],
        # Near-ties between experts must not be decided by the rounding of a narrow type.
        moe_router_dtype="fp32",
        # The policy gradient alone trains the router: the engine knows no balance of experts.
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )


def attention_weights(
    ours: str, theirs: str, *, head_dim: int, queries_per_group: int, qk_norm: bool, qkv_bias: bool
) -> Iterator[Weight]:
    """Both norms of a layer and its attention. ours, theirs: the layer's prefixes, such as `model.layers.3.`."""
    join, split = join_qkv(head_dim, queries_per_group), split_qkv(head_dim, queries_per_group)
    attention = theirs + "self_attn."
    yield Weight(ours + "input_layernorm.weight", (theirs + "input_layernorm.weight",))
    for kind in ("weight", "bias") if qkv_bias else ("weight",):
        yield Weight(
            f"{ours}self_attention.linear_qkv.{kind}",
            tuple(f"{attention}{name}_proj.{kind}" for name in "qkv"),
            axis=0,
            join=join,
            split=split,
        )
    if qk_norm:
        yield Weight(ours + "self_attention.q_layernorm.weight", (attention + "q_norm.weight",))
        yield Weight(ours + "self_attention.k_layernorm.weight", (attention + "k_norm.weight",))
    yield Weight(ours + "self_attention.linear_proj.weight", (attention + "o_proj.weight",), axis=1)
    yield Weight(ours + "pre_mlp_layernorm.weight", (theirs + "post_attention_layernorm.weight",))


def mlp_weights(ours: str, theirs: str, expert: int | None = None) -> Iterator[Weight]:
    """A gated feed-forward layer, of an expert or of its own. ours, theirs: prefixes, such as `...layers.3.mlp.`."""
    yield Weight(
        ours + "linear_fc1.weight",
        (theirs + "gate_proj.weight", theirs + "up_proj.weight"),
        axis=0,
        join=join_rows,
        split=split_halves,
        expert=expert,
    )
    yield Weight(ours + "linear_fc2.weight", (theirs + "down_proj.weight",), axis=1, expert=expert)


def expert_weights(ours: str, theirs: str, experts: int) -> Iterator[Weight]:
    """The experts of a layer, one after the other. ours, theirs: prefixes, such as `...layers.3.mlp.`."""
    for expert in range(experts):
        yield from mlp_weights(f"{ours}experts.{expert}.", f"{theirs}experts.{expert}.", expert)


EMBEDDING = Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), axis=0)
FINAL_NORM = Weight("decoder.final_layernorm.weight", ("model.norm.weight",))
OUTPUT = Weight("output_layer.weight", ("lm_head.weight",), axis=0)
