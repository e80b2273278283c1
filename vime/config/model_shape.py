"""The few sizes of a model that decide whether a plan fits it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from vime.config import Model, Shape, TinyModel
from vime.errors import UserError

TINY_VOCABULARY = 264
"""Words of a tiny model: 256 bytes and 8 special tokens (vime.models.tiny)."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes that parallelism divides and sequences fit in."""

    layers: int
    heads: int
    kv_heads: int
    context: int
    """Longest sequence in tokens."""
    experts: int = 0
    """Experts of a mixture-of-experts layer; 0 is a dense model."""


def read_shape(model: Model) -> ModelShape:
    """Sizes of the tiny model, those in the `config.json` of a Hugging Face folder, or those of model.shape.

    Raises UserError when the folder or its config.json is missing, says no sizes, or others than model.shape.
    """
    if model.tiny is not None:
        tiny = model.tiny
        return ModelShape(tiny.layers, tiny.heads, tiny.kv_heads, tiny.context, tiny.experts)
    shape = model.shape
    declared = None
    if shape is not None:
        declared = ModelShape(shape.layers, shape.heads, shape.kv_heads, shape.context, shape.experts)
    if model.path is None:
        assert declared is not None, "config.Model has exactly one origin"
        return declared
    found = _read_folder(model.path)
    if declared is None:
        return found
    for name in (field.name for field in fields(ModelShape) if field.name != "context"):
        if getattr(found, name) != getattr(declared, name):
            raise UserError(
                f"model.path: {model.path} has {getattr(found, name)} {name}, but model.shape.{name}="
                f"{getattr(declared, name)}: is it {model.name or 'the model that the recipe means'}?"
            )
    return found


def tiny_shape(tiny: TinyModel) -> Shape:
    """All sizes of a tiny model."""
    glm = tiny.family == "glm4_moe"
    return Shape(
        layers=tiny.layers,
        hidden=tiny.hidden,
        heads=tiny.heads,
        kv_heads=tiny.kv_heads,
        head_dim=tiny.head_dim,
        ffn=tiny.ffn,
        vocabulary=TINY_VOCABULARY,
        context=tiny.context,
        tied_embeddings=tiny.tied_embeddings,
        qk_norm=tiny.qk_norm if glm else True,
        qkv_bias=glm,
        experts=tiny.experts,
        top_k=tiny.top_k if tiny.experts else 0,
        expert_ffn=tiny.expert_ffn if tiny.experts else 0,
        shared_expert_ffn=tiny.shared_experts * tiny.expert_ffn if glm else 0,
        dense_layers=tiny.dense_layers if glm else 0,
    )


def _read_folder(path: Path) -> ModelShape:
    file = path / "config.json"
    if not path.is_dir():
        raise UserError(f"model.path: there is no folder {path}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        heads = int(config["num_attention_heads"])
        return ModelShape(
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            context=int(config["max_position_embeddings"]),
            # Qwen3 calls them num_experts, or num_local_experts in newer files, GLM n_routed_experts.
            experts=int(
                config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0
            ),
        )
    except FileNotFoundError:
        raise UserError(f"model.path: {path} is no Hugging Face model folder: it has no config.json") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"model.path: cannot read {file}: {' '.join(str(error).split())}") from None
    except KeyError as error:
        raise UserError(f"model.path: {file} does not say {error.args[0]}") from None
