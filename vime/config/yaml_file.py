"""YAML with version 1.2's core types, and with the place of every key.

PyYAML reads version 1.1, where `on` is true, `12:00:00` is 43200, `1e-6` is text and `017` is 15. Here a plain scalar
means what a person means, the same in a file and on the command line, and its text is kept so that a field's type can
decide: a text field given `007` gets `007`. Only maps, lists and scalars exist; a tag can construct nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vime.config.file_kind import read_regular
from vime.errors import UserError

KeyPath = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_BREAK = re.compile("[\\r\\n\\x85\\u2028\\u2029\\ufeff]")
# Core schema, https://yaml.org/spec/1.2.2/#103-core-schema: tag, pattern, first characters of what can match.
_CORE: tuple[tuple[str, str, str], ...] = (
    ("null", r"(?:~|null|Null|NULL|)$", "~nN\0"),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    (
        "float",
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+.0123456789",
    ),
)


def _core_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for name, pattern, first in _CORE:
        for character in first:
            table.setdefault("" if character == "\0" else character, []).append((_TAG + name, re.compile(pattern)))
    return table


MAX_TEXT = 256 << 10
"""Characters of a file or value; PyYAML takes about a second for a million."""
MAX_DEPTH = 64
MAX_NODES = 20_000
"""Values of one document, each counted as often as an alias repeats it."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _core_resolvers()
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """As PyYAML's, which would recurse as deep as the text says."""
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=self.peek_event().start_mark)
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        """As PyYAML's, whose scanner looks far ahead and takes seconds for thousands of open brackets."""
        if self.flow_level > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=self.get_mark())
        super().fetch_flow_collection_start(token)


_TOO_DEEP = f"nested too deeply, more than {MAX_DEPTH} times"


class _Dumper(yaml.SafeDumper):
    # The same table, so that text which would read as a number or null is quoted.
    yaml_implicit_resolvers = _core_resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML's other styles fold the rarer line breaks (a bare return, U+0085, U+2028) into spaces.
        return self.represent_scalar(_TAG + "str", data, style='"' if _BREAK.search(data) else None)


_Dumper.add_representer(str, _Dumper.represent_str)


@dataclass(frozen=True)
class Place:
    """Where a value was written, and how."""

    source: str
    """A file, or "command line"."""
    line: int | None = None
    """Line in the file, from 1."""
    text: str | None = None
    """The scalar as written when it was plain; None for quoted scalars, lists and maps."""

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Document:
    """Plain data (dict, list, str, int, float, bool, None) and the place of each value in it."""

    data: Any
    places: dict[KeyPath, Place] = field(default_factory=dict)


def load_file(path: Path) -> Document:
    """Read one YAML file that holds a map; an empty file is an empty map.

    Raises UserError with file and line for what is not YAML, a repeated key, a tag, or a document that is not a map.
    """
    try:
        text = read_regular(path, 4 * MAX_TEXT).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from None
    shown = str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
    document = _parse(text, lambda line: Place(shown, line))
    if document.data is None:
        return Document({}, document.places)
    if not isinstance(document.data, dict):
        raise UserError(f"{path} must hold `key: value` lines, not a {_kind(document.data)}")
    return document


def parse_value(text: str, source: str = "command line") -> Document:
    """Read a value written on a command line with the rules of a file. Raises UserError for what is not YAML."""
    return _parse(text, lambda _line: Place(source))


def dump(data: Any) -> str:
    """Write plain data so that `load_file` reads back exactly it: block style, keys in the given order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False)


def _kind(value: Any) -> str:
    return "list" if isinstance(value, list) else "single value"


def _parse(text: str, place_at: Callable[[int], Place]) -> Document:
    if len(text) > MAX_TEXT:
        raise UserError(f"{place_at(1)}: {len(text):,} characters are too many: at most {MAX_TEXT:,} are read")
    try:
        node = yaml.compose(text, Loader=_Loader)
        places: dict[KeyPath, Place] = {(): place_at(1)}
        data = None if node is None else _Builder(place_at, places).build(node, (), node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = place_at(mark.line + 1 if mark else 1)
        raise UserError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        reason = getattr(error, "reason", "unreadable")
        raise UserError(f"{place_at(1)}: not valid YAML: {reason}") from None
    except RecursionError:
        raise UserError(f"{place_at(1)}: not valid YAML: nested too deeply") from None
    return Document(data, places)


class _Builder:
    """Turns PyYAML's nodes into plain data, noting each value's place."""

    def __init__(self, place_at: Callable[[int], Place], places: dict[KeyPath, Place]) -> None:
        self.place_at = place_at
        self.places = places
        self.count = 0
        self.open: set[int] = set()  # nodes being built: an alias to one of them would never end

    def build(self, node: yaml.Node, path: KeyPath, key: yaml.Node) -> Any:
        line = key.start_mark.line + 1
        self.count += 1
        if self.count > MAX_NODES:
            raise UserError(f"{self.place_at(line)}: more than {MAX_NODES:,} values, with what aliases repeat")
        if len(path) > MAX_DEPTH:
            raise UserError(f"{self.place_at(line)}: not valid YAML: {_TOO_DEEP}")
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        self.places[path] = self.place_at(line)
        if isinstance(node, yaml.ScalarNode):
            if plain:
                here = self.places[path]
                self.places[path] = Place(here.source, here.line, node.value)
            return self._scalar(node, line)
        if id(node) in self.open:
            raise UserError(f"{self.place_at(line)}: an alias that contains itself")
        self.open.add(id(node))
        value = self._map(node, path) if isinstance(node, yaml.MappingNode) else self._list(node, path)
        self.open.discard(id(node))
        return value

    def _scalar(self, node: yaml.ScalarNode, line: int) -> str | int | float | bool | None:
        kind, text = node.tag.removeprefix(_TAG), node.value
        try:
            match kind:
                case "str":
                    return str(text)
                case "null":
                    return None
                case "bool":
                    return {"true": True, "false": False}[text.lower()]
                case "int":
                    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
                    return int(text, base)
                case "float":
                    # `.inf` and `.nan` are the only spellings that Python's float does not take as they are.
                    return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
        except (ValueError, KeyError):
            raise UserError(f"{self.place_at(line)}: {text[:40]!r} is not a YAML {kind}") from None
        raise UserError(f"{self.place_at(line)}: the tag {node.tag} is not allowed in a configuration")

    def _map(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        self._no_tag(node, "map")
        result: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise UserError(f"{self.place_at(line)}: a key must be a word, not a list or a map")
            # The text as written: `on:` and `1:` are the keys "on" and "1".
            key = key_node.value
            if key in first:
                raise UserError(f"{self.place_at(line)}: the key {key!r} is already given on line {first[key]}")
            first[key] = line
            result[key] = self.build(value_node, (*path, key), key_node)
        return result

    def _list(self, node: yaml.Node, path: KeyPath) -> list[Any]:
        self._no_tag(node, "seq")
        return [self.build(item, (*path, index), item) for index, item in enumerate(node.value)]

    def _no_tag(self, node: yaml.Node, expected: str) -> None:
        if node.tag != _TAG + expected:
            where = self.place_at(node.start_mark.line + 1)
            raise UserError(f"{where}: the tag {node.tag} is not allowed in a configuration")


def under(places: dict[KeyPath, Place], path: KeyPath) -> Iterator[KeyPath]:
    """Paths of `places` at or below `path`."""
    return (key for key in places if key[: len(path)] == path)
