"""GLM-4.5: dense first layers, then experts chosen by a sigmoid router with a selection bias, and a shared expert.

The router chooses by score plus bias and weighs by the score alone. The bias was trained by the balance of
pre-training; here it stays as it is. The next-token-prediction layer behind the last layer takes no part in training:
it is left out on loading and copied on export.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from vime.models import decoder
from vime.models.family import Architecture
from vime.models.weight import Weight


class HfConfig(decoder.HfDecoder):
    """The Hugging Face configuration, as far as vime computes it. Anything else is refused by name."""

    max_position_embeddings: int = Field(131072, ge=1)
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    use_qk_norm: bool = False
    partial_rotary_factor: float | None = Field(None, gt=0, le=1)
    n_routed_experts: int = Field(ge=2)
    # The router's weights are normalised over the chosen experts, and one chosen expert needs no such rule.
    num_experts_per_tok: int = Field(ge=2)
    moe_intermediate_size: int = Field(ge=1)
    n_shared_experts: int = Field(1, ge=0)
    routed_scaling_factor: float = Field(1.0, gt=0)
    norm_topk_prob: Literal[True] = True
    n_group: Literal[1] = 1
    topk_group: Literal[1] = 1
    first_k_dense_replace: int = Field(1, ge=0)
    num_nextn_predict_layers: int = Field(0, ge=0)
    output_router_logits: bool = False

    @property
    def rotary_share(self) -> float:
        """Share of a head that is rotated, from either place that configs keep it in; the family's default is half."""
        inner = self.rope_parameters.partial_rotary_factor if self.rope_parameters is not None else None
        return next(share for share in (inner, self.partial_rotary_factor, 0.5) if share is not None)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> HfConfig:
        inner = self.rope_parameters.partial_rotary_factor if self.rope_parameters is not None else None
        if inner is not None and self.partial_rotary_factor is not None and inner != self.partial_rotary_factor:
            raise ValueError(
                f"partial_rotary_factor={self.partial_rotary_factor} contradicts"
                f" rope_parameters.partial_rotary_factor={inner}"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds n_routed_experts={self.n_routed_experts}"
            )
        if self.first_k_dense_replace >= self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace={self.first_k_dense_replace} leaves none of num_hidden_layers="
                f"{self.num_hidden_layers} with experts"
            )
        return self


def architecture(hf: HfConfig) -> Architecture:
    """The Megatron side of a GLM-4.5 configuration."""
    moe_layers = tuple(layer >= hf.first_k_dense_replace for layer in range(hf.num_hidden_layers))

    def layer_weights(layer: int, local: int) -> list[Weight]:
        ours, theirs = f"decoder.layers.{local}.", f"model.layers.{layer}."
        attention = decoder.attention_weights(
            ours,
            theirs,
            head_dim=hf.head_dim,
            queries_per_group=hf.queries_per_group,
            qk_norm=hf.use_qk_norm,
            qkv_bias=hf.attention_bias,
        )
        if not moe_layers[layer]:
            return [*attention, *decoder.mlp_weights(ours + "mlp.", theirs + "mlp.")]
        shared = decoder.mlp_weights(ours + "mlp.shared_experts.", theirs + "mlp.shared_experts.")
        return [
            *attention,
            Weight(ours + "mlp.router.weight", (theirs + "mlp.gate.weight",)),
            Weight(ours + "mlp.router.expert_bias", (theirs + "mlp.gate.e_score_correction_bias",), float32=True),
            *(shared if hf.n_shared_experts else ()),
            *decoder.expert_weights(ours + "mlp.", theirs + "mlp.", hf.n_routed_experts),
        ]

    shared_ffn = hf.moe_intermediate_size * hf.n_shared_experts
    return Architecture(
        model_type="glm4_moe",
        transformer=decoder.dense_transformer(hf, qk_norm=hf.use_qk_norm, qkv_bias=hf.attention_bias)
        | decoder.moe_transformer(
            moe_layers, experts=hf.n_routed_experts, top_k=hf.num_experts_per_tok, ffn=hf.moe_intermediate_size
        )
        | dict(
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=0.0,
            moe_router_topk_scaling_factor=hf.routed_scaling_factor,
            moe_shared_expert_intermediate_size=shared_ffn or None,
        ),
        layers=hf.num_hidden_layers,
        vocabulary=hf.vocab_size,
        context=hf.max_position_embeddings,
        rotary_base=hf.rotary_base,
        rotary_share=hf.rotary_share,
        tied=hf.tie_word_embeddings,
        layer_weights=layer_weights,
        embedding=decoder.EMBEDDING,
        final_norm=decoder.FINAL_NORM,
        output=None if hf.tie_word_embeddings else decoder.OUTPUT,
        qk_norm=hf.use_qk_norm,
        moe_layers=moe_layers,
        experts=hf.n_routed_experts,
        top_k=hf.num_experts_per_tok,
        kept_aside=tuple(
            f"model.layers.{hf.num_hidden_layers + extra}." for extra in range(hf.num_nextn_predict_layers)
        ),
    )
