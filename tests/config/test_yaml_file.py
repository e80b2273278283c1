"""YAML means what a person means, in a file and on the command line."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.config.yaml_file import dump, load_file, parse_value
from vime.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12:00:00", "12:00:00"),  # 43200 in YAML 1.1
        ("3-00:00", "3-00:00"),
        ("4:00", "4:00"),
        ("90", 90),
        ("1e-6", 1e-6),  # text in YAML 1.1
        ("1E5", 1e5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-1.5e+3", -1500.0),
        ("+7", 7),
        ("017", 17),  # 15 in YAML 1.1
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("1,000", "1,000"),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("No", "No"),
        ("true", True),
        ("False", False),
        ("tRue", "tRue"),
        ("null", None),
        ("~", None),
        ("", None),
        ("none", "none"),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("node[001-003,7]", "node[001-003,7]"),
        ("[1, 2]", [1, 2]),
        ("{a: 1, b: [x]}", {"a": 1, "b": ["x"]}),
        ("'007'", "007"),
        ('"1e-6"', "1e-6"),
        ("2026-11-29", "2026-11-29"),  # a date in YAML 1.1
        ("=", "="),
        ("module.part:function", "module.part:function"),
        ("!!str 12", "12"),
    ],
)
def test_a_value_means_the_same_in_a_file_and_on_the_command_line(tmp_path: Path, text: str, value: Any) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"key: {text}\n")
    for found in (parse_value(text).data, load_file(file).data["key"]):
        assert found == value
        assert type(found) is type(value)


def test_not_a_number() -> None:
    assert math.isnan(parse_value(".nan").data)


def test_each_key_has_its_line_and_each_plain_value_its_text(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text('# comment\na:\n  b: 007\n  c: "x"\nd: [1,\n  2]\n')
    document = load_file(file)
    assert document.data == {"a": {"b": 7, "c": "x"}, "d": [1, 2]}
    places = document.places
    assert str(places["a", "b"]) == f"{file}:3"
    assert places["a", "b"].text == "007"
    assert places["a", "c"].text is None
    assert (places["d",].line, places["d", 1].line) == (5, 6)


def test_windows_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes("\ufeffa: 1\r\nb: \U0001f600\r\n".encode())
    assert load_file(file).data == {"a": 1, "b": "\U0001f600"}


def test_an_empty_file_is_an_empty_map(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# nothing yet\n")
    assert load_file(file).data == {}


def test_keys_are_text_as_written() -> None:
    assert parse_value("{on: 1, 1: 2, null: 3}").data == {"on": 1, "1": 2, "null": 3}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", (":3:", "'a'", "line 1")),
        ("a:\n  x: 1\n  x: 1\n", (":3:", "'x'", "line 2")),
        ("a: [1\n", ("not valid YAML",)),
        ("a: 1\n b: 2\n", (":2:", "not valid YAML")),
        ("- 1\n", ("key: value", "list")),
        ("word\n", ("key: value", "single value")),
        ("a: 1\n---\nb: 1\n", ("not valid YAML",)),
        ("x: 1\na: !!python/object/apply:os.getcwd []\n", (":2:", "python/object", "not allowed")),
        ("a: !mine {}\n", (":1:", "!mine", "not allowed")),
        ("a: !!int x\n", (":1:", "'x'", "int")),
        ("a: !!bool yes\n", (":1:", "'yes'", "bool")),
        ("a: &a [*a]\n", (":1:", "contains itself")),
        ("? [1]\n: 2\n", (":1:", "key must be a word")),
        ("a: *b\n", (":1:", "undefined alias")),
        ("a: \x07\n", ("not valid YAML",)),
        ("a: " + "[" * 2000, ("nested too deeply",)),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_its_place(tmp_path: Path, content: str, words: tuple[str, ...]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    with pytest.raises(UserError) as caught:
        load_file(file)
    message = str(caught.value)
    assert "\n" not in message
    for word in ("bad.yaml", *words):
        assert word in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        load_file(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: caf\xe9\n")
    with pytest.raises(UserError, match=r"latin\.yaml is not UTF-8 text: byte 6 is 0xe9"):
        load_file(tmp_path / "latin.yaml")


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.sampled_from(
        ["on", "1e-6", "12:00:00", "017", "null", "~", "", "<<", "=", "0x1", ".inf", "- a", "a: b", "true"]
    )
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(TREES)
def test_what_is_dumped_reads_back_as_it_was(tree: Any) -> None:
    found = parse_value(dump(tree)).data
    assert found == tree
    assert repr(found) == repr(tree)  # 1 and 1.0 and True are equal but not the same


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "more than 20,000 values, with what aliases repeat"),
        ("a: " + "x" * 5_000_000, "(characters are too many|at most 1,048,576 are read)"),
        ("a: " + "{b: " * 2000, "nested too deeply"),
        ("".join(f"{' ' * depth}a:\n" for depth in range(500)), "nested too deeply"),
        ("a: " + "[" * 60_000, "nested too deeply"),
    ],
)
def test_a_hostile_document_is_refused_at_once(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    for read in (lambda: load_file(file), lambda: parse_value(text)):
        begun = time.process_time()
        with pytest.raises(UserError, match=words):
            read()
        assert time.process_time() - begun < 1


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "bad.yaml")
    with pytest.raises(UserError, match=r"cannot read .*bad.yaml: (it is a (pipe|device), not a file|Is a dir)"):
        load_file(tmp_path / "bad.yaml")
