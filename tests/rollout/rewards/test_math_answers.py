"""References as data sets of competition mathematics write them, and what responses make of them."""

from __future__ import annotations

import asyncio

import pytest

from vime.rollout.rewards.math_verify import read_as, score
from vime.rollout.workers.pool import Workers

# Ways to write an answer with two numbers a < b in it, and two answers near it.
NOTATIONS = [
    ("{a}", "{b}", "-{a}"),
    (r"\frac{{{a}}}{{{b}}}", r"\frac{{{b}}}{{{a}}}", "{a}"),
    (r"\dfrac{{{a}}}{{{b}}}", r"-\frac{{{a}}}{{{b}}}", "{b}"),
    (r"\sqrt{{{b}}}", "{b}", r"-\sqrt{{{b}}}"),
    (r"{a}\sqrt{{{b}}}", "{a}", r"{b}\sqrt{{{a}}}"),
    (r"{a} - \sqrt{{{b}}}", "{a}", r"{a} + \sqrt{{{b}}}"),
    (r"{a}\pi", r"{b}\pi", "{a}"),
    ("{b}^{{{a}}}", "{b}", "{a}"),
    ("10^{{-{a}}}", "10^{{{a}}}", "10"),
    ("({a}, {b})", "({b}, {a})", "{a}"),
    ("({a}, {b}]", "[{a}, {b})", "{b}"),
    (r"(-\infty, {a})", r"({a}, \infty)", "{a}"),
    (r"\{{{a}, {b}\}}", r"\{{{a}\}}", "{b}"),
    ("{a}+{b}i", "{a}-{b}i", "{a}"),
    ("{b},\\!{a}00", "{b}", "{a}00"),
    (r"{a}.{b}", "{b}.{a}", "{a}"),
    ("x^2 + {a}x - {b}", "x^2 - {a}x + {b}", "{a}"),
    (r"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}", r"\begin{{pmatrix}} {b} \\ {a} \end{{pmatrix}}", "{a}"),
    (r"{a}^\circ", r"{b}^\circ", "-{a}"),
    (r"\$ {a}.50", r"\$ {b}.50", "{a}"),
    (r"{a}\%", r"{b}\%", "-{a}"),
    (r"\frac{{{a}\sqrt{{3}}}}{{{b}}}", r"\frac{{{b}\sqrt{{3}}}}{{{a}}}", r"\sqrt{{3}}"),
    (r"\sqrt[3]{{{b}}}", r"\sqrt{{{b}}}", "{b}"),
    (r"e^{{{a}}}", "e^{{{b}}}", "{a}"),
    (r"\log_{{{a}}} {b}", r"\log_{{{b}}} {a}", "{b}"),
]
PAIRS = [(2, 3), (3, 7), (2, 11), (5, 13), (3, 17), (7, 19), (2, 23), (11, 29)]
SPELLINGS = [
    r"so it is \boxed{{{}}}",
    "The final answer is ${}$.",
    "<answer>{}</answer>",
    r"<think>\boxed{{41}}</think>It is \fbox{{ {} }}.",
    r"\boxed{{1}}? Wait, that is wrong. $\boxed{{{}}}$",
]
CASES = [
    (reference.format(a=a, b=b), [near.format(a=a, b=b) for near in nears])
    for reference, *nears in NOTATIONS
    for a, b in PAIRS
]


def test_each_reference_equals_itself_and_nothing_near_it() -> None:
    """200 references in bare LaTeX; each in five spellings, and five near misses."""

    async def run() -> list[str]:
        workers = Workers(2, sandboxed=True)
        wrong = []
        try:
            for reference, nears in CASES:
                misses = [rf"\boxed{{{miss}}}" for miss in (*nears, f"{reference}+100")]
                responses = [spelling.format(reference) for spelling in SPELLINGS]
                responses += [*misses, "no idea", rf"\boxed{{{reference}}} or rather \boxed{{{nears[0]}}}"]
                items = [{"response": response} for response in responses]
                outcomes = await workers.map("vime.rollout.rewards.math_verify:score", {"answer": reference}, items, 30)
                for response, (value, failed), wanted in zip(responses, outcomes, [1.0] * 5 + [0.0] * 5, strict=True):
                    if failed is not None or value != wanted:
                        wrong.append(f"{reference} / {response}: {value} {failed}")
        finally:
            workers.close()
        return wrong

    assert len(CASES) == 200
    assert asyncio.run(run()) == []


@pytest.mark.parametrize(
    ("reference", "response", "right"),
    [
        (r"1 - \sqrt{2}", r"\boxed{1}", 0),
        (r"3\sqrt{5}", r"\boxed{3}", 0),
        ("2^{10}", r"\boxed{2}", 0),
        ("2^{10}", r"\boxed{1024}", 1),
        (r"1,\!000", r"\boxed{1000}", 1),
        (r"\frac12", r"\boxed{0.5}", 1),
        (r"\pi", "it is $\u03c0$", 1),
        (r"\text{even}", r"\boxed{even}", 1),
        (r"\text{even}", r"\boxed{\text{odd}}", 0),
        ("even", r"\boxed{\textbf{Even}}", 1),
        ("Monday", "The answer is Monday.", 1),
        ("Monday", "not Tuesday but\nMonday", 1),
        ("Monday", "Monday or Tuesday, I do not know", 0),
        ("\u22123", r"\boxed{-3}", 1),
        ("-3", "\\boxed{\u22123}", 1),
        ("-3", r"\boxed{3}", 0),
        ("12", "\\boxed{13}\nWait, that is wrong.\n\\boxed{12}", 1),
        ("12", "\\boxed{12}\nWait, that is wrong.\n\\boxed{13}", 0),
        ("12", r"\fbox{12}", 1),
        ("12", "<answer>12</answer>", 1),
        ("12", r"<think>\boxed{12}</think> I do not know", 0),
        ("2, 3", r"$\boxed{2}$ and $\boxed{3}$", 1),
        ("3", r"$\boxed{2}$ and $\boxed{3}$", 1),
        ("1011_2", r"\boxed{1011_2}", 1),
        ("1011_2", r"\boxed{1011_3}", 0),
        ("5", r"\boxed{9^{9^{9^{9}}}}", 0),
        ("5", r"\boxed{999999999!}", 0),
        ("5", r"\boxed{" * 50_000, 0),
        ("$\\frac{3}{4}$", r"\boxed{\frac{3}{4}}", 1),
        (r"\boxed{7}", "$7$", 1),
        ("7", "", 0),
    ],
)
def test_answers(reference: str, response: str, right: int) -> None:
    assert score(response, reference) == right


def test_how_references_are_read() -> None:
    for reference in (r"\dfrac{3}{4}", r"\frac12", r"\sqrt{3}", r"\pi", "(1,2]", "\u22125", "12", r"$x$"):
        assert read_as(reference) == "formula", reference
    for reference in (r"\text{even}", "Monday", "the blue one"):
        assert read_as(reference) == "text", reference
    for reference in ("", "?", " ", "$ $"):
        assert read_as(reference) == "nothing", reference
    with pytest.raises(ValueError, match="finds no expression in the reference answer '\\?'"):
        score("12", "?")
