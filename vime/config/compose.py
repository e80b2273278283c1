"""From a cluster file, a recipe file and overrides to one checked Config, or to one line that says what is wrong."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vime.config import Cluster, Config, Model, yaml_file
from vime.config.explain import dotted, explain, place_of, real_path
from vime.config.file_kind import HEAD, file_kind, is_file, is_folder, read_regular
from vime.config.yaml_file import MAX_DEPTH, KeyPath, Place
from vime.errors import UserError, did_you_mean

ROOT = Path(__file__).resolve().parents[2]
MAX_CONFIG = 16 << 20
"""Bytes of a model's config.json."""
S = TypeVar("S", bound=BaseModel)
Check = Callable[[Config], object]
"""What else must accept a configuration, from above: it raises UserError, to which the place is added."""


def compose(cluster: str, recipe: str, overrides: Sequence[str] = (), check: Check | None = None) -> Config:
    """The configuration of one run, checked as far as it can be without knowing its model, and by `check`.

    `cluster` and `recipe` are names in clusters/ and configs/, or paths. An override is `dotted.key=value`; keys under
    `cluster.` change the cluster. Relative paths are relative to the current folder and become absolute.
    Raises UserError.
    """
    file = find_file("cluster", cluster)
    document = yaml_file.load_file(file)
    draft = _Draft({"cluster": document.data}, {("cluster", *path): place for path, place in document.places.items()})
    return _with_warmup(*_finish(draft, recipe, overrides), check)


def compose_warmup(config: Config) -> Config | None:
    """The sft run that makes `config`'s initial policy, or None without model.warmup.

    It trains `config`'s own tiny model, on `config`'s cluster, whatever model its recipe names. Raises UserError.
    """
    if config.model.warmup is None:
        return None
    warmup, _ = _finish(_on(config.cluster), config.model.warmup, ())
    if warmup.algorithm.name != "sft":
        raise UserError(f"{config.model.warmup} is a {warmup.algorithm.name} recipe; it must be an sft recipe")
    if warmup.model.warmup is not None:
        raise UserError(f"{config.model.warmup} has a model.warmup itself; a warm-up starts from a new model")
    return warmup.model_copy(update={"model": Model(tiny=config.model.tiny)})


def refuse_repeated(overrides: Sequence[str]) -> None:
    """Refuse a command line of which one override would silently undo another. Raises UserError."""
    given: dict[str, str] = {}
    for text in overrides:
        key = text.partition("=")[0]
        undone = next((other for other in given if other == key or other.startswith(f"{key}.")), None)
        if undone is not None:
            raise UserError(f"command line: {given[undone]} and {text} set the same; leave one out")
        given[key] = text


def load_resolved(path: Path) -> Config:
    """Read a run's `config.yaml` as `dump_resolved` wrote it. Raises UserError for anything else."""
    document = yaml_file.load_file(path)
    return _validate(Config, _Draft(document.data, document.places))


def override_resolved(path: Path, overrides: Sequence[str], check: Check | None = None) -> Config:
    """A run's `config.yaml` with overrides, checked as `compose` checks. Raises UserError."""
    document = yaml_file.load_file(path)
    draft = _Draft(document.data, {(): Place(str(path)), **document.places})
    for text in overrides:
        draft.override(text)
    config, places = _checked(draft)
    return _with_warmup(config, places, check)


def dump_resolved(config: Config) -> str:
    """The whole configuration as YAML, defaults included, so that a run reads the same years later."""
    return yaml_file.dump(config.model_dump(mode="json"))


def find_file(kind: str, name: str) -> Path:
    """The file of a cluster or recipe given by name or path. Raises UserError with the nearest name."""
    folder = ROOT / {"cluster": "clusters", "recipe": "configs"}[kind]
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        if is_file(path):
            return path
        near = did_you_mean(path.name, _beside(path, "*.y*ml"))
        raise UserError(f"{kind}={name}: there is no such file{near}")
    path = folder / f"{name}.yaml"
    if name and is_file(path):
        return path
    near = did_you_mean(name, sorted(p.stem for p in folder.glob("*.yaml")))
    raise UserError(f"{kind}={name}: there is no {folder.name}/{name}.yaml{near}")


def _beside(path: Path, pattern: str) -> list[str]:
    try:
        return sorted(found.name for found in path.parent.glob(pattern))
    except (OSError, ValueError):  # no folder can be called that
        return []


@dataclass
class _Draft:
    """A configuration before it is checked: plain data and where each value was written."""

    data: dict[str, Any]
    places: dict[KeyPath, Place]

    def override(self, text: str) -> None:
        key, equals, value = text.partition("=")
        path = tuple(key.split("."))
        if not equals or not all(path):
            raise UserError(f"command line: {text!r} is not dotted.key=value")
        if len(path) > MAX_DEPTH:
            raise UserError(f"command line: {key}: no key has over {MAX_DEPTH} parts")
        document = yaml_file.parse_value(value)
        section = self.data
        for depth, part in enumerate(path[:-1], start=1):
            if section.get(part) is None:
                section[part] = {}
                self.places[path[:depth]] = Place("command line")
            section = section[part]
            if not isinstance(section, dict):
                raise UserError(f"command line: {key} cannot be set: {dotted(path[:depth])} is not a section")
        section[path[-1]] = document.data
        for old in list(yaml_file.under(self.places, path)):
            del self.places[old]
        self.places.update({(*path, *below): place for below, place in document.places.items()})

    def choose(self, on: Any) -> None:
        """Lay the entry for this draft's cluster in a recipe's `on:` over the recipe's other values."""
        if on is None:
            return
        here = self.places[("on",)]
        if not isinstance(on, dict) or not all(isinstance(entry, dict) for entry in on.values()):
            raise UserError(f"{here}: `on` must map kinds of cluster to sections, such as gb200: {{training: ...}}")
        for kind, entry in on.items():
            for key in ("cluster", "recipe", "on"):
                if key in entry:
                    raise UserError(f"{self.places[('on', kind, key)]}: on.{kind} cannot set `{key}`")
        cluster = self.data.get("cluster") or {}
        kind = str(cluster.get("kind") or cluster.get("name"))
        self._lay(on.get(kind, {}), (), ("on", kind))

    def _lay(self, values: dict[str, Any], path: KeyPath, origin: KeyPath) -> None:
        section: Any = self.data
        for part in path:
            section = section.setdefault(part, {})
        for key, value in values.items():
            if isinstance(value, dict) and isinstance(section.get(key, {}), dict):
                section.setdefault(key, {})
                self._lay(value, (*path, key), (*origin, key))
            else:
                section[key] = value
            for old in list(yaml_file.under(self.places, (*origin, key))):
                self.places[(*path, key, *old[len(origin) + 1 :])] = self.places[old]


def _on(cluster: Cluster) -> _Draft:
    return _Draft({"cluster": cluster.model_dump(mode="json")}, {})


def _with_warmup(config: Config, places: dict[KeyPath, Place], check: Check | None = None) -> Config:
    """`config`, after its warm-up recipe was checked too, and all of it by `check`."""
    try:
        compose_warmup(config)
    except UserError as error:
        raise UserError(f"{places.get(('model', 'warmup'), 'model')}: model.warmup: {error}") from None
    if check is not None:
        try:
            check(config)
        except UserError as error:
            raise UserError(f"{place_of((), str(error), places)}: {error}") from None
    return config


def _finish(draft: _Draft, recipe: str, overrides: Sequence[str]) -> tuple[Config, dict[KeyPath, Place]]:
    file = find_file("recipe", recipe)
    document = yaml_file.load_file(file)
    for key, instead in (("cluster", "a file in clusters/"), ("recipe", "the name of the recipe's file")):
        if key in document.data:
            raise UserError(f"{document.places[(key,)]}: a recipe cannot set `{key}`: that is {instead}")
    on = document.data.pop("on", None)
    draft.data = {"recipe": file.stem, **draft.data, **document.data}
    draft.places = {(): Place(str(file)), **draft.places, **document.places}
    draft.choose(on)
    for text in overrides:
        draft.override(text)
    return _checked(draft)


def _checked(draft: _Draft) -> tuple[Config, dict[KeyPath, Place]]:
    config = _absolute(_validate(Config, draft), Path.cwd())
    _check_files(config, draft.places)
    return config, draft.places


def _validate(schema: type[S], draft: _Draft) -> S:
    """Check without coercion; only a text field turns what looked like a number back into the text that was written."""
    try:
        return _strict(schema, draft.data)
    except ValidationError as error:
        first = error
    for item in first.errors(include_url=False, include_context=False):
        if item["type"] in ("string_type", "path_type"):
            _restore_text(draft, real_path(item["loc"], draft.data))
    try:
        return _strict(schema, draft.data)
    except ValidationError as error:
        raise UserError(explain(error, schema, draft.data, draft.places)) from None


def _strict(schema: type[S], data: Any) -> S:
    # As JSON, because strict checking of Python objects would want a Path where YAML has text.
    return schema.model_validate_json(json.dumps(data), strict=True)


def _restore_text(draft: _Draft, path: KeyPath) -> None:
    place = draft.places.get(path)
    if not path or place is None or place.text is None:
        return
    parent: Any = draft.data
    for part in path[:-1]:
        parent = parent[part]
    if parent[path[-1]] is not None:
        parent[path[-1]] = place.text


def _absolute(section: S, base: Path) -> S:
    """The section with every path in it absolute: roles may start in another folder."""
    changes: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            changes[name] = _absolute(value, base)
        elif isinstance(value, dict) and any(isinstance(one, BaseModel) for one in value.values()):
            changes[name] = {key: _absolute(one, base) for key, one in value.items()}
        elif isinstance(value, Path):
            changes[name] = base / _expanded(value)
    if isinstance(section, Model) and section.warmup is not None and "/" in section.warmup:
        changes["warmup"] = str(base / _expanded(Path(section.warmup)))
    return section.model_copy(update=changes)


def _expanded(path: Path) -> Path:
    """`path` with `~` and the environment's variables, which a shell does not see in a file or within quotes."""
    try:
        text = os.path.expandvars(path.expanduser())
    except RuntimeError as error:  # ~name of nobody
        raise UserError(f"{path}: {error}") from None
    if unknown := re.search(r"\$(\w+|\{\w+\})", text):
        raise UserError(f"{path}: the environment has no variable {unknown[1].strip('{}')}")
    return Path(text)


def _check_files(config: Config, places: dict[KeyPath, Place]) -> None:
    for name in ("path", "eval_path"):
        path: Path | None = getattr(config.data, name)
        if path is not None and not is_file(path):
            near = did_you_mean(path.name, _beside(path, "*.json*"))
            near = near if "did you mean" in near else ""
            raise UserError(f"{places.get(('data', name), 'data')}: data.{name}: there is no file {path}{near}")
    model = {"model.path": config.model.path} if config.model.path is not None else {}
    for key, folder in (model | config.algorithm.folders).items():
        if not is_folder(folder):
            raise UserError(f"{places.get(tuple(key.split('.')), key)}: {key}: there is no folder {folder}")
        _check_kind(folder / "config.json", key)


def _check_kind(file: Path, key: str) -> None:
    """Name what a model's config.json is when it is something else, before it is read as JSON."""
    try:
        seems = file_kind(read_regular(file, MAX_CONFIG)[:HEAD])
    except FileNotFoundError:
        return  # its reader says what that means
    except OSError as error:
        raise UserError(f"{key}: cannot read {file}: {error.strerror}") from None
    if seems is not None:
        raise UserError(f"{key}: {file} is {seems}")
