"""A checkpoint from elsewhere cannot make its reader call anything."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from vime.errors import UserError
from vime.training.checkpoint.plain_load import check_index, check_owner, plain_pickles


class Hostile:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_the_index_of_a_checkpoint_calls_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "called"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Hostile(mark)))
    with plain_pickles(), pytest.raises(UserError, match=r"index would call posix.mkdir, which vime does not write"):
        FileSystemReader(tmp_path).read_metadata()
    with pytest.raises(UserError, match=r"index would call posix.mkdir"):
        check_index(tmp_path)
    assert not mark.exists()
    with pytest.raises(AttributeError):
        FileSystemReader(tmp_path).read_metadata()
    assert mark.exists(), "without it the file is made"


def test_an_object_of_a_checkpoint_calls_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "called"
    item: Any = SimpleNamespace(dest_index=SimpleNamespace(fqn="random"))
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.state_dict = {}
    for value, good in (({"step": 3, "state": torch.ones(2)}, True), (Hostile(mark), False)):
        content = io.BytesIO()
        torch.save([value], content)
        content.seek(0)
        with plain_pickles():
            if good:
                planner.load_bytes(item, content)
                assert planner.state_dict["random"][0]["step"] == 3
            else:
                with pytest.raises(UserError, match="an object of the checkpoint is none that vime writes"):
                    planner.load_bytes(item, content)
    assert not mark.exists()


def test_a_checkpoint_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "common.pt").write_bytes(b"x")
    check_owner(tmp_path)
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(tmp_path / "common.pt", 12345, -1)
    with pytest.raises(UserError, match=r"common.pt belongs to user 12345, not to you \(0\): copy the run if"):
        check_owner(tmp_path)
