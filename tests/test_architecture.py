"""The file list is the architecture: what may import what, where files lie, and that names in text exist."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from vime.plan.plan import MOVED

ROOT = Path(__file__).parents[1]
ORDER = (
    "launch",
    "training",
    "rollout",
    "supervise",
    "slurm",
    "buffer",
    "report",
    "run",
    "plan",
    "models",
    "config",
    "algorithms",
    "errors",
)
"""The parts of vime: each imports only parts after it."""
MAX_FILES = 22
"""Python files in one folder; a reader takes in no more."""
IMAGES = ("vime.sqsh", "vime.sif")
"""Files of a container, which only look like modules."""
TEXTS = (
    "*.md",
    "docs/**/*.md",
    "sbatch/*",
    "pyproject.toml",
    "Makefile",
    "requirements/*.sh",
    "clusters/*",
    "configs/*",
)
"""What names modules and files besides Python."""


def name_of(path: Path) -> str:
    """`vime.run.role` for vime/run/role.py, `vime.run` for vime/run/__init__.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def trees() -> dict[str, ast.Module]:
    """Module -> its source, for launch.py and all of vime."""
    return {name_of(path): ast.parse(path.read_text()) for path in [ROOT / "launch.py", *(ROOT / "vime").rglob("*.py")]}


def imported(tree: ast.Module) -> Iterator[str]:
    """The modules of vime that a module imports, at its top, within functions, or for its types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in trees())
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield from [found for found in (module, node.module) if found in trees()][:1]


@cache
def graph() -> dict[str, set[str]]:
    """Module -> the modules of vime that it imports."""
    return {module: set(imported(tree)) for module, tree in trees().items()}


def place(module: str) -> int:
    """A module's place in ORDER; launch.py stands before all."""
    return ORDER.index(module.split(".")[1]) if module.startswith("vime.") else -1


def test_every_module_has_a_folder() -> None:
    assert {path.name for path in (ROOT / "vime").glob("*.py")} == {"__init__.py", "errors.py"}
    folders = {path.name for path in (ROOT / "vime").iterdir() if any(path.glob("*.py"))}
    assert folders == set(ORDER) - {"errors"}


def test_no_folder_is_too_long_to_read() -> None:
    counts = {str(path.parent.relative_to(ROOT)): 0 for path in (ROOT / "vime").rglob("*.py")}
    for path in (ROOT / "vime").rglob("*.py"):
        counts[str(path.parent.relative_to(ROOT))] += 1
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES} == {}


def test_imports_go_down_only() -> None:
    upwards = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in others
        if other != "vime" and place(other) < place(module)
    ]
    assert upwards == []


def test_rollout_and_training_meet_only_in_the_buffer() -> None:
    sides = {"training": "vime.rollout.", "rollout": "vime.training."}
    across = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for side, opposite in sides.items()
        for other in others
        if module.startswith(f"vime.{side}.") and other.startswith(opposite)
    ]
    assert across == []


def test_no_module_imports_itself_through_others() -> None:
    try:
        graphlib.TopologicalSorter(graph()).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def strings(tree: ast.Module) -> Iterator[str]:
    """Every string of a module, docstrings and the texts of f-strings included."""
    yield from (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))


@cache
def texts() -> dict[str, str]:
    """Where -> text: the strings and comments of Python, and whole files of other kinds."""
    python = [path for folder in ("vime", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    found = {}
    for path in [ROOT / "launch.py", *python]:
        source = path.read_text()
        comments = re.findall(r"#.*", source)
        found[str(path.relative_to(ROOT))] = "\n".join([*strings(ast.parse(source)), *comments])
    others = [path for pattern in TEXTS for path in ROOT.glob(pattern) if path.is_file()]
    return found | {str(path.relative_to(ROOT)): path.read_text() for path in others}


def defined(tree: ast.Module) -> set[str]:
    """The names that a module defines or imports at its top."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        names |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
    return names


def missing(reference: str) -> bool:
    """Whether `vime.a.b`, `vime.a.b:name` or `vime.a.b.Name` names nothing."""
    module, _, name = reference.partition(":")
    if module not in trees() and not name:
        module, _, name = module.rpartition(".")
    return module not in trees() or (name != "" and name not in defined(trees()[module]))


@pytest.mark.parametrize(
    ("reference", "gone"),
    [
        ("vime.supervise.guardian", False),
        ("vime.launch.guardian.Guard", False),
        ("vime.slurm.executor:VimeExecutor", False),
        ("vime.slurm.executor:Executor", True),
        ("vime.launch.steps", True),
        ("vime.run.role.become_reaper", True),
    ],
)
def test_a_name_of_nothing_is_found(reference: str, gone: bool) -> None:
    assert missing(reference) == gone


def test_modules_named_in_text_exist() -> None:
    found = {
        f"{where}: {reference}"
        for where, text in texts().items()
        if where != "tests/test_architecture.py"  # which names modules that are gone
        for reference in re.findall(r"(?<![\w./-])vime(?:\.[A-Za-z_]\w*)+(?::[A-Za-z_]\w*)?", text)
        if reference not in (*MOVED, *IMAGES) and missing(reference)
    }
    assert sorted(found) == []


def test_files_named_in_text_exist() -> None:
    folders = "vime|tests|configs|clusters|sbatch|benchmarks|requirements|docs"
    found = {
        f"{where}: {reference}"
        for where, text in texts().items()
        if not where.startswith("tests/")  # tests name files that are not there on purpose
        for reference in re.findall(rf"(?<![\w./-])(?:{folders})/[\w/-]+\.(?:py|yaml|sbatch|txt|sh|md)\b", text)
        if not (ROOT / reference).exists()
    }
    assert sorted(found) == []


def test_the_launcher_needs_no_torch_and_no_vllm() -> None:
    """With both blocked a run is composed, planned and shown, and the modules that submit it are imported."""
    program = """
import sys
sys.modules |= dict.fromkeys(["torch", "vllm", "megatron", "transformers"])
import launch
import vime.launch.checks, vime.launch.submit, vime.launch.sweep.submit, vime.report.render
sys.exit(launch.main(["cluster=gb200", "recipe=glm45_air_grpo", "--dry-run"]))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH" in done.stdout
