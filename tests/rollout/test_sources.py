from pathlib import Path

import pytest

from vime.config import Data
from vime.errors import UserError
from vime.rollout.problem import Problem
from vime.rollout.sources import load_problems, read_jsonl

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


def test_held_out_questions_are_never_trained_on_whatever_the_seed() -> None:
    data = Data(task_args={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, size=400, held_out=0.2)
    one, other = load_problems(data, 1), load_problems(data, 2)
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
    problems = load_problems(Data(source="jsonl", path=train, eval_path=evaluation, reward="exact"), 0)
    assert [p.prompt for p in problems.held_out] == ["q3", "new"]
    assert [p.prompt for p in problems.training] == [f"q{i}" for i in range(10) if i != 3]


def made_here(data: Data, seed: int) -> list[dict[str, str]]:
    return [{"prompt": f"{seed} {i}", "answer": str(i)} for i in range(20)]


def test_a_source_of_the_users() -> None:
    problems = load_problems(Data(source="tests.rollout.test_sources:made_here", reward="exact"), 7)
    assert len(problems.training) + len(problems.held_out) == 20
    with pytest.raises(UserError, match="has no nothing"):
        load_problems(Data(source="tests.rollout.test_sources:nothing", reward="exact"), 7)


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
        load_problems(Data.model_validate(data), 0)


def test_a_bound_reads_whole_lines_only(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n{"nonsense')
    assert [p.prompt for p in read_jsonl(file, "prompt", "answer", most_bytes=65)] == ["a", "b"]
    assert [p.prompt for p in read_jsonl(file, "prompt", "answer", most_bytes=50)] == ["a"]
    with pytest.raises(UserError, match=":3: not JSON"):
        read_jsonl(file, "prompt", "answer", most_bytes=100)
