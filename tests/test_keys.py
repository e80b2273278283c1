"""Every configuration key that a text names is a key: messages, docstrings, recipes, the README and the other pages."""

from __future__ import annotations

import re

import pytest

from tests.test_architecture import texts
from vime.config import Config
from vime.config.explain import all_fields, dotted, section_at, submodel

SECTIONS = tuple(name for name, info in Config.model_fields.items() if submodel(info.annotation) is not None)
NAMED = re.compile(rf"(?<![\w./:-])((?:{'|'.join(SECTIONS)})(?:\.[A-Za-z_]\w*)+)(?![\w(/-])")
KEYS = {dotted(path) for path in all_fields(Config)}
FILES = ("py", "yaml", "json", "md", "sh", "sbatch", "safetensors", "jsonl", "txt")
WEIGHTS = ("model.layers", "model.embed_tokens", "model.norm", "model.decoder")
"""Names of tensors, which begin like keys."""


def keys_in(text: str) -> set[str]:
    """The texts that look like configuration keys, without those that a page shows as mistakes."""
    found = {match[1] for match in NAMED.finditer(text)} - set(re.findall(r"unknown key ([\w.]+)", text))
    return {key for key in found if key.rpartition(".")[2] not in FILES and not key.startswith(WEIGHTS)}


def known(key: str) -> bool:
    """Whether `key` is in the schema, or below a map whose names are a person's own."""
    path = tuple(key.split("."))
    for end in range(len(path), 0, -1):
        if dotted(path[:end]) in KEYS:
            return end == len(path) or (section_at(Config, path[:end]) is None and _is_map(path[:end]))
    return False


def _is_map(path: tuple[str, ...]) -> bool:
    parent = section_at(Config, path[:-1])
    return parent is not None and "dict" in str(parent.model_fields[path[-1]].annotation)


@pytest.mark.parametrize(
    ("key", "there"),
    [
        ("training.learning_rate", True),
        ("training.lr", False),
        ("rollout.engine_args.max_num_seqs", True),
        ("rollout.engines.count", False),
        ("cluster.slurm.trainer.segment", True),
    ],
)
def test_a_key_is_known_or_not(key: str, there: bool) -> None:
    assert known(key) == there
    assert keys_in(f"set {key}=1, please") == {key}


def test_keys_named_in_text_exist() -> None:
    unknown = {
        f"{where}: {key}"
        for where, text in texts().items()
        if not where.startswith("tests/")  # tests misspell keys on purpose
        for key in keys_in(text)
        if not known(key)
    }
    assert sorted(unknown) == []
