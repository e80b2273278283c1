"""What a model folder says of its own limits: its context and the tokens that end a response."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.config import Rollout
from vime.errors import UserError


@dataclass(frozen=True)
class Limits:
    """Where a response has to end."""

    context: int
    """Longest prompt plus response, in tokens."""
    stop_token_ids: tuple[int, ...]
    """Any of these ends a response, and is its last token."""
    max_response: int
    """Longest response, in tokens."""

    def room(self, prompt_tokens: int) -> int:
        """Tokens that a response to a prompt of this length may have; 0 or less when the prompt itself is too long."""
        return min(self.max_response, self.context - prompt_tokens)


def read_limits(rollout: Rollout, model: Path) -> Limits:
    """Reads `config.json` and `generation_config.json` of a Hugging Face folder.

    Raises UserError when there is none, or when `rollout.context` is beyond what the model was made for.
    """
    config = _read(model / "config.json")
    if config is None:
        raise UserError(f"{model} has no config.json: model.path must be a Hugging Face folder")
    generation = _read(model / "generation_config.json") or {}
    own = config.get("max_position_embeddings")
    context = rollout.context or own
    if context is None:
        raise UserError(f"{model}/config.json states no max_position_embeddings; set rollout.context")
    if own is not None and context > own:
        raise UserError(f"rollout.context={context} is beyond the model's own limit of {own} tokens")
    stops: list[int] = []
    for given in (generation.get("eos_token_id"), config.get("eos_token_id"), rollout.stop_token_ids):
        stops += given if isinstance(given, list) else [] if given is None else [given]
    if not stops:
        raise UserError(f"{model} names no eos_token_id; set rollout.stop_token_ids")
    return Limits(context, tuple(sorted(set(stops))), rollout.max_response_tokens)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return content
