"""The control plane with a real store, and with clients in other processes where that matters."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.buffer.made import connect
from vime.buffer.control import MAX_FALSE, BatchMessage, Control, EngineAddress, EngineMessage, StopMessage
from vime.buffer.seal import Seal
from vime.errors import BadMessage, ControlLost, Unsigned, WaitTimeout
from vime.training.heartbeat import Heartbeat
from vime.training.inbox import Inbox

CLIENT = "import sys; from tests.buffer.made import connect; c = connect(int(sys.argv[1])); "


@pytest.fixture
def served() -> tuple[Control, int]:
    return Control.serve("127.0.0.1", 1, "t")


def start(code: str, port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", CLIENT + code, str(port)], stderr=subprocess.DEVNULL)


def test_the_store_listens_on_the_given_address_only(served: tuple[Control, int]) -> None:
    _, port = served
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_a_value_crosses_processes_and_wakes_who_waits(served: tuple[Control, int]) -> None:
    control, port = served
    child = start("c.get('go', 60, 'go'); c.put('back', {'x': [1, None, 'é']})", port)
    try:
        assert control.try_get("back") is None
        control.put("go", 1)
        assert control.get("back", 60, "the child") == {"x": [1, None, "é"]}
    finally:
        assert child.wait(30) == 0


def test_a_wait_ends_with_the_value_and_not_with_a_polling_interval(served: tuple[Control, int]) -> None:
    control, port = served
    late: list[float] = []

    def wait() -> None:
        connection = connect(port)
        connection.put("waiting", 1)
        connection.get("value", 30, "the value")
        late.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    control.get("waiting", 30, "the thread")
    time.sleep(0.3)
    put = time.monotonic()
    control.put("value", 1)
    thread.join(30)
    assert late[0] - put < 0.2


def test_a_wait_that_runs_out_names_what_it_was_for(served: tuple[Control, int]) -> None:
    control, _ = served
    began = time.monotonic()
    with pytest.raises(WaitTimeout, match=r"^waited 0.3 s for the batch of step 4$"):
        control.next_message(0, 0.3, "the batch of step 4")
    assert 0.25 < time.monotonic() - began < 2
    control.put("after", 1)
    assert control.try_get("after") == 1, "the connection is whole after a wait that ran out"


def test_a_clone_works_while_another_connection_waits(served: tuple[Control, int]) -> None:
    control, port = served
    waiting = connect(port)
    other = waiting.clone()
    thread = threading.Thread(target=lambda: waiting.get("released", 20, "release"))
    thread.start()
    time.sleep(0.2)
    began = time.monotonic()
    assert other.try_get("nothing") is None
    assert time.monotonic() - began < 1
    control.put("released", True)
    thread.join(20)
    assert not thread.is_alive()


def test_the_end_of_the_store_ends_a_wait() -> None:
    code = (
        "from vime.buffer.control import Control; import time;"
        "c, p = Control.serve('127.0.0.1', 1, 't'); print(p, flush=True); time.sleep(99)"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        control = connect(int(server.stdout.readline()))
        threading.Timer(0.5, lambda: os.kill(server.pid, signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(ControlLost):
            control.get("never", 60, "nothing")
        assert time.monotonic() - began < 5
    finally:
        server.kill()
        server.wait()


def test_a_store_that_is_not_there_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(WaitTimeout, match=f"127.0.0.1:{port}"):
            connect(port, timeout=1.0)


def test_attempts_do_not_see_each_other(served: tuple[Control, int]) -> None:
    control, port = served
    control.put("key", 1)
    assert connect(port, attempt=2).try_get("key") is None
    assert connect(port, attempt=1).try_get("key") == 1


def test_addresses(served: tuple[Control, int]) -> None:
    control, _ = served
    first = EngineAddress(index=1, url="http://127.0.0.1:5", world_size=2, incarnation=0)
    control.publish_engine(first)
    assert control.engine(1, 1) == first
    again = first.model_copy(update={"incarnation": 1, "url": "http://127.0.0.1:6"})
    control.publish_engine(again)
    assert control.engine(1, 1) == again
    with pytest.raises(WaitTimeout, match="engine 0 to become ready"):
        control.engine(0, 1)
    control.publish_router("http://127.0.0.1:7")
    assert control.router(1) == "http://127.0.0.1:7"


def test_versions_start_anywhere_and_only_grow(served: tuple[Control, int]) -> None:
    control, _ = served
    assert control.version() is None
    with pytest.raises(WaitTimeout, match="policy version 0 from the trainer"):
        control.wait_version(0, 0.1)
    control.publish_version(20)
    assert control.version() == 20
    assert control.wait_version(7, 0.1) == 20
    with pytest.raises(WaitTimeout, match="policy version 21"):
        control.wait_version(21, 0.1)
    control.publish_version(24)
    assert [control.wait_version(v, 0.1) for v in (21, 22, 23, 24)] == [24] * 4
    with pytest.raises(ValueError, match="cannot go back from 24 to 23"):
        control.publish_version(23)


def test_a_waiter_never_gets_an_older_version_than_it_asked_for(served: tuple[Control, int]) -> None:
    control, port = served
    seen: list[tuple[int, int]] = []

    def follow() -> None:
        connection = connect(port)
        for version in range(300):
            seen.append((version, connection.wait_version(version, 30)))

    threads = [threading.Thread(target=follow) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(300):
        control.publish_version(version)
    for thread in threads:
        thread.join(60)
    assert len(seen) == 900
    assert all(got >= asked for asked, got in seen)


def test_messages_of_several_processes_all_arrive_in_each_ones_order(served: tuple[Control, int]) -> None:
    control, port = served
    children = [
        start(f"[c.post({{'kind': 'engine', 'index': {who}, 'incarnation': k}}) for k in range(40)]", port)
        for who in range(3)
    ]
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for position in range(120):
        message = control.next_message(position, 60, "a message")
        assert isinstance(message, EngineMessage)
        seen[message.index].append(message.incarnation)
    assert seen == {who: list(range(40)) for who in range(3)}
    assert [child.wait(30) for child in children] == [0, 0, 0]
    assert control.posted() == 120


def test_every_kind_of_message(served: tuple[Control, int]) -> None:
    control, _ = served
    sent = [
        BatchMessage(step=3, manifest="step_3.json", bytes=10),
        EngineMessage(index=0, incarnation=1),
        StopMessage(save=True, reason="time limit"),
    ]
    assert [control.post(message) for message in sent] == [0, 1, 2]
    assert [control.next_message(position, 1, "it") for position in range(3)] == sent


@pytest.mark.parametrize(
    "value",
    [
        {"kind": "batch", "step": 1, "manifest": "../../secret", "bytes": 4},
        {"kind": "batch", "step": "1", "manifest": "step_1.json", "bytes": 4},
        {"kind": "batch", "step": 0, "manifest": "step_0.json", "bytes": 4},
        {"kind": "engine", "index": 0, "incarnation": 0, "more": 1},
        {"kind": "exec"},
        {},
        [],
        None,
    ],
)
def test_what_is_read_is_validated(served: tuple[Control, int], value: object) -> None:
    control, _ = served
    with pytest.raises(BadMessage, match="inbox"):
        control.post(value)  # type: ignore[arg-type]
    control.put("inbox/0", value)
    with pytest.raises(BadMessage, match="inbox/0"):
        control.next_message(0, 1, "it")


def test_bytes_that_are_not_json_are_refused(served: tuple[Control, int]) -> None:
    control, _ = served
    control.store.set("version", Seal.of("t", 1).close("version", "\x80\x04K\x01."))  # a pickled 1
    with pytest.raises(BadMessage, match="version is not JSON"):
        control.version()
    control.put("router", 5)
    with pytest.raises(BadMessage, match="router has the wrong shape"):
        control.router(1)
    with pytest.raises(ValueError, match="JSON compliant"):
        control.put("x", float("nan"))


ENGINE = EngineAddress(index=0, url="http://10.0.0.1:5", world_size=1, incarnation=0)
FALSE_ENGINE = json.dumps({**ENGINE.model_dump(), "url": "http://10.6.6.6:5"})


def forgeries(key: str, text: str) -> dict[str, str]:
    """What a stranger who reads the store and does not know the token can put in the place of `key`."""
    return {
        "unsigned": text,
        "signed with another key": Seal.of("guessed", 1).close(key, text),
        "signed for another key": Seal.of("t", 1).close(f"{key}0", text),
        "signed in another attempt": Seal.of("t", 2).close(key, text),
        "another value under a true signature": Seal.of("t", 1).close(key, "0")[:64] + text,
        "nothing": "",
    }


@pytest.mark.parametrize("kind", forgeries("", ""))
def test_what_a_stranger_wrote_is_as_if_it_was_not_there(
    served: tuple[Control, int], kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    control, _ = served
    control.store.set("engine/0", forgeries("engine/0", FALSE_ENGINE)[kind])
    assert control.try_get("engine/0") is None
    assert "the store's engine/0 is not signed with this run's token" in capfd.readouterr().err
    with pytest.raises(Unsigned, match=r"^waited 1 s for engine 0 to become ready: the store's engine/0 is not sig"):
        control.engine(0, 1)
    control.claim("engine/0", ENGINE.model_dump())  # the first of this run's values
    assert control.engine(0, 1) == ENGINE
    control.claim("engine/0", {})
    assert control.engine(0, 1) == ENGINE


def test_a_wait_goes_on_past_what_a_stranger_wrote(served: tuple[Control, int]) -> None:
    control, port = served
    control.store.set("engine/0", FALSE_ENGINE)
    threading.Timer(0.5, lambda: connect(port).publish_engine(ENGINE)).start()
    assert control.engine(0, 30) == ENGINE


def test_an_older_value_of_this_run_is_no_news(served: tuple[Control, int]) -> None:
    control, _ = served
    control.publish_version(1)
    control.publish_engine(ENGINE)
    old = {key: control.store.get(key) for key in ("version", "engine/0")}
    control.publish_version(2)
    control.publish_engine(ENGINE.model_copy(update={"incarnation": 1}))
    assert control.engine(0, 1).incarnation == 1
    for key, value in old.items():
        control.store.set(key, value)
    assert control.version() == 2
    assert control.wait_version(2, 1) == 2
    with pytest.raises(BadMessage, match="incarnation 0, which has ended"):
        control.engine(0, 1)


def test_messages_of_strangers_are_passed_over_and_bounded(served: tuple[Control, int]) -> None:
    control, port = served
    stop = json.dumps(StopMessage(save=False, reason="mine").model_dump())
    for position, text in enumerate(forgeries("inbox/0", stop).values()):
        if text:
            control.store.set(f"inbox/{position}", text)
    control.store.set("inbox/posted", "99")
    sent = BatchMessage(step=1, manifest="step_1.json", bytes=1)
    assert connect(port).post(sent) == 5
    copied = control.store.get("inbox/5")
    control.store.set("inbox/6", copied)  # said again
    inbox = Inbox(connect(port), 0.5)
    assert inbox.next("a batch") == sent
    with pytest.raises(WaitTimeout, match=r"waited 0.5 s for a batch"):
        inbox.next("a batch")
    for position in range(7, 8 + MAX_FALSE):
        control.store.set(f"inbox/{position}", "{}")
    with pytest.raises(Unsigned, match="inbox/"):
        inbox.next("a batch")


def test_signs_of_life_say_where_a_rank_stands(served: tuple[Control, int]) -> None:
    control, port = served
    assert control.beats("trainer", 2) == {}
    heartbeat = Heartbeat(connect(port), 1, interval=0.05)
    control.get("beat/trainer/1", 10, "a beat")
    heartbeat.at("step 3")
    deadline = time.monotonic() + 10
    while control.beats("trainer", 2)[1].place != "step 3":
        assert time.monotonic() < deadline
    first = control.beats("trainer", 2)
    assert list(first) == [1]
    assert first[1].time == pytest.approx(time.time(), abs=5)
    while control.beats("trainer", 2) == first:
        assert time.monotonic() < deadline
    heartbeat.close()
