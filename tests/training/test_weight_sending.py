"""What the trainer sends weights with: the order of streams, the engines' connections, NCCL's meeting point."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vime.buffer.control import EngineAddress
from vime.config.compose import compose
from vime.training.weights.engines import EngineFault, Fleet
from vime.training.weights.sync import PolicySource


def test_a_tensor_is_complete_on_one_stream_before_it_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks under two streams in turn; on a GPU nothing else orders what they do with one tensor."""
    log: list[str] = []
    current = ["packing"]

    class Tensor:
        def record_stream(self, stream: str) -> None:
            log.append(f"kept for {stream}")

    class Event:
        def record(self, stream: str) -> None:
            log.append(f"recorded on {stream}")

        def synchronize(self) -> None:
            log.append("waited")

    @contextmanager
    def stream(name: str) -> Iterator[None]:
        before, current[0] = current[0], name
        yield
        current[0] = before

    def exporter() -> Iterator[tuple[str, Any]]:
        for name in ("q", "k"):
            log.append(f"{name} gathered on {current[0]}")
            yield name, Tensor()

    for name, value in {
        "Stream": lambda: "its own", "Event": Event, "stream": stream,
        "current_stream": lambda: current[0], "synchronize": lambda: log.append("trained"),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    source = PolicySource.__new__(PolicySource)
    source._exporter = exporter()  # type: ignore[assignment]
    for name, _ in source:
        log.append(f"{name} packed")
        current[0] = "packing 2"
    first = ["q gathered on its own", "recorded on its own", "waited", "kept for packing", "q packed"]
    assert log[:6] == ["trained", *first]
    assert log[6:11] == ["k gathered on its own", "recorded on its own", "waited", "kept for packing 2", "k packed"]


def test_the_backend_follows_the_device() -> None:
    assert compose("local", "tiny_grpo", ["weights.backend=null"]).weights_backend == "gloo"
    assert compose("h200", "qwen3_4b_grpo", ["weights.backend=null"]).weights_backend == "nccl"
    assert compose("local", "tiny_grpo", ["weights.backend=gloo"]).weights_backend == "gloo"


@pytest.mark.parametrize(("path", "asked_again"), [("resume", True), ("pause", True), ("update_weights", False)])
def test_a_connection_that_was_reset_is_no_lost_engine(path: str, asked_again: bool) -> None:
    """The server breaks off at the second request, as one does that closes an idle connection at that moment."""
    listener = socket.create_server(("127.0.0.1", 0))
    requests: list[str] = []

    def answer(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                requests.append(data.decode().split()[1])
                if len(requests) == 2:
                    return
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    fleet = Fleet([EngineAddress(index=0, url=url, world_size=1, incarnation=0)], "token", 10)
    try:
        fleet.resume()
        if asked_again:
            {"resume": fleet.resume, "pause": fleet.pause}[path]()
            assert len(requests) == 3
        else:
            with pytest.raises(EngineFault, match="cannot be reached for /update_weights"):
                fleet.update_weights({})
            assert requests == ["/resume", "/update_weights"], "it may have been done"
    finally:
        fleet.close()
        listener.close()


def test_nccl_meets_without_a_port_and_gives_its_communicator_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from vime.training.weights import nccl_sender

    unique = bytes(range(128))
    monkeypatch.setattr(
        nccl_sender, "NCCLLibrary", lambda: SimpleNamespace(ncclGetUniqueId=lambda: SimpleNamespace(internal=unique))
    )
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    met: list[Any] = []
    group = SimpleNamespace(destroy=lambda: met.append("destroyed"))
    monkeypatch.setattr(nccl_sender, "uid_init_process_group", lambda *given: met.append(given) or group)
    asked: list[dict[str, Any]] = []
    client: Any = SimpleNamespace(init_weight_transfer_engine=asked.append)
    info = nccl_sender.NcclTrainerInitInfo(rank=0, world_size=3, timeout=5.0)
    source: Any = SimpleNamespace()
    transfer = nccl_sender.NcclTrainerTransfer.trainer_init(info, client=client, source=source)
    assert met == [(unique, 0, 3, 3)]
    [invitation] = asked
    assert base64.b64decode(invitation["nccl_unique_id_b64"]) == unique
    assert not {"master_address", "master_port"} & set(invitation)
    assert (invitation["world_size"], invitation["rank_offset"], invitation["packed"]) == (3, 1, True)
    json.dumps(invitation)
    transfer.shutdown()
    transfer.shutdown()
    assert met[1:] == ["destroyed"]


def test_an_engine_that_refuses_to_join_nccl_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vime.training.weights import nccl_sender

    monkeypatch.setattr(
        nccl_sender,
        "NCCLLibrary",
        lambda: SimpleNamespace(ncclGetUniqueId=lambda: SimpleNamespace(internal=bytes(128))),
    )
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    for_ever = threading.Event()
    monkeypatch.setattr(nccl_sender, "uid_init_process_group", lambda *given: for_ever.wait(60))

    def refuse(invitation: dict[str, Any]) -> None:
        raise EngineFault("engine 1 answered /init_weight_transfer_engine with 500")

    info = nccl_sender.NcclTrainerInitInfo(rank=0, world_size=3, timeout=50.0)
    client: Any = SimpleNamespace(init_weight_transfer_engine=refuse)
    source: Any = SimpleNamespace()
    with pytest.raises(EngineFault, match="engine 1 answered"):
        nccl_sender.NcclTrainerTransfer.trainer_init(info, client=client, source=source)
    for_ever.set()
