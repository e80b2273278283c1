"""What the trainer needs to know of a model family, and the table of families."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from vime.errors import UserError
from vime.models.weight import Weight

# model_type of the Hugging Face config -> module with HfConfig and architecture
FAMILIES = {
    "qwen3": "vime.models.qwen3",
    "qwen3_moe": "vime.models.qwen3_moe",
    "glm4_moe": "vime.models.glm4_moe",
}

# Keys of a Hugging Face config that do not change what the network computes.
IGNORED_KEYS = frozenset(
    "architectures auto_map bos_token_id eos_token_id pad_token_id torch_dtype dtype transformers_version use_cache"
    " model_type _name_or_path pretraining_tp max_window_layers".split()
)


@dataclass(frozen=True)
class Architecture:
    """A model's shape, read from its Hugging Face config.

    transformer: keyword arguments of Megatron's TransformerConfig that define the network.
    layers: transformer layers. vocabulary: rows of the embedding. context: longest sequence.
    rotary_base, rotary_share: rotary embedding's base and the share of a head it rotates.
    tied: whether the output layer shares the embedding.
    layer_weights: (global layer index, index within the stage) -> the layer's weights.
    embedding, final_norm, output: the weights outside the layers; output is None when tied.
    qk_norm: whether queries and keys are normalised.
    moe_layers: for each layer whether it has experts; empty for a dense model.
    experts, top_k: of such a layer, and how many of them a token uses.
    kept_aside: prefixes of tensors that take no part in training and are exported as they came.
    """

    model_type: str
    transformer: dict[str, Any]
    layers: int
    vocabulary: int
    context: int
    rotary_base: float
    rotary_share: float
    tied: bool
    layer_weights: Callable[[int, int], list[Weight]]
    embedding: Weight
    final_norm: Weight
    output: Weight | None
    qk_norm: bool
    moe_layers: tuple[bool, ...] = ()
    experts: int = 0
    top_k: int = 0
    kept_aside: tuple[str, ...] = ()


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a Hugging Face folder. Raises UserError when it is missing or not JSON."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} is not a Hugging Face model folder: it has no config.json") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} must hold a JSON object")
    return config


def architecture(folder: Path) -> Architecture:
    """The architecture of a Hugging Face folder. Raises UserError naming what is not supported, never approximating."""
    config = read_config(folder)
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        near = get_close_matches(model_type, FAMILIES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(
            f"{folder}/config.json: model_type {model_type!r} is not supported (supported: {', '.join(FAMILIES)}){hint}"
        )
    module = importlib.import_module(FAMILIES[model_type])
    known = {
        key: value for key, value in config.items() if key not in IGNORED_KEYS or key in module.HfConfig.model_fields
    }
    return module.architecture(_parse(module.HfConfig, known, folder))  # type: ignore[no-any-return]


def _parse(schema: type[BaseModel], config: dict[str, Any], folder: Path) -> BaseModel:
    try:
        return schema.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "config"
        if first["type"] == "extra_forbidden":
            reason = f"{key}={first['input']!r} is not known for this family"
        else:
            message = first["msg"].removeprefix("Value error, ").removeprefix("Input ").removeprefix("should be ")
            reason = f"{key}={first['input']!r} is not supported: it must be {message}" if first["loc"] else message
        raise UserError(f"{folder}/config.json: {reason}") from None
