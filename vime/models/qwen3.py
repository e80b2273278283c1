"""Qwen3, dense: grouped-query attention with normalised queries and keys, gated SiLU feed-forward, RMSNorm."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from vime.config import Shape
from vime.models import decoder
from vime.models.family import Architecture, Family


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


def shape(hf: HfConfig) -> Shape:
    """The sizes of a Qwen3 configuration."""
    return decoder.decoder_shape("qwen3", hf, qk_norm=True)


def architecture(hf: HfConfig) -> Architecture:
    """The Megatron side of a Qwen3 configuration."""
    return decoder.decoder_architecture(hf, shape(hf))


FAMILY = Family(config=HfConfig, shape=shape, architecture=architecture, qk_norm=True)
