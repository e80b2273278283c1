"""What a dry run may leave open and a submission may not."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vime.config import Config, Data
from vime.errors import UserError, did_you_mean
from vime.models.family import family, read_shape
from vime.models.hf_check import check_tokenizer, check_weights
from vime.models.shape import shape_of
from vime.rollout.data.fingerprint import changes, fingerprint
from vime.rollout.data.sources import check_task, load_problems, read_jsonl
from vime.rollout.prompts import changed_line
from vime.run.network import check_temporary_folder


def check_ready(config: Config) -> None:
    """Refuse what can be planned but not run yet. Raises UserError with one line about the first such thing."""
    model, data = config.model, config.data
    if config.cluster.scheduler == "local" and config.rollout.engines:
        check_temporary_folder(config.cluster.environment)
    if model.tiny is None and model.path is None:
        named = f" of {model.name}" if model.name else ""
        download = f", made by `hf download {model.name} --local-dir FOLDER`" if model.name else ""
        raise UserError(f"model.path is not set: give the folder{named}, model.path=FOLDER{download}")
    if data.source == "jsonl" and data.path is None:
        raise UserError(f"data.path is not set: give the JSONL file of {data.name}, data.path=FILE")
    if model.path is not None:
        check_weights(model.path, "model.path")
        check_tokenizer(model.path, "model.path", load=not _contained(config))
    for key, folder in config.algorithm.folders.items():
        check_weights(folder, key)
    shape = shape_of(model)
    assert shape.family is not None, "a folder and a tiny model have one"
    if shape.tied_embeddings and config.rollout.engines and not family(shape.family, "model").engine_ties:
        where = f"{model.path}/config.json has tie_word_embeddings" if model.path else "model.tiny.tied_embeddings is"
        raise UserError(f"{where} true, and vLLM cannot tie the embeddings of {shape.family}: it must be false")
    for key, folder in config.algorithm.folders.items():
        other = read_shape(folder).vocabulary
        if other != shape.vocabulary:
            policy = "model.path" if model.path is not None else "model.tiny"
            raise UserError(
                f"{key}={folder} has a vocabulary of {other} tokens, and {policy} one of {shape.vocabulary}"
            )
    check_data(config)


MAX_BYTES = 64 << 20
"""Of a JSONL file that are read before a submission: about a second."""


def check_data(config: Config) -> None:
    """Refuse what the generator would refuse a minute later. Raises UserError with one line."""
    data, rollout = config.data, config.rollout
    contained = _contained(config)
    for field, path in (
        ("data.source", data.source),
        ("data.format", data.format),
        ("data.reward", data.reward),
        ("algorithm.advantage", config.algorithm.advantage),
        ("algorithm.loss", config.algorithm.loss),
        ("rollout.generate", rollout.generate),
        ("rollout.group_filter", rollout.group_filter),
        ("rollout.batch_filter", rollout.batch_filter),
        *((f"evaluation.datasets.{name}.reward", one.reward) for name, one in config.evaluation.datasets.items()),
    ):
        if path is not None and ":" in path and not contained:
            check_function(path, field)
    if data.source == "reasoning_gym":
        _check_task(data)
    if data.source == "jsonl" and data.path is not None:
        _check_file(data.path, data)
    if data.source == "jsonl" and data.eval_path is not None:
        _check_file(data.eval_path, data)
    for one in config.evaluation.datasets.values():
        _check_file(one.path, data)


def check_unchanged(config: Config, cursor: Mapping[str, Any]) -> None:
    """Refuse to resume with other data than those of a checkpoint's cursor, where they can be read at once.

    The generator compares in any case. Raises UserError naming the change.
    """
    data = config.data
    saved = cursor.get("data")
    if data.source != "jsonl" or data.path is None or data.allow_change or not isinstance(saved, dict):
        return
    if sum(path.stat().st_size for path in (data.path, data.eval_path) if path is not None) > MAX_BYTES:
        return
    changed = changes(saved, fingerprint(load_problems(data, config.run.seed, 0), data))
    if changed:
        raise UserError(changed_line(changed))


def check_function(path: str, field: str) -> None:
    """Find the module of an import path and, if its source can be read, the function in it. Raises UserError."""
    module, _, name = path.partition(":")
    here = str(Path.cwd())  # roles are started here with `python -m`, which looks here first
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        spec = importlib.util.find_spec(module)
    except Exception as error:
        raise UserError(f"{field}={path}: finding {module} failed: {type(error).__name__}: {error}") from error
    finally:
        if added:
            sys.path.remove(here)
    if spec is None:
        raise UserError(f"{field}={path}: there is no module {module} in {here} or where Python looks (PYTHONPATH)")
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    try:
        names = top_level_names(Path(spec.origin).read_bytes())
    except SyntaxError as error:
        raise UserError(f"{field}={path}: {spec.origin}:{error.lineno}: {error.msg}") from error
    if names is not None and name not in names:
        raise UserError(f"{field}={path}: {module} has no {name}{did_you_mean(name, sorted(names))}")


def top_level_names(source: bytes) -> set[str] | None:
    """What a module defines or imports by name; None when that cannot be told from its source."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("globals", "setattr"):
            return None
    return None if names & {"*", "__getattr__"} else names


def _contained(config: Config) -> bool:
    """Whether roles see other packages than this process: those of a container."""
    return config.cluster.scheduler == "slurm" and config.cluster.container.kind != "none"


def _check_file(path: Path, data: Data) -> None:
    read_jsonl(path, data.prompt_key, data.answer_key, MAX_BYTES)


def _check_task(data: Data) -> None:
    try:
        check_task(data)
    except ModuleNotFoundError:
        pass  # a login node without reasoning_gym
