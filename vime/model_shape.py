"""The few sizes of a model that decide whether a plan fits it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from vime.config import Model
from vime.errors import UserError


@dataclass(frozen=True)
class ModelShape:
    """Sizes that parallelism divides and sequences fit in."""

    layers: int
    heads: int
    kv_heads: int
    context: int
    """Longest sequence in tokens."""


def read_shape(model: Model) -> ModelShape:
    """Sizes of the tiny model, or those in the `config.json` of a Hugging Face folder.

    Raises UserError when the folder or its config.json is missing, or says no sizes.
    """
    if model.tiny is not None:
        tiny = model.tiny
        return ModelShape(tiny.layers, tiny.heads, tiny.kv_heads, tiny.context)
    assert model.path is not None, "config.Model has exactly one origin"
    file = model.path / "config.json"
    if not model.path.is_dir():
        raise UserError(f"model.path: there is no folder {model.path}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        heads = int(config["num_attention_heads"])
        return ModelShape(
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            context=int(config["max_position_embeddings"]),
        )
    except FileNotFoundError:
        raise UserError(f"model.path: {model.path} is no Hugging Face model folder: it has no config.json") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"model.path: cannot read {file}: {' '.join(str(error).split())}") from None
    except KeyError as error:
        raise UserError(f"model.path: {file} does not say {error.args[0]}") from None
