"""What a submission refuses: one line, exit code 2, before anything is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vime.errors import UserError
from vime.launch.checks import check_function, top_level_names

REPOSITORY = Path(__file__).parents[2]
FUNCTIONS = """
raise SystemExit("it was imported")

from os.path import join as joined
scale = made = 1

def score(response):
    return 0.0

class Judge:
    async def __call__(self, response): ...

if True:
    def later(response): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_functions.py").write_text(FUNCTIONS)
    (tmp_path / "my_broken.py").write_text("def score(response:\n")
    (tmp_path / "my_dynamic.py").write_text("def __getattr__(name): ...\n")
    return tmp_path


@pytest.mark.parametrize("name", ["score", "Judge", "later", "joined", "made"])
def test_a_function_is_found_without_running_its_module(folder: Path, name: str) -> None:
    check_function(f"my_functions:{name}", "data.reward")


def test_what_cannot_be_told_from_the_source_is_left_to_the_generator(folder: Path) -> None:
    check_function("my_dynamic:anything", "data.reward")
    check_function("math:sqrt", "data.reward")
    assert top_level_names(b"from os import *") is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_functions:scor", "data.reward=my_functions:scor: my_functions has no scor; did you mean score?"),
        ("my_function:score", "there is no module my_function in "),
        ("nowhere.my_functions:score", "finding nowhere.my_functions failed: ModuleNotFoundError"),
        ("my_broken:score", "my_broken.py:1: '(' was never closed"),
    ],
)
def test_a_wrong_import_path_is_refused(folder: Path, path: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        check_function(path, "data.reward")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.reward=my_functions:nothing"], "data.reward=my_functions:nothing: my_functions has no nothing"),
        (["rollout.group_filter=my_functions:nothing"], "rollout.group_filter=my_functions:nothing"),
        (["rollout.generate=no_module:f"], "rollout.generate=no_module:f: there is no module no_module"),
        (["data.task=chain_summ"], "data.task=chain_summ"),
        (["data.template='{expresion} ='"], "it may name"),
        (
            ["data.source=jsonl", "data.path=train.jsonl", "data.reward=exact"],
            "train.jsonl:2: no key 'prompt'; the record has 'question', 'answer'",
        ),
        (
            ["evaluation.datasets={hard: {path: train.jsonl, reward: exact}}"],
            "train.jsonl:2: no key 'prompt'",
        ),
    ],
)
def test_a_submission_is_refused_before_anything_is_written(folder: Path, overrides: list[str], message: str) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"question": "b", "answer": "2"}\n')
    command = [sys.executable, str(REPOSITORY / "launch.py"), "cluster=local", "recipe=tiny_grpo", *overrides]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (folder / "runs").exists()
