"""Custom logic by name: `module:function` becomes the function."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from vime.errors import UserError


def load_function(path: str, field: str) -> Callable[..., Any]:
    """The function that `path` names. Raises UserError naming the configuration field."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(f"{field}={path}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if function is None:
        raise UserError(f"{field}={path}: {module_name} has no {name}")
    if not callable(function):
        raise UserError(f"{field}={path}: {name} is not a function")
    return function  # type: ignore[no-any-return]
