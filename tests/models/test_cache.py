from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from vime.errors import WaitTimeout
from vime.models.cache import MARKER, cache_folder, cached_model, model_key


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIME_CACHE", str(tmp_path / "cache"))


def _make_slowly(folder: Path) -> None:
    (folder / "weights").write_text("half")
    time.sleep(0.5)
    with (folder.parent / "made").open("a") as file:
        file.write("once\n")
    (folder / "weights").write_text("whole")


def _want(found: multiprocessing.Queue[str]) -> None:
    found.put((cached_model("key", _make_slowly, time.sleep) / "weights").read_text())


def test_two_processes_that_want_one_model_make_it_once() -> None:
    spawn = multiprocessing.get_context("spawn")
    found = spawn.Queue()
    processes = [spawn.Process(target=_want, args=(found,)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [found.get(timeout=30) for _ in processes] == ["whole"] * 3
    for process in processes:
        process.join(10)
    assert (cache_folder() / "made").read_text() == "once\n"


def test_a_half_made_folder_is_not_used_and_goes() -> None:
    half = cache_folder() / "key"
    half.mkdir(parents=True)
    (half / "weights").write_text("half")
    left = cache_folder() / "key.making-1234"
    left.mkdir()
    folder = cached_model("key", _make_slowly)
    assert (folder / "weights").read_text() == "whole"
    assert not left.exists()


def test_a_complete_folder_is_used_as_it_is() -> None:
    def never(folder: Path) -> None:
        raise AssertionError("made again")

    folder = cache_folder() / "key"
    folder.mkdir(parents=True)
    (folder / MARKER).touch()
    assert cached_model("key", never) == folder


def test_a_maker_that_fails_leaves_nothing_and_the_next_one_makes_it() -> None:
    def broken(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        cached_model("key", broken)
    assert [path.name for path in cache_folder().iterdir()] == ["key.lock"]
    assert (cached_model("key", _make_slowly) / "weights").read_text() == "whole"


def test_the_wait_for_another_maker_is_bounded_and_named() -> None:
    def inner(folder: Path) -> None:
        with pytest.raises(WaitTimeout, match=r"waited 0\.3 s for another run to make the model of .*key\.lock"):
            cached_model("key", _make_slowly, time.sleep, timeout=0.3)

    cached_model("key", inner)


def test_a_key_follows_every_value() -> None:
    assert model_key({"a": 1, "b": 2}) == model_key({"b": 2, "a": 1})
    assert model_key({"a": 1}) != model_key({"a": 2})
