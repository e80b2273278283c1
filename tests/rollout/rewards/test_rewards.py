from __future__ import annotations

import asyncio
import gc
import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.rollout.rewards import functions
from tests.rollout.serving import Handler, serving
from vime.config import Data
from vime.errors import UserError
from vime.rollout.data import user_calls
from vime.rollout.data.problem import Problem
from vime.rollout.data.user_calls import CallFailed, CallTookTooLong, UserCalls
from vime.rollout.rewards.references import check_references
from vime.rollout.rewards.rules import choice, think_format
from vime.rollout.rewards.scorer import Answer, Scorer, Unscored

HERE = "tests.rollout.rewards.functions"
PROBLEM = Problem("q", "7", {"question": "q", "answer": "7", "metadata": {}})


def score(
    reward: str,
    responses: list[str],
    timeout: float = 5.0,
    problem: Problem = PROBLEM,
    workers: int = 1,
    **data: Any,
) -> list[Any]:
    source = "reasoning_gym" if reward == "task" else "jsonl"
    made = Data.model_validate({"source": source, "path": "x.jsonl", "reward": reward, **data})

    async def run() -> list[Any]:
        calls = UserCalls(workers)
        scorer = Scorer(made, timeout, calls)
        try:
            found = await scorer.score(problem, [Answer(response, {"turns": 1}) for response in responses])
            return [str(r) if isinstance(r, Unscored) else r for r in found]
        finally:
            await scorer.close()
            calls.close()

    return asyncio.run(run())


def test_the_tasks_own_scorer() -> None:
    assert score("task", ["7", " 7\n", "8"]) == [1.0, 1.0, pytest.approx(0.01, abs=0.02)]


def test_exact() -> None:
    assert score("exact", ["7", " 7 ", "07"]) == [1.0, 1.0, 0.0]


def test_missing_rewards_of_a_group() -> None:
    """Case 1: [1.0, None], None for all of it, and one that raises."""

    def said(name: str, text: str) -> str:
        return f"data.reward={HERE}:{name} {text}"

    assert score(f"{HERE}:some_missing", ["7", "8"]) == [1.0, said("some_missing", "returned None")]
    assert score(f"{HERE}:all_missing", ["7", "8"]) == [said("all_missing", "returned None")] * 2
    one, other = score(f"{HERE}:raises_for_one", ["ab", ""])
    assert (one, other) == (0.5, said("raises_for_one", "raised ZeroDivisionError: division by zero"))
    assert score(f"{HERE}:not_a_number", ["nan", "text"]) == [
        said("not_a_number", "returned nan"), said("not_a_number", "returned a str, not a number")
    ]  # fmt: skip


def test_a_list_of_the_wrong_length_is_an_error() -> None:
    with pytest.raises(UserError, match="got 2 responses and must return as many"):
        score(f"{HERE}:short_list", ["7", "8"])


def test_dict_rewards_need_a_key() -> None:
    assert score(f"{HERE}:as_dict", ["x"], reward_key="format") == [1.0]
    with pytest.raises(UserError, match=r"without data.reward_key='style'; it has accuracy, format"):
        score(f"{HERE}:as_dict", ["x"], reward_key="style")
    with pytest.raises(UserError, match=r"set data.reward_key"):
        score(f"{HERE}:as_dict", ["x"])


def test_async_functions_and_objects() -> None:
    assert score(f"{HERE}:async_length", ["abc"]) == [6]
    assert score(f"{HERE}:async_object", ["abc"]) == [3]
    assert score(f"{HERE}:with_metadata", ["abc"]) == [4]


@pytest.mark.parametrize("name", ["hangs", "async_hangs", "async_blocks"])
def test_a_hanging_function_is_cut_off(name: str) -> None:
    """One that blocks the event loop of the user's functions takes with it what runs there, and nothing else."""
    begun = time.monotonic()
    assert score(f"{HERE}:{name}", ["a", "b"], timeout=0.2) == [f"data.reward={HERE}:{name} took more than 0.2 s"] * 2
    assert time.monotonic() - begun < 8


def test_the_loop_of_async_functions_is_replaced_when_one_blocks_it() -> None:
    async def run() -> float:
        calls = UserCalls(1)
        with pytest.raises(CallFailed):
            await calls.call("b", functions.async_blocks, 0.1, "it", response="")
        try:
            return float(await calls.call("l", functions.async_length, 5, "it", response="ab", record={}))
        finally:
            calls.close()

    assert asyncio.run(run()) == 2.0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("times_out", "TimeoutError: my own"),
        ("exits", "SystemExit: 3"),
        ("stops", "StopIteration: x"),
        ("async_stops", "RuntimeError: coroutine raised StopIteration"),
        ("async_exits", "SystemExit: 4"),
        ("interrupts", "KeyboardInterrupt"),
        ("recurses", "RecursionError"),
    ],
)
def test_whatever_a_function_raises_is_its_own(name: str, text: str) -> None:
    (reason,) = score(f"{HERE}:{name}", ["x"])
    assert reason.startswith(f"data.reward={HERE}:{name} raised {text}")


def test_a_traceback_is_printed_once_for_each_place(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert len(score(f"{HERE}:raises_for_one", [""] * 6)) == 6
    gc.collect()
    printed = capsys.readouterr().err + caplog.text
    assert printed.count("Traceback") == 1
    assert printed.count("division by zero") == 1, "nor does asyncio speak of it"
    assert "ZeroDivisionError" in printed
    assert f"{HERE}:raises_for_one failed on sample" in printed
    assert PROBLEM.uid in printed


def test_workers_are_bounded(tmp_path: Path) -> None:
    noted = tmp_path / "spans"
    problem = Problem("q", "", {"file": str(noted)})
    assert score(f"{HERE}:notes_its_span", ["x"] * 12, problem=problem, workers=2) == [1.0] * 12
    spans = [tuple(map(float, line.split())) for line in noted.read_text().splitlines()]
    assert max(sum(start <= other < end for start, end, _ in spans) for other, _, _ in spans) == 2
    assert len({pid for *_, pid in spans}) == 2


def test_a_call_that_cannot_be_interrupted_is_ended_with_its_worker(capsys: pytest.CaptureFixture[str]) -> None:
    """Chaos 4: a regular expression that holds the interpreter's lock; the generator goes on."""
    (reason,) = score(f"{HERE}:backtracks", ["x"], timeout=0.3)
    assert reason == f"data.reward={HERE}:backtracks took more than 0.3 s"
    assert "on sample 0 of prompt" in capsys.readouterr().err


def test_exiting_fails_the_sample_alone() -> None:
    """Chaos 5."""
    reason = f"data.reward={HERE}:leaves ended its worker process with exit code 0"
    assert score(f"{HERE}:leaves", ["x", "y"]) == [reason] * 2


def test_what_a_reward_starts_ends_with_its_call(tmp_path: Path) -> None:
    """Chaos 19."""
    noted = tmp_path / "pid"
    assert score(f"{HERE}:forks", ["x"], problem=Problem("q", "", {"file": str(noted)})) == [1.0]
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)


def test_workers_do_not_have_the_runs_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIME_RUN_TOKEN", "secret-token")
    assert score(f"{HERE}:sees", ["x"]) == [1.0]


def test_what_cannot_be_sent_fails_the_sample_and_names_the_key() -> None:
    """Chaos 10."""
    problem = Problem("q", "", {"good": 1, "bad": lambda: 0})
    (reason,) = score(f"{HERE}:takes_record", ["x"], problem=problem)
    assert reason.startswith(
        f"data.reward={HERE}:takes_record was not called: record['bad'] cannot be sent to a worker"
    )


def test_an_async_reward_cannot_change_what_the_sample_keeps() -> None:
    """Chaos 10: metadata that JSON cannot hold came from there."""
    metadata = {"turns": 1}
    data = Data.model_validate({"source": "jsonl", "path": "x", "reward": f"{HERE}:async_changes_metadata"})

    async def run() -> None:
        calls = UserCalls(1)
        assert await Scorer(data, 5, calls).score(PROBLEM, [Answer("x", metadata)]) == [1.0]
        calls.close()

    asyncio.run(run())
    assert metadata == {"turns": 1}


def test_too_many_hanging_calls_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_calls, "MAX_ABANDONED", 2)
    monkeypatch.setattr(user_calls, "BLOCKED_SECONDS", 0.02)

    async def all_of_them() -> None:
        calls = UserCalls(1)
        for _ in range(2):
            with pytest.raises(CallTookTooLong):
                await calls.call("m:f", functions.async_blocks, 0.02, "it", response="")
        with pytest.raises(UserError, match=r"m:f: 2 calls hang, each for more than its limit of 0.02 s"):
            await calls.call("m:f", functions.async_blocks, 0.02, "it", response="")

    asyncio.run(all_of_them())


def test_a_function_that_takes_no_response_is_refused() -> None:
    with pytest.raises(UserError, match="takes neither `response` nor `responses`"):
        score(f"{HERE}:takes_nothing", ["x"])
    with pytest.raises(UserError, match="has no nowhere"):
        score(f"{HERE}:nowhere", ["x"])
    with pytest.raises(UserError, match="takes `tokens`, but only answer, metadata"):
        score(f"{HERE}:wants_more", ["x"])


def test_math_verify() -> None:
    """In workers, whose main thread its alarms need; the caller's is asyncio's."""
    half = Problem("q", "$\\frac{1}{2}$")
    assert score("math_verify", ["$0.5$", "so it is \\boxed{\\frac{2}{4}}", "$1$", "no idea"], 60, problem=half) == [
        1,
        1,
        0,
        0,
    ]


def test_a_reference_that_cannot_be_read_is_not_a_wrong_answer() -> None:
    (reason,) = score("math_verify", ["$1$"], 60, problem=Problem("q", "?"))
    assert "finds no expression in the reference answer '?'" in reason


SETTLED = [
    "B", "(B).", "B\n", "**B**", "[B]", '"B"', "B:", "(B) twelve", "B) twelve", "B. twelve", "Reasoning about A.\n\nB",
    "The answer is: B", "**Answer:** B", r"\boxed{(B)}", r"\boxed{\textbf{(B)}}", "Answer: $B$",
    "The answer is B, not option A.", "<think>maybe the answer is A</think>\n**B**", "I think that the answer is (B).",
    "First option A, no: **Answer: B**", r"so \boxed{B}", r"so \boxed{\text{B}} indeed", "B is the answer",
    "(B) is correct.", "Option B", "I choose option (B).", "Final Answer: B", "The correct answer is **B**.",
    "The correct option is B", r"$\boxed{B}$", r"\boxed{B) 12}", r"\boxed{\text{B. } 12}", r"\fbox{B}", "ANSWER: B",
    "answer: (B)", "Answer - B", "The answer is option B", "The answer would be B.", "Answer:\n\n**B**", "My choice: B",
    "the answer must be (B) because A is wrong", r"So, the final answer is $\text{B}$", 'The answer is "B"',
    "Therefore the answer is: **(B) twelve**", r"The answer is $\boxed{\text{(B)}}$", "<answer>B</answer>", "Answer B",
    "The best answer is B", "The answer is choice B.", "The answer is the letter B", "Correct answer: B",
    "It is A. Wait, no. The answer is B.", "The answer is A. No, the answer is B.", r"\boxed{A} no: \boxed{B}",
    "The answer, I think, is B.", "Answer = B", "The answer is _B_", "Thus, B is the correct answer.",
    "**Final Answer**\n\n\\boxed{B}", r"\(\boxed{B}\)", "Answer: B)", "The answer is (B): twelve",
    r"\boxed{B}, not A. Answer: A",
]  # fmt: skip
UNSETTLED = [
    "", "The answer is a matter of taste", "Both A and B hold", "the answer is Bananas", "The answer is A or B",
    "Answer: A, B, C, D", "(A) ten\n(B) twelve", "I am unsure", "The answer is not B", "Answer: A/B", r"\boxed{A, B}",
    "A lot of text.", "The answer is I think unknown", "<think>The answer is B</think>",
]  # fmt: skip


@pytest.mark.parametrize(
    ("responses", "letter"),
    [(SETTLED, "B"), (UNSETTLED, None), (["so \\boxed{C}", "(D)"], None)],
    ids=["B", "none", "other"],
)
def test_choice(responses: list[str], letter: str | None) -> None:
    for response in responses:
        assert choice(response, "B") == (letter == "B"), response
        assert choice(response, r" $\text{(B)}$ ") == (letter == "B"), response
    with pytest.raises(ValueError, match="is not one letter"):
        choice("B", "42")


def test_format() -> None:
    assert think_format("<think>\nwell\n</think>\n\n4") == 1.0
    for other in ("4", "<think>well</think>", "x <think>well</think> 4", "<think>a<think>b</think> 4", "<think>4"):
        assert think_format(other) == 0.0
    assert score("format", ["<think>a</think> b", "b"]) == [1.0, 0.0]
    assert score("choice", ["B"], problem=Problem("q", "B")) == [1.0]
    assert "is not one letter" in score("choice", ["B"])[0]


def serve(handler: Handler, **more: Any) -> list[Any]:
    """Scores two responses by a server of the user's."""

    async def run() -> list[Any]:
        async with serving({"/score": handler}) as url:
            return await asyncio.to_thread(score, "remote", ["a", "bc"], reward_url=f"{url}/score", **more)

    return asyncio.run(run())


def test_a_remote_reward() -> None:
    seen: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response({"quality": len(seen[-1]["response"]), "other": 0})

    assert serve(handler, reward_key="quality") == [1.0, 2.0]
    assert {body["response"] for body in seen} == {"a", "bc"}
    assert seen[0] | {"response": ""} == {
        "prompt": "q", "answer": "7", "record": PROBLEM.record, "response": "", "metadata": {"turns": 1}
    }  # fmt: skip


def test_a_remote_reward_is_asked_again_within_bounds() -> None:
    asked: dict[str, int] = {}

    async def handler(request: web.Request) -> web.Response:
        response = (await request.json())["response"]
        asked[response] = asked.get(response, 0) + 1
        if response == "bc" or asked[response] < 3:
            return web.Response(status=503, text="overloaded")
        return web.json_response(0.25)

    first, second = serve(handler)
    assert first == 0.25
    assert "failed 3 times, at last: status 503: overloaded" in second
    assert asked == {"a": 3, "bc": 3}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (web.Response(status=422, text="no such field"), "answered status 422: no such field"),
        (web.Response(text="{nonsense"), "the answer is not JSON"),
        (web.Response(text="null"), "returned None"),
        (web.Response(text="[1]"), "returned a list, not a number"),
        (web.Response(text=json.dumps("9" * 5000)), "returned inf"),
    ],
)
def test_a_remote_answer_that_is_no_reward(answer: web.Response, text: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=answer.status, body=answer.body)

    assert all(text in reason for reason in serve(handler))


def test_a_remote_reward_goes_to_no_other_host() -> None:
    """Chaos 12."""
    seen: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        seen.append(await request.text())
        return web.json_response(1)

    async def run() -> list[Any]:
        async with serving({"/": elsewhere}) as other:

            async def handler(request: web.Request) -> web.Response:
                return web.Response(status=307, headers={"Location": f"{other}/"})

            return await asyncio.to_thread(serve, handler)

    assert all("prompts and answers go to no other host" in reason for reason in asyncio.run(run()))
    assert seen == []


def test_a_remote_reward_follows_its_own_host() -> None:
    async def run() -> list[Any]:
        async def moved(request: web.Request) -> web.Response:
            return web.Response(status=307, headers={"Location": "/score/"})

        async def handler(request: web.Request) -> web.Response:
            return web.json_response(0.5)

        async with serving({"/score": moved, "/score/": handler}) as url:
            return await asyncio.to_thread(score, "remote", ["a"], reward_url=f"{url}/score")

    assert asyncio.run(run()) == [0.5]


@pytest.mark.parametrize("packed", [True, False])
def test_a_remote_answer_is_read_within_bounds(packed: bool) -> None:
    """Chaos 12: 800 MB in a gzip bomb; and one that is as long as it looks."""
    bomb = gzip.compress(b"1" * (4 << 20))

    async def handler(request: web.Request) -> web.Response:
        return (
            web.Response(body=bomb, headers={"Content-Encoding": "gzip"})
            if packed
            else web.Response(text="1" * (2 << 20))
        )

    text = "packed with gzip" if packed else "longer than 1048576 bytes"
    assert all(text in reason for reason in serve(handler))


def test_a_remote_server_that_hangs_or_is_not_there() -> None:
    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(3)
        return web.json_response(1)

    assert all("it took more than rollout.reward_timeout=0.3 s" in reason for reason in serve(handler, timeout=0.3))
    (reason,) = score("remote", ["a"], reward_url="http://127.0.0.1:9/score")
    assert "failed 3 times, at last: ClientConnectorError" in reason


def test_malformed_responses_are_wrong_and_not_unscored() -> None:
    """prime_factorization, boxnet and game_of_life raise on them."""
    import reasoning_gym

    malformed = ["", "abc", "[1,", "None", "[1, 2, 3]", "{}", "12", "\u00b2"]
    for task in ("prime_factorization", "boxnet", "game_of_life"):
        entry = dict(reasoning_gym.create_dataset(task, size=1, seed=1)[0])
        rewards = score("task", malformed, problem=Problem("q", "", entry), task=task)
        assert all(isinstance(reward, float) and reward < 0.1 for reward in rewards), (task, rewards)


@pytest.mark.parametrize("answers", [["12", "?", r"\frac12", " "], ["?", ""]])
def test_references_that_cannot_be_read_are_named_at_the_start(
    answers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    problems = [Problem(f"q{i}", answer, {}, f"a.jsonl:{i + 1}") for i, answer in enumerate(answers)]
    data = Data.model_validate({"source": "jsonl", "path": "x", "reward": "math_verify"})
    events: list[dict[str, Any]] = []

    async def run() -> None:
        calls = UserCalls(1)
        try:
            await check_references(data, problems, calls, lambda event, **given: events.append(given), "data")
        finally:
            calls.close()

    if "12" not in answers:
        with pytest.raises(UserError, match=r"cannot read 2 of 2 reference answers: a.jsonl:1 \('\?'\), a.jsonl:2"):
            asyncio.run(run())
        return
    asyncio.run(run())
    assert events == [
        {"dataset": "data", "unread": 2, "references": 4, "shown": ["a.jsonl:2 ('?')", "a.jsonl:4 (' ')"]}
    ]
    assert "cannot read 2 of 4 reference answers" in capsys.readouterr().err
