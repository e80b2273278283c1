"""Qwen3-MoE: Qwen3's attention, and experts chosen by a softmax router, in all layers or in some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

from vime.config import Shape, TinyModel
from vime.models import decoder
from vime.models.family import Architecture, Family
from vime.models.weight import Weight


class HfConfig(decoder.HfDecoder):
    """The Hugging Face configuration, as far as vime computes it. Anything else is refused by name."""

    attention_bias: Literal[False] = False
    use_sliding_window: Literal[False] = False
    sliding_window: int | None = None
    num_experts: int | None = Field(None, ge=2)
    num_local_experts: int | None = Field(None, ge=2)
    num_experts_per_tok: int = Field(ge=1)
    moe_intermediate_size: int = Field(ge=1)
    norm_topk_prob: bool = False
    decoder_sparse_step: int = Field(1, ge=1)
    mlp_only_layers: list[int] | None = None
    # Of pre-training: a policy gradient has no use for a balance of experts that the engine would not know of.
    router_aux_loss_coef: float = 0.0
    output_router_logits: bool = False

    @property
    def experts(self) -> int:
        """Experts of a layer, by either name that configs call them."""
        experts = self.num_experts if self.num_experts is not None else self.num_local_experts
        assert experts is not None  # checked below
        return experts

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return layer not in (self.mlp_only_layers or []) and (layer + 1) % self.decoder_sparse_step == 0

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> HfConfig:
        decoder.check_whole_rotary(self.rope_parameters)
        if self.num_experts is None and self.num_local_experts is None:
            raise ValueError("num_experts is missing")
        if None not in (self.num_experts, self.num_local_experts) and self.num_experts != self.num_local_experts:
            raise ValueError(f"num_experts={self.num_experts} contradicts num_local_experts={self.num_local_experts}")
        if self.num_experts_per_tok > self.experts:
            raise ValueError(f"num_experts_per_tok={self.num_experts_per_tok} exceeds num_experts={self.experts}")
        if not any(self.has_experts(layer) for layer in range(self.num_hidden_layers)):
            raise ValueError("no layer has experts: decoder_sparse_step and mlp_only_layers leave none")
        return self


def shape(hf: HfConfig) -> Shape:
    """The sizes of a Qwen3-MoE configuration."""
    moe_layers = [layer for layer in range(hf.num_hidden_layers) if hf.has_experts(layer)]
    return decoder.decoder_shape(
        "qwen3_moe",
        hf,
        qk_norm=True,
        experts=hf.experts,
        top_k=hf.num_experts_per_tok,
        expert_ffn=hf.moe_intermediate_size,
        moe_layers=moe_layers if len(moe_layers) < hf.num_hidden_layers else None,
    )


def architecture(hf: HfConfig) -> Architecture:
    """The Megatron side of a Qwen3-MoE configuration."""

    def expert_layer(ours: str, theirs: str) -> Iterator[Weight]:
        yield Weight(ours + "router.weight", (theirs + "gate.weight",))
        yield from decoder.expert_weights(ours, theirs, hf.experts)

    router = dict(
        moe_router_score_function="softmax",
        # The softmax of the chosen logits is the softmax of all of them, normalised over the chosen.
        moe_router_pre_softmax=not hf.norm_topk_prob,
    )
    return decoder.decoder_architecture(hf, shape(hf), router=router, expert_layer=expert_layer)


def tiny(asked: TinyModel) -> dict[str, Any]:
    """Entries of a tiny model's configuration that are Qwen3-MoE's own."""
    return {
        "num_experts": asked.experts,
        "num_experts_per_tok": asked.top_k,
        "moe_intermediate_size": asked.expert_ffn,
        "norm_topk_prob": True,
    }


FAMILY = Family(config=HfConfig, shape=shape, architecture=architecture, tiny=tiny, experts=True, qk_norm=True)
