"""README, CONTRIBUTING and docs/: what they print runs, and what they name exists.

A `console` block holds commands after `$` and what they print; `...` stands for any text. Commands run in this process,
in an empty folder that stands for the reader's, with the files that the pages print. A `python` block is executed, a
`yaml` block is laid over a recipe. A block that nothing runs has its reason on the line before it:
`<!-- not tested: it starts a run of six minutes -->`.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import launch
from benchmarks.__main__ import NAMES as BENCHMARKS
from benchmarks.__main__ import main as benchmarks_main
from tests.pages import NOT_TESTED, PAGES, REPOSITORY, Block, blocks
from tests.report.run_maker import make_completed, make_failed
from vime.config import Data
from vime.config.algorithm import Advantage, Loss
from vime.config.cluster import Preflight
from vime.config.compose import compose
from vime.launch.sweep.__main__ import main as sweep_main
from vime.models.family import FAMILIES
from vime.report.__main__ import main as report_main

LANGUAGES = ("console", "python", "yaml", "text")
HOME = "/home/me/vime"
"""The reader's folder, as the pages print it."""
RUNS = ("tiny_grpo-20261129-194308-1a2b", "tiny_grpo-20261129-201502-3c4d")
CUSTOM = (
    "data.source",
    "data.format",
    "data.reward",
    "rollout.generate",
    "rollout.group_filter",
    "rollout.batch_filter",
)
BLOCKS = [block for page in PAGES for block in blocks(page)]


def _benchmarks(arguments: list[str]) -> int:
    sys.argv[1:] = arguments
    return benchmarks_main()


PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    "launch.py": launch.main,
    "vime.report": report_main,
    "vime.launch.sweep": sweep_main,
    "benchmarks": _benchmarks,
}


def of(language: str) -> list[Any]:
    """The blocks of a language that a test runs, as parameters."""
    chosen = [block for block in BLOCKS if block.language == language and block.not_tested is None]
    return [pytest.param(block, id=block.place) for block in chosen]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's: with every file that the pages print, one run that completed and one that failed."""
    folder = tmp_path_factory.mktemp("reader")
    for block in BLOCKS:
        if block.file_name is not None:
            assert not (folder / block.file_name).exists(), f"{block.place}: {block.file_name} is printed twice"
            (folder / block.file_name).write_text(block.text, encoding="utf-8")
    completed, failed = RUNS
    make_completed(folder / "runs", name=completed)
    make_failed(folder / "runs", name=failed)
    for name, rate in (("learning_rate_1e-6-seed_1-158f00", "1.0e-6"), ("learning_rate_2e-6-seed_1-9bad49", "2.0e-6")):
        make_completed(folder / "runs" / "lr", name=name, learning_rate=rate)
    return folder


@pytest.fixture
def reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Commands run here, on a terminal of 100 columns, and start nothing."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", ["python -m benchmarks"])

    def refuse(*_: Any, **__: Any) -> int:
        raise AssertionError("this command would start a run: mark its block as not tested")

    for name in ("submit.submit", "submit.resume", "sweep.submit.submit_sweep"):
        monkeypatch.setattr(f"vime.launch.{name}", refuse)
    handler = signal.getsignal(signal.SIGPIPE)
    before = sorted(folder.rglob("*"))
    yield folder
    signal.signal(signal.SIGPIPE, handler)  # a dry run sets it for its own process
    assert sorted(folder.rglob("*")) == before, "a command of the pages wrote something"


def commands(block: Block) -> list[tuple[str, str]]:
    """The commands of a console block, each with what it is said to print."""
    found = [part.partition("\n") for part in re.split(r"^\$ ", block.text.replace("\\\n", " "), flags=re.MULTILINE)]
    assert found[0][0] == "", f"{block.place}: a console block begins with `$ `"
    return [(command, output) for command, _, output in found[1:]]


def run(command: str) -> tuple[int, str]:
    """Exit code and output, standard error included, of a command in this process."""
    words = shlex.split(command, comments=True)
    assert words[0] in ("python", ".venv/bin/python"), f"not a program of vime: {command}"
    words = words[2:] if words[1] == "-m" else words[1:]
    assert words[0] in PROGRAMS, f"not a program of vime: {command}"
    raw = io.BytesIO()
    output = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = PROGRAMS[words[0]](words[1:])
        except SystemExit as end:  # argparse's --help
            code = int(end.code or 0)
    text = raw.getvalue().decode()
    for place in (str(Path.cwd()), str(REPOSITORY)):
        text = text.replace(place, HOME)
    return code, text


def check(block: Block) -> None:
    """Run a console block. Raises AssertionError where the page is wrong."""
    for command, said in commands(block):
        code, printed = run(command)
        refused = re.match(r"(launch\.py|vime\.[\w.]+): ", said) is not None
        assert code == (2 if refused else 0), f"{block.place}: `{command}` ends with {code}:\n{printed}"
        if said.strip():
            assert _matches(said, printed), f"{block.place}: `{command}` prints:\n{printed}\nand not:\n{said}"


def _matches(said: str, printed: str) -> bool:
    def plain(text: str) -> str:
        return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")

    pattern = re.escape(plain(said)).replace(r"\.\.\.", ".*?")
    return re.fullmatch(pattern, plain(printed), re.DOTALL) is not None


@pytest.mark.parametrize("block", of("console"))
def test_a_command_prints_what_the_page_says(block: Block, reader: Path) -> None:
    check(block)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("$ python launch.py --help rollout.temperatur\n", "ends with 2"),
        ("$ python launch.py --help rollout.temperature\n  rollout.temperature  [number]\n", "and not:"),
        ("$ python launch.py cluster=local recipe=tiny_grpo\n", "would start a run"),
        ("$ rm -r runs\n", "not a program of vime"),
    ],
)
def test_a_page_that_is_wrong_is_noticed(text: str, problem: str, reader: Path) -> None:
    (block,) = blocks(PAGES[0], f"```console\n{text}```\n")
    with pytest.raises(AssertionError, match=problem):
        check(block)


@pytest.mark.parametrize("block", of("python"))
def test_python_can_be_executed(block: Block) -> None:
    exec(compile(ast.parse(block.text), block.place, "exec"), {"__name__": "page"})


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_says_what_a_recipe_may_say(block: Block, tmp_path: Path) -> None:
    if block.file_name is not None:
        return  # the commands of its page read it
    recipe = yaml.safe_load((REPOSITORY / "configs" / "tiny_grpo.yaml").read_text())
    for section, values in yaml.safe_load(block.text).items():
        recipe[section] = recipe.get(section, {}) | values
    (tmp_path / "page.yaml").write_text(yaml.safe_dump(recipe))
    compose("local", str(tmp_path / "page.yaml"), ())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    found = blocks(page)
    for block in found:
        assert block.language in LANGUAGES, f"{block.place}: a block is one of {LANGUAGES}"
        assert block.language != "text" or block.not_tested, f"{block.place}: nothing runs it, and it does not say why"
    text = page.read_text(encoding="utf-8")
    used = sum(block.not_tested is not None for block in found)
    assert len(NOT_TESTED.findall(text)) == used, f"{page.name}: a reason stands before no block"
    assert not re.search(r"^\n    \S", _prose(page), re.MULTILINE), f"{page.name}: an indented block is not tested"


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    prose = _prose(page)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
        assert (page.parent / target).exists(), f"{page.name}: there is no {target}"
    code = re.findall(r"`([^`\n]+)`", prose)
    for path, _, test in (one.partition("::") for one in code):
        if re.fullmatch(r"(?:vime|tests|benchmarks|clusters|configs|sbatch|docs|requirements)/[\w./-]*", path):
            assert (REPOSITORY / path).exists(), f"{page.name}: there is no {path}"
            assert not test or f"def {test}(" in (REPOSITORY / path).read_text(), f"{page.name}: {path} has no {test}"
    made = (REPOSITORY / "Makefile").read_text()
    for target in re.findall(r"(?<![\w-])make ([a-z-]+)(?![\w-])", "\n".join(code)):
        assert f"\n{target}:" in made, f"{page.name}: the Makefile has no target {target}"


def test_readme_fits_on_three_screens() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("algorithms.md", get_args(Advantage) + get_args(Loss)),
        ("custom-logic.md", (*(get_args(get_args(Data.model_fields["reward"].annotation)[0])), *CUSTOM)),
        ("clusters.md", get_args(get_args(Preflight.model_fields["checks"].annotation)[0])),
        ("performance.md", BENCHMARKS),
    ],
)
def test_a_page_that_lists_names_has_all_of_them(page: str, names: tuple[str, ...]) -> None:
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    assert [name for name in names if not re.search(rf"`{re.escape(name)}\b", text)] == []


def test_readme_names_the_model_families_and_the_glossary_has_twenty_words() -> None:
    (named,) = re.findall(r"model_type` is ([^.]*)\.", PAGES[0].read_text(encoding="utf-8"))
    assert set(re.findall(r"`(\w+)`", named)) == set(FAMILIES)
    words = re.findall(r"^\| ([a-z ]+) \|", (REPOSITORY / "docs" / "glossary.md").read_text(), re.MULTILINE)[1:]
    assert len(words) == 20
    assert words == sorted(words)
