"""What the policy writes must do nothing but be scored: every task of reasoning_gym, and responses made to do harm."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from vime.rollout.rewards.rules import chosen_letter, think_format
from vime.rollout.rewards.safe_text import Refused, expression, literal
from vime.rollout.workers.pool import Outcome, Stopped, TookTooLong, Workers
from vime.rollout.workers.sandbox import filter_code
from vime.rollout.workers.worker import Raised

SCORE = "vime.rollout.rewards.task:score"
EVALUATING = (
    "n_queens", "string_insertion", "spiral_matrix", "binary_matrix", "countdown", "puzzle24", "simple_integration",
    "intermediate_integration", "polynomial_multiplication",
)  # fmt: skip
SLOW_TO_MAKE = ("knight_swap", "futoshiki", "arc_agi", "rearc", "zebra_puzzles", "sudoku", "intermediate_integration")
"""Making one of their problems takes seconds; all but the last evaluate nothing."""
TASKS = sorted({*DATASETS} - {"composite", *SLOW_TO_MAKE} | {"intermediate_integration"})


def hostile(mark: Path) -> list[str]:
    """Code in the ways that evaluators fall for, towers, and what is huge, deep, empty or odd."""
    return [
        f"__import__('os').system('touch {mark}')",
        f"[__import__('pathlib').Path('{mark}').touch()]",
        f"open('{mark}', 'w').close() or 24",
        f"(lambda: __import__('os').mkdir('{mark}'))()",
        f"().__class__.__base__.__subclasses__()[0]('{mark}')",
        f"x.func(Symbol('y'), exec(\"open('{mark}','w')\"))",
        f'sympify(\'__import__("os").system("touch {mark}")\')',
        f'f\'{{__import__("os").system("touch {mark}")}}\'',
        "9**9**9**9",
        "(1<<10**9)",
        "'a'*10**12",
        "factorial(10**9)",
        "99999999999!",
        "[" * 3000 + "]" * 3000,
        "9" * 100_000,
        "",
        "None",
        "\x00\ud83d\u202e\u0661\u00b2",
        '{"a": {"b": [1, {"c": null}]}}',
        "1e400, -inf, nan",
    ]


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, Outcome]]]:
    """Every hostile response to a problem of every task, by a pool in which each has a second."""
    mark = tmp_path_factory.mktemp("mark") / "done"
    # A lone surrogate cannot be encoded, and no decoder gives one.
    responses = [text.replace("\ud83d", "\U0001f600") for text in hostile(mark)]

    async def all_of_them() -> dict[str, list[tuple[str, Outcome]]]:
        workers = Workers(2, sandboxed=True)
        workers.prepare.append(("vime.rollout.rewards.task:prepare", {"task": "countdown", "task_args": "{}"}))
        found = {}
        try:
            for task in TASKS:
                entry = dict(reasoning_gym.create_dataset(task, size=1, seed=3)[0])
                shared = {"record": entry, "task": task, "task_args": "{}"}
                own = [str(entry["answer"])]
                items = [{"response": text} for text in responses + own]
                outcomes = await workers.map(SCORE, shared, items, 10)
                found[task] = list(zip([*responses, "own answer"], outcomes, strict=True))
        finally:
            workers.close()
        return found

    found = asyncio.run(all_of_them())
    assert not mark.exists()
    return found


@pytest.mark.slow
def test_hostile_responses_get_a_number_and_do_nothing(scored: dict[str, list[tuple[str, Outcome]]]) -> None:
    assert len(scored) > 95
    for task, outcomes in scored.items():
        for text, (value, failed) in outcomes:
            assert not isinstance(failed, Raised), (task, text[:60], failed)
            assert isinstance(failed, Stopped) or 0 <= value <= 1, (task, text[:60], value)
            if text != "own answer" and "__import__" in text and task in EVALUATING:
                assert (failed, value) == (None, 0.0), (task, text)


@pytest.mark.slow
def test_the_tasks_own_answers_score_as_before(scored: dict[str, list[tuple[str, Outcome]]]) -> None:
    for task, outcomes in scored.items():
        dataset = reasoning_gym.create_dataset(task, size=1, seed=3)
        own = dataset.score_answer(str(dataset[0]["answer"]).strip(), dataset[0])
        assert outcomes[-1][1][0] == pytest.approx(own), task


@pytest.mark.parametrize("text", [
    "[[1, 2], [3, 4]]", "['A', 'B']", "(1, 2)", "[]", "-3", "1.5", "{'a': [1]}", "None", "3 + 4 * 2", "2**10",
])  # fmt: skip
def test_plain_literals_are_evaluated(text: str) -> None:
    assert literal(text) == eval(text)  # noqa: S307 - the texts are these


@pytest.mark.parametrize("text", [
    "a.b", "f(1)", "[x for x in y]", "lambda: 0", "'a' * 10**9", "[0] * 10**9", "9**9**9", "1 << 10**6", "f'{1}'",
    "'a' + 'b'", "(1, 2)[0]", "1 if 2 else 3", "[*[1]]", "(a := 3)", "'%s' % 1", "[" * 500 + "]" * 500,
])  # fmt: skip
def test_what_is_no_literal_is_refused(text: str) -> None:
    with pytest.raises((Refused, SyntaxError)):
        literal(text)


@pytest.mark.parametrize("text", [
    "x**2/2 + C", "exp(x)*sin(2*x)", "-3*log(x) + sqrt(x)", "(3+4)*25", "100/4 - 1", "x**100", "asin(x/2)",
    "3*Integral(x**3*cos(3*x), x) + C",
])  # fmt: skip
def test_expressions_are_parsed(text: str) -> None:
    assert expression(text) == text


@pytest.mark.parametrize("text", [
    "x.diff()", "open('a')", "__import__('os')", "_x", "x__y", "eval('1')", "S('1')", "sympify(1)", "'a'", "9**9**9**9",
    "2**99999999", "lambda: x", "x[0]", "exp(x, evaluate=f(1))", "sin(*x)", "x if y else z", "{x}", "f'{x}'", "x @ y",
    "x" * 30_000, "(" * 2000 + "x" + ")" * 2000, "1" * 5000,
])  # fmt: skip
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises((Refused, SyntaxError)):
        expression(text)


def test_the_sandbox_lets_nothing_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What code does that got past the checks: with namespaces or, where a site has none, by the filter alone."""
    monkeypatch.setenv("VIME_RUN_TOKEN", "secret-token")
    mark = tmp_path / "done"
    attempts = [
        f"open({str(mark)!r}, 'w')", f"os.mkdir({str(mark)!r})", f"os.mknod({str(mark)!r})", "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {})", "socket.socket()", "socket.socketpair()",
        "os.kill(os.getppid(), 9)",
        f"os.symlink('/', {str(mark)!r})", "os.memfd_create('a')", "os.unlink('/etc/hostname')", "bytearray(8 << 30)",
        "open('/proc/1/environ').read()", "os.execv('/bin/true', ['true'])", "os.chmod('.', 0)",
    ]  # fmt: skip

    async def run() -> None:
        workers = Workers(1, sandboxed=True)
        items = [{"code": code} for code in [*attempts, "dict(os.environ)"]]
        outcomes = await workers.map("tests.rollout.rewards.functions:runs", {}, items, 20)
        workers.close()
        for code, (value, failed) in zip(attempts, outcomes, strict=False):
            assert failed is not None, (code, value)
            if not isinstance(failed, Stopped):
                assert failed.type in ("PermissionError", "OSError", "MemoryError", "FileNotFoundError"), (code, failed)
        seen, failed = outcomes[-1]
        assert failed is None
        assert "secret-token" not in seen

    asyncio.run(run())
    assert not mark.exists()


def test_the_filter_is_written_for_both_architectures() -> None:
    """Every jump stays inside, and the last instruction allows."""
    for architecture, column in ((0xC000003E, 0), (0xC00000B7, 1)):
        code = filter_code(architecture, column)
        instructions = [code[at : at + 8] for at in range(0, len(code), 8)]
        assert len(code) % 8 == 0
        assert len(instructions) < 4096
        for place, one in enumerate(instructions):
            assert place + 1 + max(one[2], one[3]) < len(instructions) or one[0] == 0x06


def test_a_call_that_hangs_costs_no_other_call() -> None:
    async def run() -> tuple[list[Outcome], list[Outcome]]:
        workers = Workers(2, sandboxed=True)
        name, others = "tests.rollout.rewards.functions:backtracks_on", [{"response": "b"}] * 8
        try:
            return await asyncio.gather(
                workers.map(name, {}, [{"response": text} for text in "bbabb"], 0.5), workers.map(name, {}, others, 30)
            )
        finally:
            workers.close()

    hung, others = asyncio.run(run())
    assert [type(failed) for _, failed in hung] == [type(None)] * 2 + [TookTooLong] + [type(None)] * 2
    assert [value for value, _ in others] == [1.0] * 8


@pytest.mark.parametrize(
    "piece", ["answer is ", "<think>", "</think>", r"\boxed{", "(", "A", "B is ", " \n", "{", "A, "]
)
def test_rules_take_no_longer_than_the_text_is_long(piece: str) -> None:
    text = piece * (200_000 // len(piece))
    for response in (text, f"<think>{text}</think>{text}", f"answer{text}"):
        chosen_letter(response)
        think_format(response)
