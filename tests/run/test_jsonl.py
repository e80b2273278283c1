"""Files that grow, and files whose writer was killed."""

import math
from pathlib import Path

from vime.run.jsonl import Tail, parse_line, read_lines


def test_torn_last_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2}\n{"step":3,"rollout/raw')
    assert list(read_lines(path)) == [{"step": 1}, {"step": 2}]


def test_object_behind_a_torn_line_is_recovered(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2,"rollout/raw{"step":2,"x":{"y":1}}\n')
    assert list(read_lines(path)) == [{"step": 1}, {"step": 2, "x": {"y": 1}}]


def test_lines_that_are_no_objects_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'\n[1]\nnull\n\xff\xfe\n\0\0\0\nword\n{"step":1}\r\n')
    assert list(read_lines(path)) == [{"step": 1}]


def test_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "none")) == []
    assert list(Tail(tmp_path / "none").poll()) == []


def test_nan_is_a_number() -> None:
    record = parse_line(b'{"a": NaN, "b": -Infinity}')
    assert record is not None
    assert math.isnan(record["a"])
    assert record["b"] == -math.inf


def test_tail_gives_each_line_once_and_waits_for_the_rest_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = Tail(path)
    with path.open("ab", buffering=0) as file:
        file.write(b'{"step":1}\n{"st')
        assert list(tail.poll()) == [{"step": 1}]
        assert list(tail.poll()) == []
        file.write(b'ep":2')
        assert list(tail.poll()) == []
        file.write(b'}\n{"step":3}\n')
        assert list(tail.poll()) == [{"step": 2}, {"step": 3}]
    assert tail.offset == path.stat().st_size


def test_tail_starts_over_when_the_file_was_replaced_by_a_shorter_one(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2}\n{"step')
    tail = Tail(path)
    assert len(list(tail.poll())) == 2
    path.write_bytes(b'{"step":9}\n')
    assert list(tail.poll()) == [{"step": 9}]
