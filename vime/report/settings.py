"""What a report needs of a run's resolved configuration. Read without the schema, so that old runs stay readable."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.config import yaml_file
from vime.errors import UserError


@dataclass(frozen=True)
class Settings:
    """A few values of config.yaml; None where the file does not say."""

    values: dict[str, Any]
    """Every leaf by its dotted key; lists are leaves."""
    problem: str | None = None
    """Why there are none although there is a file."""

    def text(self, key: str) -> str | None:
        """A value as a person would type it."""
        value = self.values.get(key)
        return None if value is None else str(value)

    def integer(self, key: str) -> int | None:
        """A whole number."""
        value = self.number(key)
        return int(value) if value is not None and math.isfinite(value) and value == int(value) else None

    def number(self, key: str) -> float | None:
        """A number. YAML 1.1 readers take 1e-4 for a string, so a string is tried too."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return None
        try:
            return float(value)
        except (ValueError, OverflowError):
            return None


def read_settings(path: Path) -> Settings:
    """The settings of a config.yaml; empty when it is missing or does not read, which `problem` then says."""
    try:
        content = yaml_file.load_file(path).data
    except UserError as error:
        return Settings({}, str(error) if path.exists() else None)
    return Settings(dict(_leaves("", content)))


def _leaves(prefix: str, value: dict[Any, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, item in value.items():
        name = f"{prefix}{key}"
        found += _leaves(f"{name}.", item) if isinstance(item, dict) and item else [(name, item)]
    return found
