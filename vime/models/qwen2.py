"""Qwen2 and Qwen2.5, dense: grouped-query attention whose queries, keys and values have a bias and no norm."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from vime.config import Shape
from vime.models import decoder
from vime.models.family import Architecture, Family


class HfConfig(decoder.HfDecoder):
    """The Hugging Face configuration, as far as vime computes it. Anything else is refused by name."""

    use_sliding_window: Literal[False] = False
    sliding_window: int | None = None  # not in use
    use_mrope: Literal[False] = False
    layer_types: list[Literal["full_attention"]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_head_dim(cls, config: Any) -> Any:
        return decoder.derive_head_dim(config)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> HfConfig:
        decoder.check_whole_rotary(self.rope_parameters)
        decoder.check_layer_types(self.layer_types, self.num_hidden_layers)
        if self.head_dim * self.num_attention_heads != self.hidden_size:
            # transformers would follow it, vLLM's Qwen2 computes hidden_size / num_attention_heads
            raise ValueError(
                f"head_dim={self.head_dim} is not hidden_size / num_attention_heads = {self.hidden_size} /"
                f" {self.num_attention_heads}, which is all that vLLM serves of this family"
            )
        return self


def shape(hf: HfConfig) -> Shape:
    """The sizes of a Qwen2 configuration."""
    return decoder.decoder_shape("qwen2", hf, qkv_bias=True)


def architecture(hf: HfConfig) -> Architecture:
    """The Megatron side of a Qwen2 configuration."""
    return decoder.decoder_architecture(hf, shape(hf))


FAMILY = Family(config=HfConfig, shape=shape, architecture=architecture, qkv_bias=True)
