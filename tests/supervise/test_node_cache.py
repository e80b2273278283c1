"""Where a rank's libraries keep compiled kernels."""

import tempfile
from pathlib import Path

import pytest

from vime.supervise.node_cache import CACHES, node_caches


def test_a_folder_of_the_user_on_the_node_and_never_one_that_others_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = node_caches({"VLLM_CACHE_ROOT": "/shared/seed"})
    assert set(first) == set(CACHES) - {"VLLM_CACHE_ROOT"}
    [folder] = {Path(path).parent for path in first.values()}
    assert (folder.parent, folder.stat().st_mode & 0o777) == (tmp_path, 0o700)
    assert node_caches({})["TRITON_CACHE_DIR"] == first["TRITON_CACHE_DIR"]
    folder.chmod(0o777)
    assert Path(node_caches({})["TRITON_CACHE_DIR"]).parent not in (folder, tmp_path)
