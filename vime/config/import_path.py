"""Custom logic by name: `module:function` becomes the function, called with those arguments that it names."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Collection
from typing import Annotated, Any

from pydantic import BeforeValidator

from vime.errors import UserError


def load_function(path: str, field: str) -> Callable[..., Any]:
    """The function that `path` names. Raises UserError naming the configuration field."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UserError(f"{field}={path}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if function is None:
        raise UserError(f"{field}={path}: {module_name} has no {name}")
    if not callable(function):
        raise UserError(f"{field}={path}: {name} is not a function")
    return function  # type: ignore[no-any-return]


def named_arguments(function: Callable[..., Any], offered: Collection[str], path: str, field: str) -> list[str]:
    """Which of the `offered` arguments `function` names, or all when it takes any.

    Raises UserError when it asks for something else.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise UserError(f"{field}={path} does not say what arguments it takes") from error
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return list(offered)
    strange = [p.name for p in parameters if p.name not in offered and p.default is p.empty]
    if strange:
        raise UserError(f"{field}={path} asks for {strange[0]!r}; there are {', '.join(offered)}")
    return [p.name for p in parameters if p.name in offered]


def call_by_name(function: Callable[..., Any], offered: dict[str, Any], path: str, field: str) -> Any:
    """Call `function` with the arguments of `offered` that it names, or all when it takes any.

    Raises UserError when it asks for something else, and when it raises: the line names field, function and exception.
    """
    taken = {name: offered[name] for name in named_arguments(function, offered, path, field)}
    try:
        return function(**taken)
    except Exception as error:
        raise UserError(f"{field}={path} raised {type(error).__name__}: {error}") from error


def _import_path(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        raise ValueError(f"{value!r} is not an import path; write it as module:function")
    return value


ImportPath = Annotated[str, BeforeValidator(_import_path)]
