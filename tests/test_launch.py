"""The command line as a person uses it: `launch.py` in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import launch
from vime.errors import UserError

LAUNCH = Path(launch.__file__)
TINY = ("cluster=local", "recipe=tiny_grpo")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VIME_CACHE": str(folder / "cache"), "COLUMNS": "100"}
    command = [sys.executable, str(LAUNCH), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, *TINY, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    for words in (
        "supervisor",
        "trainer",
        "0-1",
        "engine",
        "router",
        "generator",
        "vime.rollout.generator",
        "127.0.0.1",
    ):
        assert words in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_as_data_is_what_a_run_would_use(tmp_path: Path) -> None:
    done = run(tmp_path, *TINY, "training.learning_rate=1e-6", "--dry-run", "--json")
    data = json.loads(done.stdout)
    assert data["config"]["training"]["learning_rate"] == 1e-6
    assert [role["name"] for role in data["plan"]["roles"]] == [
        "supervisor",
        "trainer",
        "engine",
        "router",
        "generator",
    ]


@pytest.mark.parametrize("arguments", [(*TINY, "--dry-run"), (*TINY, "training.ranks=3"), ("--help", "rollout")])
def test_neither_a_dry_run_nor_an_error_imports_what_is_slow(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code = (
        "import sys, launch; launch.main(sys.argv[1:]);"
        " print('LOADED', *({'torch', 'vllm', 'numpy', 'transformers', 'megatron', 'submitit'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(LAUNCH.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1].strip() == "LOADED"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*TINY, "training.lr=1"), "command line: unknown key training.lr; did you mean training.learning_rate?"),
        ((*TINY, "training.steps=ten"), "command line: training.steps=ten must be a whole number"),
        ((*TINY, "data.path=missing.jsonl"), "data.path: there is no file"),
        ((*TINY, "training.ranks=3"), "256 samples do not divide over the 3 data-parallel ranks"),
        ((*TINY, "training.tensor_parallel=3"), "training.ranks=2 is not a multiple of"),
        (("cluster=local", "recipe=tiny_grop"), "did you mean tiny_grpo?"),
        (("cluster=local", "recipe=missing.yaml"), "there is no such file"),
        (("recipe=tiny_grpo",), "cluster=NAME is missing"),
        ((*TINY, "recipe=tiny_sft"), "recipe= is given twice"),
        ((*TINY, "--dryrun"), "unknown option --dryrun; did you mean --dry-run?"),
        ((*TINY, "--json"), "it needs --dry-run"),
        ((*TINY, "--wait", "--no-wait"), "exclude each other"),
        ((*TINY, "steps"), "'steps' is not an option or key=value"),
        ((), "cluster=NAME is missing"),
        (("--help", "rolout"), "did you mean rollout?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_and_writes_nothing(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("launch.py: ")
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_documents_every_key_of_a_section(tmp_path: Path) -> None:
    done = run(tmp_path, "--help", "recipe.rollout")
    assert done.returncode == 0
    assert "rollout.engines  [whole number, >= 0, default 1]" in done.stdout
    assert "vLLM servers." in done.stdout
    assert done.stdout == run(tmp_path, "--help", "rollout").stdout
    one = run(tmp_path, "--help", "data.source").stdout
    assert "module:function" in one
    assert "usage:" in run(tmp_path, "--help").stdout


def test_waiting_is_asked_for_or_left_to_the_cluster() -> None:
    assert launch.parse([*TINY]).wait is None
    assert launch.parse([*TINY, "--wait"]).wait is True
    assert launch.parse([*TINY, "--no-wait"]).wait is False
    with pytest.raises(UserError):
        launch.parse(["recipe=x"])
