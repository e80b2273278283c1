"""What pydantic finds wrong in a configuration, as one line: where it was written, what is wrong, what is right."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from vime.config.yaml_file import KeyPath, Place
from vime.errors import did_you_mean, nearest

_EXPECTED = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "path_type": "must be a path",
    "list_type": "must be a list, such as [1, 2]",
    "tuple_type": "must be a list, such as [1, 2]",
    "dict_type": "must be a map, such as {key: value}",
    "model_type": "must be a section of `key: value` lines",
    "model_attributes_type": "must be a section of `key: value` lines",
}


def dotted(path: KeyPath) -> str:
    """`training.ranks`, `rollout.stop_token_ids[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def section_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """The section that `path` leads to in the schema, or None where the path leaves the schema."""
    current: type[BaseModel] = model
    for part in path:
        info = current.model_fields.get(str(part))
        nested = None if info is None else submodel(info.annotation)
        if nested is None:
            return None
        current = nested
    return current


def submodel(annotation: Any) -> type[BaseModel] | None:
    """The section class inside a field's type (`TinyModel | None` gives TinyModel), or None for a plain field."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def all_fields(model: type[BaseModel], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Paths of every field of the schema, sections included."""
    for name, info in model.model_fields.items():
        yield (*prefix, name)
        nested = submodel(info.annotation)
        if nested is not None:
            yield from all_fields(nested, (*prefix, name))


def real_path(location: tuple[str | int, ...], data: Any) -> KeyPath:
    """pydantic's location without the names of union branches, which are no keys of the data."""
    path: list[str | int] = []
    for index, part in enumerate(location):
        last = index == len(location) - 1
        if isinstance(data, dict) and isinstance(part, str) and (part in data or (last and not path_is_tag(part))):
            path.append(part)
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            path.append(part)
            data = data[part]
    return tuple(path)


def path_is_tag(part: str) -> bool:
    """Whether a part of a location is pydantic's name of a union branch, such as `function-before[f(), str]`."""
    return bool(re.search(r"[\[\](), ]", part))


def explain(error: ValidationError, schema: type[BaseModel], data: Any, places: Mapping[KeyPath, Place]) -> str:
    """One line about the first problem (an unknown key before anything else), and how many more there are."""
    problems: dict[KeyPath, list[Any]] = {}
    found = error.errors(include_url=False)
    for item in sorted(found, key=lambda item: item["type"] != "extra_forbidden"):
        problems.setdefault(real_path(item["loc"], data), []).append(item)
    path, items = next(iter(problems.items()))
    kind = items[0]["type"]
    message = ", or ".join(dict.fromkeys(_reason(item) for item in items))
    message = re.sub(r"(must be one of .*, or )?is not an import path.*", _or_import_path, message)
    name = dotted(path)
    if kind == "extra_forbidden":
        line = f"unknown key {name}{_nearest_key(path, schema)}"
    elif kind == "missing":
        line = f"{name} is missing"
    elif kind == "value_error" and name in message:
        line = message
    else:
        line = f"{name}={shown(_value_at(path, data))} {message}{_hint(items, path, data)}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return " ".join(f"{place_of(path, message, places)}: {line}{more}".split())


def _or_import_path(match: re.Match[str]) -> str:
    return f"{match[1] or 'must be '}an import path module:function"


def place_of(path: KeyPath, message: str, places: Mapping[KeyPath, Place]) -> Place:
    """The place of a value; for a rule about several values, that of one the message names.

    Of several the command line's comes first: it is what a person changed last.
    """
    sections = {key[:end] for key in places for end in range(len(key))}
    if path in places and path not in sections:
        return places[path]
    words = [tuple(word.split(".")) for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", message)]
    values = places.keys() - sections
    named = [places[key] for word in words for key in (word, (*path, *word)) if key in values]
    if named:
        return next((place for place in named if place.line is None), named[0])
    return next(places[path[:end]] for end in range(len(path), -1, -1) if path[:end] in places or end == 0)


def _reason(item: Any) -> str:
    if item["type"] == "literal_error":
        return f"must be one of {item['ctx']['expected'].replace(' or ', ', ').replace(chr(39), '')}"
    if item["type"] == "value_error":
        return str(item["ctx"]["error"]).removeprefix(f"{item['input']!r} ")
    known = _EXPECTED.get(item["type"])
    return known or str(item["msg"]).replace("Input should be", "must be").replace("String should", "must")


def _hint(items: list[Any], path: KeyPath, data: Any) -> str:
    value = _value_at(path, data)
    for item in items:
        if item["type"] == "literal_error" and isinstance(value, str):
            words = re.findall(r"'([^']*)'", item["ctx"]["expected"])
            suggestion = did_you_mean(value, words)
            return suggestion if "did you mean" in suggestion else ""
        if item["type"].startswith("bool_") and isinstance(value, str):
            if value.lower() in ("yes", "on", "y"):
                return "; write true"
            if value.lower() in ("no", "off", "n"):
                return "; write false"
        if item["type"].startswith("int_"):
            if isinstance(value, float) and value.is_integer():
                return f"; write {int(value)}"
            if isinstance(value, str) and re.fullmatch(r"[0-9]+(?:[_,][0-9]+)+", value):
                return f"; write {value.replace('_', '').replace(',', '')}"
    return ""


def _nearest_key(path: KeyPath, schema: type[BaseModel]) -> str:
    parent, word = path[:-1], str(path[-1])
    section = section_at(schema, parent)
    names = list(section.model_fields) if section is not None else []
    suggestion = did_you_mean(word, names)
    if "did you mean" in suggestion:
        return f"; did you mean {dotted((*parent, suggestion.removeprefix('; did you mean ').rstrip('?')))}?"
    elsewhere = list(all_fields(schema))
    meant = nearest(word, {str(candidate[-1]) for candidate in elsewhere})
    same = [dotted(candidate) for candidate in elsewhere if candidate[-1] == meant]
    return f"; did you mean {' or '.join(same[:3])}?" if same else suggestion


def _value_at(path: KeyPath, data: Any) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def shown(value: Any) -> str:
    """A value as YAML would have it, cut to 60 characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
