"""What a person sees."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from tests.report.run_maker import make_completed, make_failed, make_run, metrics, start_roles, train
from vime.report.render import print_summary
from vime.report.words import clean, duration, number, size, span
from vime.run.directory import Failure, RunDir, Status


def shown(run: RunDir, width: int = 100, terminal: bool = False, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    print_summary(
        run,
        Console(
            file=file,
            width=width,
            force_terminal=terminal,
            highlight=False,
            color_system="truecolor" if terminal else None,
        ),
    )
    file.flush()
    return raw.getvalue().decode(encoding)


def test_a_completed_run(tmp_path: Path) -> None:
    lines = shown(make_completed(tmp_path)).splitlines()
    assert lines[1] == "tiny_grpo-20261129-194308-1a2b  completed"
    assert lines[2] == "tiny_grpo on local · 2026-11-29 19:43:08 → 19:50:20 UTC (7 min 12 s)"
    assert "steps               60 of 60" in lines
    assert "reward              0.2317 (step 1) → 0.8176 (step 60)" in lines
    assert "logprob difference  2e-07 → 2.6e-07, mean 2.3e-07, max 2.6e-07 (step 60)" in lines
    assert "weight updates      61 of 61 verified, worst mean difference 3e-07" in lines
    assert "  wait              2.40 s  60.0%  ████████████████████████" in lines
    assert "warning" not in "\n".join(lines)


@pytest.mark.parametrize("width", [80, 100])
def test_nothing_wraps_but_the_log_tail_and_no_line_ends_in_blanks(tmp_path: Path, width: int) -> None:
    run = make_completed(tmp_path, name="run")
    path_line = f"exported to         {run.export / 'step_60'}"
    lines = shown(run, width).splitlines()
    labels = [line for line in lines if line.startswith(" " * 20)]
    # Continuation lines: the sparkline, the transfer's pace, and the path where it is longer than a line.
    assert len(labels) <= 2 + len(path_line) // width
    assert all(len(line) <= width and line == line.rstrip() for line in lines)


def test_a_failure_is_whole(tmp_path: Path) -> None:
    run = make_failed(tmp_path)
    text = shown(run, 80)
    assert "engine 0 on node03 was ended by SIGKILL, 2026-11-29T19:44:10.400Z" in text
    assert f"log  {run.log('engine', 0, 1)}\n" in text
    last = "RuntimeError: [enforce fail at alloc_cpu.cpp:118] can't allocate memory: you tried to allocate 1073741824 B"
    assert f"│ {last}\n" in text
    assert "│ ERROR [core.py:991]" in text


def test_exit_code_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    failure = Failure("trainer", 1, "node01", 42, None, "2026-11-29T19:44:10.400Z", "log", [])
    run.write_status(Status("failed", failure=failure))
    assert "trainer 1 on node01 exited with code 42" in shown(run)


def test_colour_only_on_a_terminal(tmp_path: Path) -> None:
    run = make_failed(tmp_path)
    assert "\x1b[" not in shown(run)
    coloured = shown(run, terminal=True)
    assert "\x1b[" in coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in plain.splitlines()] == shown(run).splitlines()


def test_a_log_file_that_holds_ascii_only(tmp_path: Path) -> None:
    run = make_completed(tmp_path)
    failure = Failure("trainer", 1, "node01", 42, None, "2026-11-29T19:44:10.400Z", "log", ["AssertionError: naïve"])
    run.write_status(Status("failed", failure=failure))
    text = shown(run, encoding="ascii")
    assert "| AssertionError: na?ve" in text
    assert "reward              0.2317 (step 1) -> 0.8176 (step 60)" in text
    assert "60.0%  ########################" in text


def test_repeated_steps_warnings_and_lost_contact(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    start_roles(run)
    train(run, 1, 30)
    train(run, 21, 40, attempt=2)
    run.append_metrics(metrics(41, 2, **{"rollout/dropped_samples": 200}))
    run.write_status(Status("running", 2, 41, "2026-11-29T19:43:08.123Z"))
    text = shown(run)
    assert "steps               41 of 60, 10 steps repeated after a resume" in text
    assert "attempt 2" in text
    assert "warning 200 samples dropped, 1.9% of all" in text


def test_control_characters_of_a_log_do_nothing() -> None:
    assert clean("\x1b[2J\x1b[31mred\x1b[0m\x1b]0;title\x07 \x08\x00done\tnow") == "red done    now"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.3125, "0.3125"), (3.1e-6, "3.1e-06"), (12.5, "12.5"), (48210.4, "48,210"), (-0.01, "-0.0100")],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.85, "850 ms"),
        (4.24, "4.2 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_size_and_span() -> None:
    assert (size(812), size(4_194_304)) == ("812 B", "4.0 MiB")
    first, second = "2026-11-29T23:59:58.123Z", "2026-11-30T00:01:02.000Z"
    assert span(first, second, "→") == "2026-11-29 23:59:58 → 2026-11-30 00:01:02 UTC"
    assert span(first, None, "→") == "since 2026-11-29 23:59:58 UTC"
    assert span(None, second, "→") == ""
