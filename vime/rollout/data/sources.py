"""Where problems come from: a reasoning_gym task, a JSONL file, or a function of the user's."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.config import Data
from vime.config.file_kind import HEAD, file_kind
from vime.config.import_path import load_function, named_arguments
from vime.errors import UserError
from vime.rollout.data.messages import read_messages
from vime.rollout.data.problem import Problem
from vime.rollout.data.user_calls import CallFailed, CallTookTooLong, UserCalls, is_async

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Problems:
    """The problems of a run, each once, the held-out ones apart. No prompt is on both sides."""

    training: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    repeated: int = 0
    """Records left out because another is the same in prompt, answer and all else."""
    also_held_out: int = 0
    """Training records left out because data.eval_path asks the same prompt."""

    @property
    def left_out(self) -> str:
        """What was left out, in words; empty when nothing was."""
        parts = []
        if self.repeated:
            parts.append(f"{self.repeated} records that repeat another whole")
        if self.also_held_out:
            parts.append(f"{self.also_held_out} training records whose prompt is in data.eval_path")
        return " and ".join(parts)


def load_problems(data: Data, seed: int, timeout: float) -> Problems:
    """All problems of `data`. A record that comes twice is kept once; records of one prompt are on one side.

    timeout: seconds that a source of the user's may take. Not to be called from an event loop.
    Raises UserError when a file, task or source is wrong, or when nothing is left for training.
    """
    if data.source == "reasoning_gym":
        found = _reasoning_gym(data, seed)
    elif data.source == "jsonl":
        assert data.path is not None
        found = read_jsonl(data.path, data.prompt_key, data.answer_key)
    else:
        found = _custom(data, seed, timeout)
    unique = _unique(found)
    repeated, also_held_out = len(found) - len(unique), 0
    if data.source == "jsonl" and data.eval_path is not None:
        given = read_jsonl(data.eval_path, data.prompt_key, data.answer_key)
        held_out = _unique(given)
        repeated += len(given) - len(held_out)
        known = {problem.uid for problem in held_out}
        training = [problem for problem in unique if problem.uid not in known]
        also_held_out = len(unique) - len(training)
    else:
        held_out = [problem for problem in unique if problem.held_out(data.held_out)]
        training = [problem for problem in unique if not problem.held_out(data.held_out)]
    if not training:
        prompts = len({problem.uid for problem in unique})
        raise UserError(
            f"data: {len(unique)} different problems of {prompts} prompts, and none is left for training; add some or"
            " lower data.held_out"
        )
    return Problems(tuple(training), tuple(held_out), repeated, also_held_out)


def started_facts(problems: Problems) -> dict[str, int]:
    """What an event says of a run's problems; what was left out is printed too, for the log."""
    if problems.left_out:
        print(f"left out: {problems.left_out}", flush=True)
    return {
        "problems": len(problems.training),
        "held_out": len(problems.held_out),
        "repeated": problems.repeated,
        "also_held_out": problems.also_held_out,
    }


def _unique(problems: list[Problem]) -> list[Problem]:
    return list({problem.identity: problem for problem in reversed(problems)}.values())[::-1]


def _reasoning_gym(data: Data, seed: int) -> list[Problem]:
    import reasoning_gym

    try:
        dataset = reasoning_gym.create_dataset(data.task, size=data.size, seed=seed, **data.task_args)
    except Exception as error:
        raise UserError(f"data.task={data.task} with data.task_args={data.task_args}: {error}") from error
    return [Problem(fill_template(data.template, entry), str(entry["answer"]), dict(entry)) for entry in dataset]


def check_task(data: Data) -> None:
    """Make one problem of the reasoning_gym task. Raises UserError for a wrong task, argument or template."""
    _reasoning_gym(data.model_copy(update={"size": 1}), 0)


def fill_template(template: str, entry: dict[str, Any]) -> str:
    """The prompt's text: `template` with the problem's `question`, `answer` and metadata filled in.

    Raises UserError naming what may stand in it.
    """
    values = {
        "question": entry["question"],
        **{k: v for k, v in entry["metadata"].items() if isinstance(v, str | int | float)},
    }
    try:
        return template.format_map(values)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f"data.template={template!r}: {error!r}; it may name {', '.join(sorted(values))}") from error


def read_jsonl(path: Path, prompt_key: str, answer_key: str, most_bytes: int | None = None) -> list[Problem]:
    """The records of a JSONL file, one JSON object a line in UTF-8. Blank lines, CRLF and a byte-order mark are fine.

    With `most_bytes` only the whole lines among so many first bytes are read.
    Raises UserError with file and line for a line that is no JSON object, or has no prompt or no answer under its key.
    """
    try:
        with path.open("rb") as file:
            content = file.read() if most_bytes is None else file.read(most_bytes)
            if most_bytes is not None and file.read(1):
                content = content[: content.rfind(b"\n") + 1]
    except OSError as error:
        raise UserError(f"{path}: {os.strerror(error.errno or 0)}") from error
    content = content.removeprefix(BOM)
    _refuse_other_kinds(path, content[:HEAD])
    # Only \n ends a line here: str.splitlines would also split at U+2028 and its like, which JSON allows in a string.
    problems = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            problems.append(_record(line, f"{path}:{number}", prompt_key, answer_key))
    if not problems:
        raise UserError(f"{path} has no records")
    return problems


def _refuse_other_kinds(path: Path, head: bytes) -> None:
    if not head:
        raise UserError(f"{path} has no records")
    seems = file_kind(head)
    if seems is not None:
        raise UserError(f"{path}:1: the file is {seems}; give JSON Lines in UTF-8: one JSON object a line")
    if head.lstrip().startswith(b"["):
        raise UserError(
            f"{path}:1: the file is a JSON array; give JSON Lines, one object a line, such as"
            f" `jq -c '.[]' {path.name}` makes of it"
        )


def _record(line: bytes, where: str, prompt_key: str, answer_key: str) -> Problem:
    if line.startswith(BOM):
        raise UserError(f"{where}: a byte-order mark in the middle of the file, as joined files have; remove it")
    try:
        record = json.loads(line.decode("utf-8"), object_pairs_hook=_each_key_once, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from error
    except ValueError as error:
        raise UserError(f"{where}: not JSON: {error}") from error
    except RecursionError as error:
        raise UserError(f"{where}: nested too deeply to be read") from error
    return problem_of(record, where, prompt_key, answer_key)


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return record


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no value of JSON")


def problem_of(record: Any, where: str, prompt_key: str, answer_key: str) -> Problem:
    """A record as a Problem; `where` starts the message of the UserError that a wrong one raises."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: a record is a JSON object, this is a {type(record).__name__}")
    for key in (prompt_key, answer_key):
        if key not in record:
            raise UserError(f"{where}: no key {key!r}; the record has {', '.join(map(repr, record)) or 'none'}")
    prompt = record[prompt_key]
    if isinstance(prompt, list):
        prompt = read_messages(prompt, f"{where}: {prompt_key!r}")
    elif not isinstance(prompt, str) or not prompt.strip():
        raise UserError(f"{where}: {prompt_key!r} must be a text or a list of messages, and not empty")
    answer = _reference(record[answer_key], f"{where}: {answer_key!r}")
    try:
        json.dumps([prompt, answer], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: half a character (a lone surrogate such as \\ud83d) cannot be tokenised") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: {prompt_key!r} is not JSON: {error}") from error
    return Problem(prompt, answer, record, where)


def _reference(answer: Any, where: str) -> str:
    """A record's answer as text; a whole number is written without a fraction, as a person writes it."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise UserError(f"{where} must be a text or a number")
    if isinstance(answer, str):
        if not answer.strip():
            raise UserError(f"{where} is {'empty' if not answer else 'blank'}: no response could equal it")
        return answer
    if not math.isfinite(answer):
        raise UserError(f"{where} is {answer}, which is no number that a response could equal")
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() and abs(answer) < 1e16 else str(answer)


def _custom(data: Data, seed: int, timeout: float) -> list[Problem]:
    """`function(data, seed)` gives an iterable of dicts with the prompt and answer keys of `data`."""
    function = load_function(data.source, "data.source")
    offered = {"data": data, "seed": seed}
    given = {name: offered[name] for name in named_arguments(function, offered, data.source, "data.source")}
    records: list[Any] = []
    calls = UserCalls(1)
    try:
        asyncio.run(calls.call(data.source, _collecting(function, records), timeout, "the prompts", None, **given))
    except CallTookTooLong as error:
        raise UserError(
            f"data.source={error} (cluster.startup_timeout); it had given {len(records)} records"
        ) from error
    except CallFailed as error:
        raise UserError(f"data.source={error}, after {len(records)} records") from error
    finally:
        calls.close()
    return [
        problem_of(record, f"data.source={data.source}, record {i}", data.prompt_key, data.answer_key)
        for i, record in enumerate(records)
    ]


def _collecting(function: Callable[..., Any], records: list[Any]) -> Callable[..., Any]:
    """`function`, a generator or not, async or not, as one that puts what it gives into `records`: one after the other,
    and in this process."""

    async def awaited(**given: Any) -> None:
        records.extend(await function(**given))

    async def generated(**given: Any) -> None:
        async for record in function(**given):
            records.append(record)

    async def returned(**given: Any) -> None:
        for record in function(**given):
            records.append(record)

    if is_async(function):
        return awaited
    return generated if inspect.isasyncgenfunction(function) else returned
