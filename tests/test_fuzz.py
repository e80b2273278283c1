"""Generated input of every kind: it is taken as it means, or refused in one line; never a traceback, never for long.

Seeded, so that a failure comes again; it names its number.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from tests.report.run_maker import make_completed, make_failed
from vime.config import Config
from vime.config.compose import ROOT, compose, dump_resolved, load_resolved
from vime.config.explain import all_fields
from vime.errors import UserError
from vime.plan.plan import make_plan
from vime.report.progress import Watch
from vime.report.render import render
from vime.report.summary import summarize
from vime.rollout.data.sources import read_jsonl

LONGEST = 2.0
"""Seconds of a processor that any one input may take."""
KEYS = [".".join(map(str, path)) for path in all_fields(Config)]
SCALARS = (
    "1 0 -1 2 7 1.5 1e-6 1e400 -0 .nan .inf null true off yes ~ x '' \"\" 12:00:00 3-00:00 banana node[01-04] a:b"
    " os:system ../.. /dev/zero /proc/self/mem ~nobody $NOTHING 0.0.0.0 :: http:// http://h:99999 http://[ qwen3"
    " ppo sft gae jsonl"
).split(" ")
NASTY = (
    "\x00", "\x1b[31mred", "a\x00b", "\ud800", "\udcff", "\u2028", "é😀", " ", "\t", "\r\n", "9" * 5000, "x" * 300,
    "x" * 100_000, "[" * 3000, "{a: " * 500, "[1, [2, {a: b}]]", "{}", "[]", "{a: 1, a: 2}", "!!python/object:os.f x",
    "&a [*a]", "*b", "- 1", "a: b: c", "'", "{", "%", "@", "`", "|", "> \n x", "1_000", "0x1F", "0o17", "1e-320",
    "/" + "d/" * 3000, "n" * 256,
)  # fmt: skip


def a_value(draw: random.Random) -> str:
    return draw.choice(draw.choice((SCALARS, NASTY)))


def a_key(draw: random.Random) -> str:
    key = draw.choice(KEYS)
    match draw.randrange(8):
        case 0:
            return key[: draw.randrange(len(key) + 1)]
        case 1:
            return key + draw.choice(("", ".", ".x", ".0", "s", "\x1b", ".a" * 70, "x" * 300))
        case 2:
            return draw.choice(
                ("", ".", "..", "=", "cluster", "x" * 300, "\x00", "model.tiny", "model", "on.local.training")
            )
    return key


@contextmanager
def in_order(what: str) -> Iterator[None]:
    """Nothing but a UserError of one printable line, and soon."""
    begun = time.process_time()
    try:
        yield
    except UserError as error:
        text = str(error)
        assert text, what
        assert text.isprintable() or not set(text) & set("\n\r\x00\x1b"), what
        assert len(text) < 2100, what
    except Exception as error:
        error.add_note(f"on {what}")
        raise
    taken = time.process_time() - begun
    assert taken < LONGEST, f"{what} took {taken:.1f} s"


def right(config: Config, folder: Path) -> None:
    """What is accepted is planned, and reads back as what it is."""
    make_plan(config)
    file = folder / "resolved.yaml"
    file.write_text(dump_resolved(config), encoding="utf-8")
    assert load_resolved(file) == config


def test_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(1)
    for number in range(350):
        overrides = [f"{a_key(draw)}={a_value(draw)}" for _ in range(draw.choice((1, 1, 1, 2, 4)))]
        with in_order(f"overrides {number}: {overrides!r:.300}"):
            right(compose("local", "tiny_grpo", ["model.warmup=null", *overrides]), tmp_path)
    for number in range(50):
        cluster, recipe = (draw.choice((a_value(draw), name)) for name in ("local", "tiny_grpo"))
        with in_order(f"names {number}: {cluster!r:.100} {recipe!r:.100}"):
            right(compose(cluster, recipe), tmp_path)


def changed(content: bytes, draw: random.Random) -> bytes:
    """`content` with one to three faults, as editors, copies and people make them."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        at, to = sorted(draw.randrange(len(content) + 1) for _ in range(2))
        match draw.randrange(8):
            case 0:
                content = content[:at] + draw.randbytes(draw.randrange(1, 9)) + content[at:]
            case 1:
                content = content[:at]
            case 2:
                content = content[:at] + content[min(to, at + 9) :]
            case 3:
                content = content[:to] + content[at:to][:2000] + content[to:]
            case 4:
                value = a_value(draw).encode("utf-8", "surrogatepass")
                content = content[:at] + value + content[at:]
            case 5:
                lines = content.split(b"\n")
                draw.shuffle(lines)
                content = b"\n".join(lines)
            case 6:
                content = content.replace(
                    draw.choice((b":", b" ", b'"', b"\n", b",")), draw.choice((b"", b"\t", b"\r", b"{")), 2
                )
            case 7:
                words = content.split(b": ")
                words[draw.randrange(len(words))] = a_value(draw).encode("utf-8", "surrogatepass")
                content = b": ".join(words)
    return content


def test_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(2)
    good = [(ROOT / "configs" / f"{name}.yaml").read_bytes() for name in ("tiny_grpo", "qwen3_4b_grpo")]
    good.append(b"model: {tiny: {layers: 2}}\nrollout: {context: 128}\nweights: {backend: gloo}\n")
    for number in range(200):
        file = tmp_path / "recipe.yaml"
        file.write_bytes(changed(draw.choice(good), draw))
        with in_order(f"recipe {number}: {file.read_bytes()!r:.300}"):
            right(compose("local", str(file)), tmp_path)


def test_prompts(tmp_path: Path) -> None:
    draw = random.Random(3)
    records = [
        {"prompt": "1 + 1", "answer": 2},
        {"prompt": [{"role": "user", "content": "a"}], "answer": "b", "extra": {"x": [1, None]}},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "t"}]}], "answer": 1.5},
    ]
    good = "".join(json.dumps(record) + "\n" for record in records).encode()
    for number in range(250):
        file = tmp_path / "prompts.jsonl"
        file.write_bytes(changed(good, draw))
        with in_order(f"prompts {number}: {file.read_bytes()!r:.300}"):
            for problem in read_jsonl(file, "prompt", "answer"):
                assert problem.answer.strip()
                texts = [problem.prompt] if isinstance(problem.prompt, str) else [m["content"] for m in problem.prompt]
                assert all(isinstance(text, str) for text in texts)
                assert any(text.strip() for text in texts)
                assert len(problem.uid) == len(problem.identity) == 16


def test_run_directories(tmp_path: Path) -> None:
    draw = random.Random(4)
    makers: tuple[Callable[..., object], ...] = (make_completed, make_failed)
    runs = [make(tmp_path, name=f"run{i}") for i, make in enumerate(makers)]
    for number in range(150):
        run = draw.choice(runs)
        file = draw.choice((run.status, run.config, run.metrics, run.events))  # type: ignore[attr-defined]
        before = file.read_bytes()
        file.write_bytes(changed(before[-3000:], draw))
        try:
            with in_order(f"run directory {number}: {file.name}: {file.read_bytes()!r:.300}"):
                render(summarize(run), Console(file=(tmp_path / "out").open("w"), width=80))  # type: ignore[arg-type]
                watch = Watch(run)  # type: ignore[arg-type]
                watch.look()
                watch.phase(), watch.numbers(), watch.remaining()
        finally:
            file.write_bytes(before)
