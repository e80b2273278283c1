"""A row of a table of algorithms: the schema's names, `--help`, the documentation and the trainer all read it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A function by the name that a recipe gives it."""

    function: Callable[..., Any]
    line: str
    """What it computes, in Markdown."""
    source: str
    """Where it was published."""

    def call(self, offered: Mapping[str, Any]) -> Any:
        """Call the function with those of the offered arguments that it names."""
        return self.function(**{name: offered[name] for name in inspect.signature(self.function).parameters})


def described(what: str, table: Mapping[str, Row]) -> str:
    """The text of a configuration key whose values are the names of a table."""
    return "\n".join([what, *(f"{name}: {row.line} ({row.source})" for name, row in table.items())])
