"""GLM-4.5: dense first layers, then experts chosen by a sigmoid router with a selection bias, and a shared expert.

The router chooses by score plus bias and weighs by the score alone. The bias was trained by the balance of
pre-training; here it stays as it is. The next-token-prediction layer behind the last layer takes no part in training:
it is left out on loading and copied on export.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

from vime.config import Shape, TinyModel
from vime.errors import UserError
from vime.models import decoder
from vime.models.family import Architecture, Family
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


def shape(hf: HfConfig) -> Shape:
    """The sizes of a GLM-4.5 configuration, without its next-token-prediction layer."""
    return decoder.decoder_shape(
        "glm4_moe",
        hf,
        qk_norm=hf.use_qk_norm,
        qkv_bias=hf.attention_bias,
        experts=hf.n_routed_experts,
        top_k=hf.num_experts_per_tok,
        expert_ffn=hf.moe_intermediate_size,
        shared_expert_ffn=hf.moe_intermediate_size * hf.n_shared_experts,
        dense_layers=hf.first_k_dense_replace,
    )


def architecture(hf: HfConfig) -> Architecture:
    """The Megatron side of a GLM-4.5 configuration."""

    def expert_layer(ours: str, theirs: str) -> Iterator[Weight]:
        yield Weight(ours + "router.weight", (theirs + "gate.weight",))
        yield Weight(ours + "router.expert_bias", (theirs + "gate.e_score_correction_bias",), float32=True)
        if hf.n_shared_experts:
            yield from decoder.mlp_weights(ours + "shared_experts.", theirs + "shared_experts.")
        yield from decoder.expert_weights(ours, theirs, hf.n_routed_experts)

    layers = hf.num_hidden_layers
    return decoder.decoder_architecture(
        hf,
        shape(hf),
        router=dict(
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=0.0,
            moe_router_topk_scaling_factor=hf.routed_scaling_factor,
        ),
        expert_layer=expert_layer,
        rotary_share=hf.rotary_share,
        kept_aside=tuple(f"model.layers.{layers + extra}." for extra in range(hf.num_nextn_predict_layers)),
    )


def tiny(asked: TinyModel) -> dict[str, Any]:
    """Entries of a tiny model's configuration that are GLM-4.5's own. Raises UserError when no layer has experts."""
    if asked.dense_layers >= asked.layers:
        raise UserError(
            f"model.tiny.dense_layers={asked.dense_layers} leaves none of model.tiny.layers={asked.layers} with experts"
        )
    return {
        "n_routed_experts": asked.experts,
        "num_experts_per_tok": asked.top_k,
        "moe_intermediate_size": asked.expert_ffn,
        "norm_topk_prob": True,
        "n_shared_experts": asked.shared_experts,
        "first_k_dense_replace": asked.dense_layers,
        "use_qk_norm": asked.qk_norm,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
    }


FAMILY = Family(
    config=HfConfig,
    shape=shape,
    architecture=architecture,
    tiny=tiny,
    experts=True,
    qk_norm=None,
    qkv_bias=None,
    # vLLM's always has an output layer of its own: without a tensor for it, it would answer noise.
    engine_ties=False,
)
