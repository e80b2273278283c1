"""A sweep: one recipe run with many combinations of values, from one file.

    # lr.yaml
    grid:                             # every combination of these lists
      training.learning_rate: [1e-6, 2e-6]
      run.seed: [1, 2]
    zip:                              # these side by side: the first of each, the second of each, ...
      rollout.prompts_per_step: [32, 64]
      training.steps: [100, 50]
    set: {training.save_interval: 10} # the same in all
    parallel: 2                       # jobs at once

Each combination has a run directory of its own in <run.root>/<name of the file>, named after its values, so that the
same file submitted again finds what is done already.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.config import yaml_file
from vime.config.yaml_file import Document, KeyPath
from vime.errors import UserError, did_you_mean
from vime.run.directory import RunDir

KEYS = ("grid", "zip", "set", "parallel", "name", "cluster", "recipe")
MAX_COMBINATIONS = 10_000
"""Combinations in one sweep."""


@dataclass(frozen=True)
class Combination:
    """One run of a sweep."""

    index: int
    """Place in the sweep, from 0: SLURM_ARRAY_TASK_ID."""
    name: str
    """Name of its run directory: the values that vary, and a hash of all."""
    overrides: tuple[str, ...]
    """`dotted.key=value`, as on a command line; the values that vary come last."""


@dataclass(frozen=True)
class Sweep:
    """What a sweep file says."""

    name: str
    combinations: tuple[Combination, ...]
    parallel: int | None
    """Jobs at once; None: no limit."""
    cluster: str
    recipe: str


def read_sweep(path: Path, cluster: str | None = None, recipe: str | None = None, given: Sequence[str] = ()) -> Sweep:
    """Read and expand a sweep file; `given` overrides hold for all combinations.

    `cluster` and `recipe` default to the file's own. Raises UserError with file and line.
    """
    document = yaml_file.load_file(path)
    data = document.data
    for key in data:
        if key not in KEYS:
            raise UserError(f"{document.places[(key,)]}: unknown key {key} in a sweep{did_you_mean(key, KEYS)}")
    varied = list(_combine(document, path))
    if not varied:
        raise UserError(f"{path}: a sweep needs `grid` or `zip`, with at least one list of values")
    _no_key_twice(document, given)
    parallel = data.get("parallel")
    if parallel is not None and (isinstance(parallel, bool) or not isinstance(parallel, int) or parallel < 1):
        raise UserError(f"{document.places[('parallel',)]}: parallel={parallel} must be a whole number of at least 1")
    name = str(data.get("name") or path.stem)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise UserError(f"{path}: the sweep's name {name!r} must be letters, digits, '_', '.' and '-'; set `name`")
    cluster = cluster or _optional(document, "cluster")
    recipe = recipe or _optional(document, "recipe")
    for key, value in (("cluster", cluster), ("recipe", recipe)):
        if value is None:
            raise UserError(f"{path}: the sweep names no {key}; give {key}=NAME there or on the command line")
    assert cluster is not None, "checked above"
    assert recipe is not None, "checked above"
    fixed = (*(f"{key}={_text(document, ('set', key))}" for key in _section(document, "set")), *given)
    combinations = tuple(
        Combination(index, _name(recipe, fixed, values), (*fixed, *(f"{key}={value}" for key, value in values)))
        for index, values in enumerate(varied)
    )
    if len({combination.name for combination in combinations}) < len(combinations):
        raise UserError(f"{path}: two combinations of the sweep are the same; a list holds a value twice")
    return Sweep(name, combinations, parallel, cluster, recipe)


def _combine(document: Document, path: Path) -> Iterator[list[tuple[str, str]]]:
    grid = [[(key, value) for value in _list(document, "grid", key)] for key in _section(document, "grid")]
    zipped = {key: _list(document, "zip", key) for key in _section(document, "zip")}
    lengths = {key: len(values) for key, values in zipped.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key} has {count}" for key, count in lengths.items())
        raise UserError(f"{document.places[('zip',)]}: lists side by side must be equally long: {listed}")
    rows = [list(zip(zipped, row, strict=True)) for row in zip(*zipped.values(), strict=True)]
    count = max(len(rows), 1)
    for choices in grid:
        count *= len(choices)
    if count > MAX_COMBINATIONS:
        raise UserError(f"{path}: {count} combinations are more than the {MAX_COMBINATIONS} of one sweep")
    if not grid and not rows:
        return
    for row in rows or [[]]:
        for point in itertools.product(*grid):
            yield [*point, *row]


def _section(document: Document, name: str) -> dict[str, Any]:
    section = document.data.get(name)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise UserError(f"{document.places[(name,)]}: `{name}` must map dotted keys to values")
    return section


def _list(document: Document, section: str, key: str) -> list[str]:
    values = document.data[section][key]
    if not isinstance(values, list) or not values:
        raise UserError(f"{document.places[(section, key)]}: {section}.{key} must be a list of values")
    return [_text(document, (section, key, index)) for index in range(len(values))]


def _text(document: Document, path: KeyPath) -> str:
    """A value as an override has it: as written when it was plain, so that `007` stays a text for a text field."""
    written = document.places[path].text
    if written is not None:
        return written
    value: Any = document.data
    for key in path:
        value = value[key]
    return json.dumps(value)


def _no_key_twice(document: Document, given: Sequence[str]) -> None:
    first = {text.partition("=")[0]: "the command line" for text in given}
    for section in ("grid", "zip", "set"):
        for key in _section(document, section):
            if key in first:
                raise UserError(f"{document.places[(section, key)]}: {key} is in {first[key]} and in {section}")
            if key in ("run.name", "run.root", "launch.layout"):
                raise UserError(f"{document.places[(section, key)]}: a sweep places its runs itself; leave {key} out")
            first[key] = section


def _optional(document: Document, key: str) -> str | None:
    value = document.data.get(key)
    return None if value is None else str(value)


def _name(recipe: str, fixed: Sequence[str], values: Sequence[tuple[str, str]]) -> str:
    """`learning_rate_1e-6-seed_1-3fa2c1`: readable, and different for whatever changes the result."""
    words = "-".join(f"{key.rsplit('.', 1)[-1]}_{value}" for key, value in values)
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "_", words)[:80].strip("_.-")
    whole = [recipe, *(text for text in fixed if not text.startswith("run.root=")), *map("=".join, values)]
    return f"{safe}-{hashlib.sha256(chr(10).join(whole).encode()).hexdigest()[:6]}"


@dataclass(frozen=True)
class Slot:
    """Where a combination stands: the run that decides it, and the name of a run to start, if one is due."""

    combination: Combination
    run: RunDir | None
    """The completed run, or the one that goes on, or the last that ended otherwise."""
    state: str
    """That run's state; `new` when there is none."""
    start: str | None
    """Name for the run to start; None when one is completed or goes on."""


def look(folder: Path, combination: Combination, alive: Callable[[RunDir], bool] = lambda run: True) -> Slot:
    """What the runs of a combination in the sweep's folder have come to. One that failed is followed by `<name>-2`.

    alive: whether a run without a last word may still go on; a job that is cancelled while it waits leaves none.
    """
    last: RunDir | None = None
    state = "new"
    for tries in itertools.count(1):
        name = combination.name if tries == 1 else f"{combination.name}-{tries}"
        run = RunDir(folder / name)
        if not run.path.exists():
            return Slot(combination, last, state, name)
        try:
            status = run.read_status()
            state, ended = status.state, status.terminal
        except UserError:
            state, ended = "failed", True  # made by a launcher that ended before it wrote anything
        if state == "completed" or (not ended and alive(run)):
            return Slot(combination, run, state, None)
        last = run
    raise AssertionError("itertools.count does not end")
