import socket
import tempfile

import pytest

from vime.errors import UserError
from vime.run.network import check_temporary_folder, reserve_port


def test_a_reserved_port_can_be_served_on_again_and_again_and_is_given_to_nobody_else() -> None:
    reserved = reserve_port("127.0.0.1")
    for _ in range(2):
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", reserved.port))
        server.listen()
        with socket.create_connection(("127.0.0.1", reserved.port), timeout=5):
            server.accept()[0].close()
        server.close()
    others = [socket.create_server(("127.0.0.1", 0)) for _ in range(200)]
    assert reserved.port not in {other.getsockname()[1] for other in others}
    for other in others:
        other.close()
    assert reserved.url == f"http://127.0.0.1:{reserved.port}"
    reserved.holder.close()


def test_a_folder_in_which_no_socket_fits_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would give up after two minutes without naming TMPDIR."""
    monkeypatch.setattr(tempfile, "tempdir", "/scratch/" + "x" * 62)
    with pytest.raises(UserError, match=r"^TMPDIR=/scratch/x+ has 71 characters on .* at most 70, such as cluster"):
        check_temporary_folder({})
    check_temporary_folder({"TMPDIR": "/tmp"})
    monkeypatch.setattr(tempfile, "tempdir", "/scratch/" + "x" * 61)
    check_temporary_folder({})
    with pytest.raises(UserError, match="has 80 characters"):
        check_temporary_folder({"TMPDIR": "/" + "y" * 79})
