"""What a model family says about itself, and the table of families that everything else asks.

A family is one file, `vime/models/<family>.py`. How to add one:

1. Write `HfConfig`, a subclass of `decoder.HfDecoder`: the keys of its config.json with the values that vime computes.
   Any other key or value is refused by name, so leave out what is not computed exactly.
2. Write `shape(hf)`, the sizes that plans and checks count with, and `architecture(hf)`, what the trainer builds. Both
   are one call of `decoder` for a decoder of the usual kind. Import torch inside functions: a dry run has none.
3. End the file with `FAMILY = Family(...)`, and name the module in FAMILIES by the `model_type` of its config.json.

Nothing else names a family. Add it to FAMILIES of tests/training/test_model.py and tests/training/test_memory.py, which
compare it with transformers and its plan with what is allocated.

Three descriptions of a model, each with one meaning: `HfConfig` is what a folder's config.json may say; `Shape` is the
sizes that a plan needs, whether they come from a folder, a tiny model or a recipe; `Architecture` is what the trainer
builds. `TinyModel` describes none: it asks for a config.json to be made.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from vime.config import Shape, TinyModel
from vime.errors import UserError, nearest
from vime.models.weight import Weight

if TYPE_CHECKING:
    from torch import Tensor

FAMILIES = {
    "qwen3": "vime.models.qwen3",
    "qwen3_moe": "vime.models.qwen3_moe",
    "glm4_moe": "vime.models.glm4_moe",
    "llama": "vime.models.llama",
    "qwen2": "vime.models.qwen2",
}
"""`model_type` of a Hugging Face config -> module with FAMILY."""

# Keys of a Hugging Face config that do not change what the network computes.
IGNORED_KEYS = frozenset(
    "architectures auto_map bos_token_id eos_token_id pad_token_id torch_dtype dtype transformers_version use_cache"
    " model_type _name_or_path pretraining_tp max_window_layers".split()
)


@dataclass(frozen=True)
class Architecture:
    """What the trainer builds.

    transformer: keyword arguments of Megatron's TransformerConfig that define the network.
    layer_weights: (global layer index, index within the chunk) -> the layer's weights.
    embedding, final_norm, output: the weights outside the layers; output is None when tied to the embedding.
    rotary_base, rotary_share: rotary embedding's base and the share of a head it rotates.
    rotary_scaling: float32 [n] inverse frequencies -> those that the model uses; None where they stay.
    kept_aside: prefixes of tensors that take no part in training and are exported as they came.
    """

    shape: Shape
    transformer: dict[str, Any]
    layer_weights: Callable[[int, int], list[Weight]]
    embedding: Weight
    final_norm: Weight
    output: Weight | None
    rotary_base: float
    rotary_share: float = 1.0
    rotary_scaling: Callable[[Tensor], Tensor] | None = None
    kept_aside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """All that is special to a family.

    config: pydantic model of its config.json.
    shape, architecture: what a checked config.json means to a plan, and to the trainer.
    tiny: entries of a tiny model's config.json that are not those of every family. Raises UserError.
    experts: whether some of its layers have experts.
    qk_norm, qkv_bias: whether queries and keys are normalised, and projected with a bias; None where config.json says.
    engine_ties: whether vLLM can tie the output layer to the embedding.
    """

    config: type[Any]
    shape: Callable[[Any], Shape]
    architecture: Callable[[Any], Architecture]
    tiny: Callable[[TinyModel], dict[str, Any]] = lambda tiny: {}
    experts: bool = False
    qk_norm: bool | None = False
    qkv_bias: bool | None = False
    engine_ties: bool = True

    def parse(self, config: dict[str, Any], where: str) -> Any:
        """A checked config.json. where: begins the message. Raises UserError naming what is not supported."""
        known = {
            key: value for key, value in config.items() if key not in IGNORED_KEYS or key in self.config.model_fields
        }
        try:
            return self.config.model_validate(known)
        except ValidationError as error:
            raise UserError(f"{where}: {_reason(error)}") from None


def family(name: str, where: str) -> Family:
    """The family of that name. where: what named it, for the message. Raises UserError naming those that exist."""
    if name not in FAMILIES:
        near = nearest(name, FAMILIES)
        hint = f"; did you mean {near}?" if near else ""
        raise UserError(f"{where} is not supported (supported: {', '.join(FAMILIES)}){hint}")
    found = importlib.import_module(FAMILIES[name]).FAMILY
    assert isinstance(found, Family)
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a Hugging Face folder. Raises UserError when it is missing or not JSON."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} is not a Hugging Face model folder: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} must hold a JSON object")
    return config


def read_shape(folder: Path) -> Shape:
    """The sizes of a Hugging Face folder, without torch. Raises UserError naming what is not supported."""
    found, hf = _read(folder)
    return found.shape(hf)


def architecture(folder: Path) -> Architecture:
    """The architecture of a Hugging Face folder. Raises UserError naming what is not supported, never approximating."""
    found, hf = _read(folder)
    return found.architecture(hf)


def _read(folder: Path) -> tuple[Family, Any]:
    config = read_config(folder)
    where = f"{folder}/config.json"
    if "model_type" not in config:
        raise UserError(f"{where}: model_type is missing (supported: {', '.join(FAMILIES)})")
    found = family(str(config["model_type"]), f"{where}: model_type {config['model_type']!r}")
    return found, found.parse(config, where)


def _reason(error: ValidationError) -> str:
    """One line about the first problem: the key, its value, and what it must be."""
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ").removeprefix("should be ")
    if first["type"] == "missing":
        return f"{key} is missing"
    if first["type"] == "extra_forbidden":
        return f"{key}={first['input']!r} is not known for this family"
    if first["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}={first['input']!r} is not supported: it must be {message}"
