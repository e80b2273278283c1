"""The tables of losses and advantages: what the schema, `--help` and the documentation know comes from them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from vime.algorithms.advantages import ADVANTAGES
from vime.algorithms.losses import LOSSES
from vime.algorithms.table import Row
from vime.config import Algorithm
from vime.config.help import schema_help

ROOT = Path(__file__).parents[2]
TABLES: dict[str, dict[str, Row]] = {"advantage": {**ADVANTAGES}, "loss": {**LOSSES}}
ROWS = [(key, name) for key, table in TABLES.items() for name in table]

# A new loss and a new advantage as their authors would write them: one module each, which is copied with one row more.
NEW_ROW = """
def toy(logprobs, advantages):
    return -advantages * logprobs

LOSSES["toy"] = Row(toy, "the policy gradient", "nobody")
""", """
def toy(rewards):
    return rewards - rewards.mean()

ADVANTAGES["toy"] = Advantage(toy, "reward less the batch's mean", "nobody")
"""  # fmt: skip


@pytest.mark.parametrize(("key", "name"), ROWS)
def test_every_row_is_a_legal_value_and_is_explained(key: str, name: str) -> None:
    row = TABLES[key][name]
    rule = Algorithm.model_validate({"name": "ppo" if name == "gae" else "grpo", key: name})
    assert getattr(rule, key) == name
    assert f"      {name}: {row.line} ({row.source})\n" in schema_help(f"algorithm.{key}") + "\n"
    documents = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *ROOT.glob("docs/*.md")))
    assert f"| `{name}` | {row.line} | {row.source} |" in documents
    assert inspect.getdoc(row.function)


@pytest.mark.parametrize("key", TABLES)
def test_no_other_name_is_legal(key: str) -> None:
    literal = next(part for part in get_args(Algorithm.model_fields[key].annotation) if get_args(part))
    assert get_args(literal) == tuple(TABLES[key])


@pytest.mark.parametrize(("module", "key", "new"), [("losses", "loss", 0), ("advantages", "advantage", 1)])
def test_a_new_row_is_one_entry_of_one_module_and_needs_no_torch(module: str, key: str, new: int) -> None:
    code = f"""
import importlib.util, sys
name = "vime.algorithms.{module}"
spec = importlib.util.find_spec(name)
source = spec.loader.get_source(name) + {NEW_ROW[new]!r}
changed = importlib.util.module_from_spec(spec)
sys.modules[name] = changed
exec(compile(source, spec.origin, "exec"), changed.__dict__)
from vime.config import Algorithm
from vime.config.help import schema_help
known = Algorithm.model_validate({{"{key}": "toy"}}).{key}
print(known, "toy: " in schema_help("algorithm.{key}"), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["toy", "True", "False"]
