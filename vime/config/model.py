"""The model of a run: what a recipe may say under `model`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from vime.config.algorithm import Algorithm as Algorithm
from vime.config.cluster import Cluster as Cluster
from vime.config.data import Data as Data
from vime.config.rollout import Buffer as Buffer
from vime.config.rollout import Evaluation as Evaluation
from vime.config.rollout import Rollout as Rollout
from vime.config.section import Section


class TinyModel(Section):
    """A model that vime makes for tests and first runs, instead of one that was downloaded."""

    family: str = "qwen3"
    """Model family (vime/models/family.py lists them); also the `model_type` of its Hugging Face configuration."""
    layers: int = Field(4, ge=1)
    """Transformer layers."""
    hidden: int = Field(128, ge=8)
    """Width of the residual stream."""
    heads: int = Field(4, ge=1)
    """Query heads."""
    kv_heads: int = Field(2, ge=1)
    """Key-value heads (query groups)."""
    head_dim: int = Field(32, ge=4)
    """Width of one head."""
    ffn: int = Field(384, ge=8)
    """Width of the gated feed-forward layer."""
    experts: int = Field(0, ge=0)
    """Experts of a mixture-of-experts layer; 0 in a dense family."""
    top_k: int = Field(2, ge=1)
    """Experts that a token uses."""
    expert_ffn: int = Field(128, ge=8)
    """Width of one expert."""
    shared_experts: int = Field(1, ge=0)
    """glm4_moe: experts, of the same width, that every token uses."""
    dense_layers: int = Field(1, ge=0)
    """glm4_moe: first layers that have no experts."""
    qk_norm: bool = False
    """glm4_moe: whether queries and keys are normalised, which the other families always do."""
    routing_bias: float = Field(0.0, ge=0)
    """glm4_moe: standard deviation of the router's selection bias."""
    context: int = Field(512, ge=16)
    """Longest sequence, in tokens."""
    tied_embeddings: bool = True
    """Whether the output layer shares the embedding's weight."""
    initializer_range: float = Field(0.02, gt=0)
    """Standard deviation of the initial weights."""
    seed: int = 0
    """Seed of the initial weights."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> TinyModel:
        if self.heads % self.kv_heads:
            raise ValueError(f"model.tiny.heads={self.heads} is not a multiple of model.tiny.kv_heads={self.kv_heads}")
        if self.experts and self.top_k > self.experts:
            raise ValueError(f"model.tiny.top_k={self.top_k} exceeds model.tiny.experts={self.experts}")
        return self


class Shape(Section):
    """The sizes of a model that plans and checks count with.

    A recipe gives those of a published model, so that a run can be planned where its files are not.
    """

    family: str | None = None
    """Model family (vime/models/family.py lists them). It fixes qk_norm and qkv_bias where all its models agree."""
    layers: int = Field(ge=1)
    """Transformer layers."""
    hidden: int = Field(ge=1)
    """Width of the residual stream."""
    heads: int = Field(ge=1)
    """Query heads."""
    kv_heads: int = Field(ge=1)
    """Key-value heads (query groups)."""
    head_dim: int = Field(ge=1)
    """Width of one head."""
    ffn: int = Field(ge=1)
    """Width of a dense feed-forward layer."""
    vocabulary: int = Field(ge=1)
    """Rows of the embedding."""
    context: int = Field(ge=1)
    """Longest sequence, in tokens."""
    tied_embeddings: bool = False
    """Whether the output layer shares the embedding's weight."""
    qk_norm: bool | None = None
    """Whether queries and keys are normalised. Default: as the family has it, else false."""
    qkv_bias: bool | None = None
    """Whether the projections of queries, keys and values have a bias. Default: as the family has it, else false."""
    experts: int = Field(0, ge=0)
    """Experts of a mixture-of-experts layer. 0: dense."""
    top_k: int = Field(0, ge=0)
    """Experts that a token uses."""
    expert_ffn: int = Field(0, ge=0)
    """Width of one expert."""
    shared_expert_ffn: int = Field(0, ge=0)
    """Width of the expert that every token uses."""
    dense_layers: int = Field(0, ge=0)
    """First layers of a mixture-of-experts model that are dense."""
    moe_layers: list[int] | None = None
    """Layers with experts, counted from 0. Default: all behind the dense first ones."""

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        if self.moe_layers is not None:
            return layer in self.moe_layers
        return bool(self.experts) and layer >= self.dense_layers


class Model(Section):
    """Where the initial policy comes from: a Hugging Face folder, or a tiny model made here."""

    path: Path | None = None
    """A Hugging Face folder of a supported family (config, tokenizer, safetensors)."""
    name: str | None = None
    """The model's name on the Hugging Face hub: which folder `path` should be."""
    shape: Shape | None = None
    """The named model's sizes. With them a run is planned and shown without `path`; submitting it needs `path`."""
    tiny: TinyModel | None = None
    """The tiny model to make when there is no `path`."""
    warmup: str | None = None
    """Name or path of an `sft` recipe that trains the tiny model first. Its result is cached under VIME_CACHE."""

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        origin = self.path is not None or self.shape is not None
        if origin == (self.tiny is not None):
            other = "model.shape" if self.path is None and self.shape is not None else "model.path"
            raise ValueError(f"give exactly one of {other} and model.tiny; set the other to null")
        if self.warmup is not None and self.tiny is None:
            raise ValueError("model.warmup trains a tiny model; with model.path set it to null")
        return self
