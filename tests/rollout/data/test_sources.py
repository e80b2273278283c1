import asyncio
import gzip
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from vime.config import Data
from vime.errors import UserError
from vime.rollout.data.problem import Problem
from vime.rollout.data.sources import Problems, load_problems, read_jsonl

HERE = "tests.rollout.data.test_sources"
RECORDS = (
    b'\xef\xbb\xbf{"prompt": "caf\xc3\xa9 \xf0\x9f\x98\x80", "answer": "1"}\r\n'
    b'{"prompt": "a\\u2028b \xe2\x80\xa8 c", "answer": 2}\r\n'
    b"\r\n"
    b'{"prompt": [{"role": "user", "content": "hi"}], "answer": "3", "level": 5}\n'
    b"\n"
)


def test_jsonl_is_read_as_a_person_means_it(tmp_path: Path) -> None:
    """Case 27: CRLF, a byte-order mark, empty lines, emoji, U+2028 inside a string, a number as the answer."""
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(RECORDS)
    problems = read_jsonl(file, "prompt", "answer")
    assert [problem.prompt for problem in problems] == [
        "café 😀",
        "a\u2028b \u2028 c",
        [{"role": "user", "content": "hi"}],
    ]
    assert [problem.answer for problem in problems] == ["1", "2", "3"]
    assert problems[2].record["level"] == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "x", "answer": "1"}', "prompts.jsonl:3: no key 'prompt'; the record has 'question', 'answer'"),
        (b'{"prompt": "x"}', "prompts.jsonl:3: no key 'answer'"),
        (b'{"prompt": "", "answer": "1"}', "prompts.jsonl:3: 'prompt' must be a text"),
        (b'{"prompt": ["x"], "answer": "1"}', "prompts.jsonl:3: 'prompt' is a list, but not of messages"),
        (
            b'{"prompt": [{"role": "user"}], "answer": "1"}',
            "prompts.jsonl:3: 'prompt'[0] has no content; only an assistant's call of tools may have none",
        ),
        (
            b'{"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "answer": "1"}',
            "prompts.jsonl:3: 'prompt'[0].content[0] is a part of type 'image_url'; only text is supported",
        ),
        (
            b'{"prompt": [{"role": "user", "content": [{"text": "a"}, {"type": "image"}]}], "answer": 1}',
            "prompts.jsonl:3: 'prompt'[0].content[1] is a part of type 'image'",
        ),
        (
            b'{"prompt": [{"role": "user", "content": 7}], "answer": "1"}',
            "prompts.jsonl:3: 'prompt'[0].content is a number; it must be a text",
        ),
        (
            b'{"prompt": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}], "answer": "4"}',
            "prompts.jsonl:3: 'prompt' ends with the assistant's message: the policy is to write it",
        ),
        (b'{"prompt": [], "answer": "1"}', "prompts.jsonl:3: 'prompt' is an empty list"),
        (b'{"prompt": [{"role": "user", "content": " "}], "answer": "1"}', "messages without any text"),
        (b'{"prompt": "  ", "answer": "1"}', "prompts.jsonl:3: 'prompt' must be a text"),
        (b'{"prompt": "x", "answer": ""}', "prompts.jsonl:3: 'answer' is empty"),
        (b'{"prompt": "x", "answer": " \\t"}', "prompts.jsonl:3: 'answer' is blank"),
        (b'{"prompt": "x", "answer": NaN}', "prompts.jsonl:3: not JSON: NaN is no value of JSON"),
        (b'{"prompt": "x", "answer": -Infinity}', "prompts.jsonl:3: not JSON: -Infinity is no value of JSON"),
        (b'{"prompt": "x", "answer": 1e999}', "prompts.jsonl:3: 'answer' is inf"),
        (
            b'{"prompt": "x", "answer": "1", "answer": "2"}',
            "prompts.jsonl:3: not JSON: the key 'answer' is given twice",
        ),
        (b'\xef\xbb\xbf{"prompt": "x", "answer": "1"}', "prompts.jsonl:3: a byte-order mark in the middle of the file"),
        (b'{"prompt": "x", "answer": null}', "prompts.jsonl:3: 'answer' must be a text or a number"),
        (b'{"prompt": "x"', "prompts.jsonl:3: not JSON"),
        (b'["x"]', "prompts.jsonl:3: a record is a JSON object, this is a list"),
        (b'{"prompt": "\xff", "answer": "1"}', "prompts.jsonl:3: not UTF-8"),
        (b'{"prompt": "\\ud83d", "answer": "1"}', "prompts.jsonl:3: half a character"),
        (b'{"prompt": "x", "answer": "\\ud83d"}', "prompts.jsonl:3: half a character"),
        (b'{"prompt": "x", "answer": ' + b"[" * 100_000, "prompts.jsonl:3: nested too deeply"),
    ],
)
def test_a_bad_record_is_refused_with_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "a", "answer": "1"}\r\n\r\n' + line + b"\r\n")
    with pytest.raises(UserError) as error:
        read_jsonl(file, "prompt", "answer")
    assert message in str(error.value)


RECORD = b'{"prompt": "x", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (RECORD.decode().encode("utf-16"), "text in UTF-16"),
        (RECORD.decode().encode("utf-16-le"), "text in UTF-16"),
        (RECORD.decode().encode("utf-16-be"), "text in UTF-16"),
        (gzip.compress(RECORD, mtime=0), "compressed with gzip"),
        (b"PAR1" + bytes(40) + b"PAR1", "a Parquet file"),
        (b'[\n  {"prompt": "x", "answer": "1"}\n]\n', "a JSON array"),
        (b'[{"prompt": "x", "answer": "1"}]', "a JSON array"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n", "a Git LFS pointer"),
        (b"\n<!doctype html><html>", "a web page"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"^{file}:1: the file is {message}"):
        read_jsonl(file, "prompt", "answer")


def test_a_whole_number_is_written_as_a_person_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "x", "answer": {n}}}\n' for n in ("3.0", "-2.50", "1e3", "7", "1e300")))
    assert [p.answer for p in read_jsonl(file, "prompt", "answer")] == ["3", "-2.5", "1000", "7", "1e+300"]


def test_parts_of_text_are_joined_and_a_call_of_tools_needs_no_content(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "4"},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": messages, "answer": "1"}))
    (problem,) = read_jsonl(file, "prompt", "answer")
    assert [message["content"] for message in problem.prompt if isinstance(message, dict)] == ["hi", "", "4"]
    assert problem.record["prompt"] == messages
    assert problem.where == f"{file}:1"


def test_records_of_one_prompt_that_differ_are_all_kept(tmp_path: Path) -> None:
    """A prompt's text alone is not a problem: 650 records once became 101, and nothing said so."""
    train, held_out = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    records = [{"prompt": "Solve the maze.", "answer": "left", "maze_seed": seed} for seed in range(500)]
    records += [{"prompt": "2?", "answer": "4"}, {"prompt": "2?", "answer": "5"}, {"prompt": "2?", "answer": "4"}]
    records += [{"prompt": "held", "answer": "1"}, {"prompt": "held", "answer": "2"}]
    train.write_text("".join(json.dumps(record) + "\n" for record in records))
    held_out.write_text('{"prompt": "held", "answer": "1"}\n' * 2)
    data = Data(source="jsonl", path=train, eval_path=held_out, reward="exact")
    problems = load_problems(data, 0, 5)
    assert (len(problems.training), len(problems.held_out)) == (502, 1)
    assert (problems.repeated, problems.also_held_out) == (2, 2)
    assert problems.left_out == (
        "2 records that repeat another whole and 2 training records whose prompt is in data.eval_path"
    )
    split = load_problems(data.model_copy(update={"eval_path": None, "held_out": 0.5}), 0, 5)
    assert len(split.training) + len(split.held_out) == 504
    assert not {p.uid for p in split.training} & {p.uid for p in split.held_out}


def test_held_out_questions_are_never_trained_on_whatever_the_seed() -> None:
    data = Data(task_args={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, size=400, held_out=0.2)
    one, other = load_problems(data, 1, 5), load_problems(data, 2, 5)
    held_out = {p.uid for p in one.held_out} | {p.uid for p in other.held_out}
    assert held_out
    assert not held_out & ({p.uid for p in one.training} | {p.uid for p in other.training})
    assert len({p.uid for p in one.training}) == len(one.training), "a question that is drawn twice is kept once"
    share = len(one.held_out) / (len(one.held_out) + len(one.training))
    assert 0.1 < share < 0.3


def test_the_identity_of_a_question_does_not_change() -> None:
    """Checkpoints and the held-out split of every earlier run depend on it."""
    assert Problem("1 + 1 =", "2").uid == "1576caf2566635c8"


def test_an_evaluation_file_takes_its_questions_out_of_training(tmp_path: Path) -> None:
    train, evaluation = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    train.write_text("".join(f'{{"prompt": "q{i}", "answer": "{i}"}}\n' for i in range(10)))
    evaluation.write_text('{"prompt": "q3", "answer": "3"}\n{"prompt": "new", "answer": "0"}\n')
    problems = load_problems(Data(source="jsonl", path=train, eval_path=evaluation, reward="exact"), 0, 5)
    assert [p.prompt for p in problems.held_out] == ["q3", "new"]
    assert [p.prompt for p in problems.training] == [f"q{i}" for i in range(10) if i != 3]


def made_here(data: Data, seed: int) -> list[dict[str, str]]:
    return [{"prompt": f"{seed} {i}", "answer": str(i)} for i in range(20)]


def test_a_source_of_the_users() -> None:
    problems = load_problems(Data(source="tests.rollout.data.test_sources:made_here", reward="exact"), 7, 5)
    assert len(problems.training) + len(problems.held_out) == 20
    with pytest.raises(UserError, match="has no nothing"):
        load_problems(Data(source="tests.rollout.data.test_sources:nothing", reward="exact"), 7, 5)


def drawn_from_the_seed(seed: int) -> Iterator[dict[str, str]]:
    yield from made_here(Data(), seed)


async def awaited(seed: int, data: Data) -> list[dict[str, str]]:
    await asyncio.sleep(0)
    return made_here(data, seed)


async def drawn_and_awaited(**given: Any) -> AsyncIterator[dict[str, str]]:
    for record in await awaited(**given):
        yield record


@pytest.mark.parametrize("name", ["drawn_from_the_seed", "awaited", "drawn_and_awaited"])
def test_a_source_may_be_async_and_a_generator_and_names_its_arguments(name: str) -> None:
    def all_of(name: str) -> Problems:
        return load_problems(Data(source=f"{HERE}:{name}", reward="exact"), 7, 5)

    assert all_of(name) == all_of("made_here")


def hangs(data: Data) -> Iterator[dict[str, str]]:
    yield from made_here(data, 0)[:3]
    time.sleep(60)


def computes_for_ever(data: Data) -> Iterator[dict[str, str]]:
    yield from made_here(data, 0)[:3]
    while True:
        pass


async def waits_for_ever(data: Data) -> AsyncIterator[dict[str, str]]:
    for record in made_here(data, 0)[:3]:
        yield record
    await asyncio.sleep(60)


async def blocks(data: Data) -> AsyncIterator[dict[str, str]]:
    for record in made_here(data, 0)[:3]:
        yield record
    time.sleep(60)


@pytest.mark.parametrize("name", ["hangs", "waits_for_ever", "blocks"])
def test_a_source_that_hangs_is_cut_off(name: str) -> None:
    begun = time.monotonic()
    message = rf"^data.source={HERE}:{name} took more than 0.1 s \(cluster.startup_timeout\); it had given 3 records$"
    with pytest.raises(UserError, match=message):
        load_problems(Data(source=f"{HERE}:{name}", reward="exact"), 7, 0.1)
    assert time.monotonic() - begun < 5


def test_a_source_that_computes_for_ever_ends_its_process_with_one_line() -> None:
    """In a process of its own, which its thread would keep busy for ever if it were not let go."""
    code = f"""
import sys
from vime.config import Data
from vime.errors import UserError
from vime.rollout.data.sources import load_problems
try:
    load_problems(Data(source="{HERE}:computes_for_ever", reward="exact"), 7, 0.5)
except UserError as error:
    sys.exit(str(error))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"data.source={HERE}:computes_for_ever took more than 0.5 s")


def breaks(data: Data) -> Iterator[dict[str, str]]:
    yield from made_here(data, 0)[:2]
    raise KeyError("shard 3")


def exits() -> None:
    sys.exit(3)


def without_records() -> None:
    pass


def of_other_arguments(path: str) -> None:
    pass


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("breaks", "raised KeyError: 'shard 3', after 2 records"),
        ("exits", "raised SystemExit: 3, after 0 records"),
        ("without_records", "raised TypeError: 'NoneType' object is not iterable, after 0 records"),
        ("of_other_arguments", "asks for 'path'; there are data, seed"),
    ],
)
def test_an_error_of_a_source_names_it(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=f"^data.source={HERE}:{name} {message}$"):
        load_problems(Data(source=f"{HERE}:{name}", reward="exact"), 7, 5)
    assert ("Traceback" in capsys.readouterr().err) == ("raised" in message)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"task": "no_such_task"}, "no_such_task"),
        ({"task_args": {"nonsense": 1}}, "nonsense"),
        ({"template": "{expresion} ="}, "it may name .*expression"),
    ],
)
def test_a_wrong_task_is_a_users_error(data: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_problems(Data.model_validate(data), 0, 5)


def test_a_bound_reads_whole_lines_only(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n{"nonsense')
    assert [p.prompt for p in read_jsonl(file, "prompt", "answer", most_bytes=65)] == ["a", "b"]
    assert [p.prompt for p in read_jsonl(file, "prompt", "answer", most_bytes=50)] == ["a"]
    with pytest.raises(UserError, match=":3: not JSON"):
        read_jsonl(file, "prompt", "answer", most_bytes=100)
