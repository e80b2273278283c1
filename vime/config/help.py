"""`launch.py --help [section]`: the documentation of the configuration, from the schema itself."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vime.config import Config
from vime.config.explain import section_at, shown, submodel
from vime.errors import UserError, did_you_mean

_PLAIN: dict[Any, str] = {
    int: "whole number",
    float: "number",
    bool: "true|false",
    str: "text",
    Path: "path",
    Any: "any",
}

_ON = """  on  [map of a kind of cluster to sections]
      Values for one kind of cluster (cluster.kind, or its name), laid over the recipe's others."""


def schema_help(name: str) -> str:
    """Fields, types, defaults and meaning of a section (`rollout`, `recipe.rollout`) or a field (`rollout.engines`).

    Raises UserError for a name that is neither.
    """
    path = tuple(part for part in name.split(".") if part)
    # `recipe.` may stand before a recipe's section, as people say it.
    if path[:1] == ("recipe",):
        path = path[1:]
    section = section_at(Config, path)
    if section is not None:
        return _section(section, path)
    parent = section_at(Config, path[:-1])
    if parent is not None and path[-1] in parent.model_fields:
        return _field(path[-1], parent.model_fields[path[-1]], ".".join(path[:-1]))
    choices = list(parent.model_fields) if parent is not None else list(Config.model_fields)
    raise UserError(f"--help {name}: there is no such section or key{did_you_mean(path[-1], choices)}")


def _section(section: type[BaseModel], path: tuple[str, ...]) -> str:
    prefix = ".".join(path)
    head = f"{prefix}: {_first_line(section)}" if prefix else "A recipe's sections; --help SECTION shows one."
    fields = [_field(name, info, prefix) for name, info in section.model_fields.items()]
    return "\n".join([head, "", *fields, *([] if prefix else [_ON])])


def _field(name: str, info: FieldInfo, prefix: str) -> str:
    full = f"{prefix}.{name}" if prefix else name
    nested = submodel(info.annotation)
    text = info.description or (_first_line(nested) if nested else "")
    kind = "section" if nested else type_name(info.annotation, info.metadata)
    if info.is_required():
        default = "required"
    elif nested is not None and info.default is not None:
        default = ""
    else:
        default = f"default {shown(info.default)}"
    text = text.replace("\n", "\n      ")
    return f"  {full}  [{', '.join(part for part in (kind, *_limits(info), default) if part)}]\n      {text}"


def _first_line(section: type[BaseModel]) -> str:
    return (section.__doc__ or "").strip().split("\n")[0]


def type_name(annotation: Any, metadata: typing.Sequence[Any] = ()) -> str:
    """A field's type as a person would say it: `whole number`, `float32|bfloat16`, `text or null`."""
    if annotation in _PLAIN:
        is_import = any("import_path" in getattr(getattr(item, "func", None), "__name__", "") for item in metadata)
        return "module:function" if is_import else _PLAIN[annotation]
    if annotation is type(None):
        return "null"
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(inside[0], inside[1:])
    if origin is Literal:
        return "|".join(str(choice) for choice in inside)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(part) for part in inside)
    if origin in (list, tuple):
        return f"list of {type_name(inside[0])}"
    if origin is dict:
        return f"map of text to {type_name(inside[1])}"
    return str(annotation)


def _limits(info: FieldInfo) -> list[str]:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return [
        f"{sign} {getattr(item, name)}"
        for item in info.metadata
        for name, sign in signs.items()
        if getattr(item, name, None) is not None
    ]
