"""The command lines that start runs: options, then `cluster=NAME recipe=NAME dotted.key=value` in any order."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn

from vime.config.compose import refuse_repeated
from vime.errors import UserError, did_you_mean


class OptionParser(argparse.ArgumentParser):
    """Reads the options and leaves what else there is; a mistake is a UserError."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(message)

    def read(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The options, and the other arguments in their order. Raises UserError for an unknown option."""
        options, rest = self.parse_known_args(list(arguments))
        for argument in rest:
            if argument.startswith("-"):
                known = [name for name in self._option_string_actions if name.startswith("--")]
                raise UserError(f"unknown option {argument}{did_you_mean(argument, known)}")
        return options, rest


@dataclass(frozen=True)
class Settings:
    """What is not an option of a command line."""

    names: dict[str, str]
    """Values of the keys that are not configuration, such as cluster and recipe."""
    overrides: tuple[str, ...]
    """`dotted.key=value`."""
    words: tuple[str, ...]
    """Arguments without `=`."""


def read_settings(arguments: Sequence[str], keys: Collection[str]) -> Settings:
    """Sort arguments: `keys` are those that are not configuration. Raises UserError for what is given twice."""
    names: dict[str, str] = {}
    overrides: list[str] = []
    words: list[str] = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            words.append(argument)
        elif key not in keys:
            overrides.append(argument)
        elif key in names:
            raise UserError(f"{key}= is given twice: {names[key]} and {value}")
        else:
            names[key] = value
    refuse_repeated(overrides)
    return Settings(names, tuple(overrides), tuple(words))
