"""A model folder that is not whole is refused in milliseconds, without torch, in one line that names the file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vime.config import TinyModel
from vime.errors import UserError
from vime.models.hf_check import INDEX, SINGLE, check_tokenizer, check_weights
from vime.models.tiny import make_tiny

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb\nsize 12\n"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def save(path: Path, names: list[str]) -> None:
    """A safetensors file with four float32 for each name."""
    header = {
        name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * i, 16 * i + 16]} for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16 * len(names)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "tiny"
    make_tiny(TinyModel(layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, ffn=8, context=128), folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A folder of two shards with an index, and a tokenizer."""
    folder = tmp_path / "model"
    shutil.copytree(made, folder)
    (folder / SINGLE).unlink()
    save(folder / FIRST, ["a", "b"])
    save(folder / SECOND, ["c"])
    index = {"metadata": {"total_size": 48}, "weight_map": {"a": FIRST, "b": FIRST, "c": SECOND}}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def check(folder: Path) -> None:
    check_weights(folder, "model.path")
    check_tokenizer(folder, "model.path", load=True)


def test_whole_folders_pass_at_once(folder: Path, made: Path) -> None:
    check(made)
    begun = time.monotonic()
    check(folder)
    assert time.monotonic() - begun < 0.5


def rewrite(name: str, change: Callable[[dict[str, object]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return damage


def halve(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-20])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *((lambda f, n=name: (f / n).write_bytes(POINTER), f"{name} is a Git LFS pointer")
          for name in ("config.json", INDEX, FIRST, "tokenizer.json", "tokenizer_config.json")),
        (halve(FIRST), f"{FIRST} is cut short: "),
        (lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes()[:20]), f"{SECOND} is cut short: 20 bytes of a"),
        (lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes() + b"x"), f"{SECOND} is too long"),
        (lambda f: (f / SECOND).write_bytes(b""), f"{SECOND} is empty"),
        (lambda f: (f / SECOND).write_bytes(bytes(1000)), f"{SECOND} is nothing but zero bytes"),
        (lambda f: (f / SECOND).write_bytes(b"<!DOCTYPE html><html>not found</html>"), f"{SECOND} is a web page"),
        (lambda f: (f / SECOND).write_bytes(b"\x10\0\0\0\0\0\0\0{" + b"x" * 40), f"{SECOND} is not a safetensors file"),
        (lambda f: (f / SECOND).unlink(), f"{SECOND} is missing, which {INDEX} names"),
        (lambda f: save(f / SECOND, ["d"]), f"{SECOND} lacks the tensor c, which {INDEX} says it holds"),
        (rewrite(INDEX, lambda index: index.pop("weight_map")), f"{INDEX} has no `weight_map`"),
        (rewrite(INDEX, lambda index: index.update(weight_map={"a": "../x"})), f"{INDEX} says that a is in '../x'"),
        (rewrite(INDEX, lambda index: index.update(weight_map={"a": 3})), f"{INDEX} says that a is in '3'"),
        (lambda f: (f / INDEX).write_text('{"weight_map": {"a"'), f"{INDEX} is cut short, or no JSON"),
        (lambda f: (f / INDEX).unlink(), f"it has neither {SINGLE} nor {INDEX}; there is {FIRST} and 1 more"),
        (lambda f: [(f / INDEX).unlink(), (f / FIRST).unlink(), (f / SECOND).rename(f / "pytorch_model.bin")],
         "there is pytorch_model.bin, which vime does not read"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json holds no JSON object"),
        (lambda f: (f / "tokenizer.json").unlink(), "it has no tokenizer"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json describes no `model`"),
        (rewrite("tokenizer.json", lambda t: t["model"].update(type="BPE2")), "model BPE2) is not one that tokenizers"),
    ],
)  # fmt: skip
def test_what_is_not_whole_is_named(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(UserError) as caught:
        check(folder)
    assert str(caught.value).startswith(f"model.path={folder}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_submission_refuses_it_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    (folder / FIRST).write_bytes(POINTER)
    launch = Path(__file__).parents[2] / "launch.py"
    command = [sys.executable, str(launch), "cluster=local", "recipe=tiny_grpo", "model.tiny=null", "model.warmup=null"]
    done = subprocess.run([*command, f"model.path={folder}"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"model.path={folder}: {FIRST} is a Git LFS pointer" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_no_torch_is_needed() -> None:
    code = "import sys, vime.models.hf_check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
