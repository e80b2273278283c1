"""Llama 3, dense: grouped-query attention, and from 3.1 on a rotary embedding scaled for long contexts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vime.config import Shape, TinyModel
from vime.models import decoder
from vime.models.family import Architecture, Family

if TYPE_CHECKING:
    from torch import Tensor


class Scaling(BaseModel):
    """How the rotary embedding is scaled: not at all, or as in Llama 3.1, by all four numbers."""

    model_config = ConfigDict(extra="forbid", strict=True)
    rope_type: Literal["default", "llama3"] = "default"
    factor: float | None = Field(None, ge=1)
    low_freq_factor: float | None = Field(None, gt=0)
    high_freq_factor: float | None = Field(None, gt=0)
    original_max_position_embeddings: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Scaling:
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        for name in names:
            if self.rope_type == "llama3" and getattr(self, name) is None:
                raise ValueError(f"{name} is missing for rope_type=llama3")
            if self.rope_type == "default" and getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)} needs rope_type=llama3")
        if self.rope_type == "llama3" and self.numbers[1] >= self.numbers[2]:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} is not below high_freq_factor={self.high_freq_factor}"
            )
        return self

    @property
    def numbers(self) -> tuple[float, float, float, int]:
        """Factor, low and high frequency factor, original context, of rope_type=llama3."""
        assert self.factor is not None
        assert self.low_freq_factor is not None
        assert self.high_freq_factor is not None
        assert self.original_max_position_embeddings is not None
        return self.factor, self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings


class Rope(Scaling):
    """Rotary embedding and its scaling in one, as newer configurations have it."""

    rope_theta: float
    partial_rotary_factor: float | None = Field(None, ge=1, le=1)


class HfConfig(decoder.HfDecoder):
    """The Hugging Face configuration, as far as vime computes it. Anything else is refused by name."""

    max_position_embeddings: int = Field(2048, ge=1)
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    rope_scaling: Scaling | None = None  # type: ignore[assignment]  # other families have none
    rope_parameters: Rope | None = None  # type: ignore[assignment]  # nor here

    @model_validator(mode="before")
    @classmethod
    def _with_head_dim(cls, config: Any) -> Any:
        return decoder.derive_head_dim(config)

    @model_validator(mode="after")
    def _one_scaling(self) -> HfConfig:
        if self.rope_scaling is not None and self.rope_parameters is not None:
            raise ValueError("rope_scaling and rope_parameters are both given: keep one of them")
        return self

    @property
    def scaling(self) -> Scaling | None:
        """The scaling of type llama3, from either place that configs keep it in; None when there is none."""
        given = self.rope_parameters or self.rope_scaling
        return given if given is not None and given.rope_type == "llama3" else None


def shape(hf: HfConfig) -> Shape:
    """The sizes of a Llama configuration."""
    return decoder.decoder_shape("llama", hf)


def architecture(hf: HfConfig) -> Architecture:
    """The Megatron side of a Llama configuration."""
    scaling = hf.scaling

    def scaled(inverse: Tensor) -> Tensor:
        assert scaling is not None
        return scaled_frequencies(inverse, *scaling.numbers)

    return decoder.decoder_architecture(hf, shape(hf), rotary_scaling=scaled if scaling is not None else None)


def scaled_frequencies(inverse: Tensor, factor: float, low: float, high: float, context: int) -> Tensor:
    """Llama 3.1's inverse frequencies: long waves `factor` times longer, short ones as they are, between them both.

    inverse: float32 [n]. low, high: waves longer than context / low are long, those shorter than context / high short.
    context: that of pre-training. The formula is transformers' `_compute_llama3_parameters`. Megatron-core 0.16.1 has
    the same with low=1, high=4 and context=8192 for ever, so that it is computed here, from what the model says.
    """
    import torch

    wave = 2 * math.pi / inverse
    smooth = (context / wave - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    return torch.where(wave > context / low, inverse / factor, torch.where(wave < context / high, inverse, between))


def tiny(asked: TinyModel) -> dict[str, Any]:
    """Entries of a tiny model's configuration that are Llama's own: a scaling that its short context shows."""
    return {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": max(1, asked.context // 8),
        }
    }


FAMILY = Family(config=HfConfig, shape=shape, architecture=architecture, tiny=tiny)
