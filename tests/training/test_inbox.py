"""Messages come in order, and a request to stop does not wait for the batches before it."""

from __future__ import annotations

import pytest

from vime.buffer.control import BatchMessage, Control, EngineMessage, StopMessage
from vime.errors import WaitTimeout
from vime.training.inbox import Inbox


def batch(step: int) -> BatchMessage:
    """An announcement."""
    return BatchMessage(step=step, manifest=f"step_{step}.json", bytes=1)


def test_messages_in_order() -> None:
    control, _ = Control.serve("127.0.0.1", 1, "t")
    inbox = Inbox(control, 5.0)
    sent = [batch(1), EngineMessage(index=0, incarnation=1), batch(2)]
    for message in sent[:2]:
        control.post(message)
    assert inbox.next("a batch") == sent[0]
    control.post(sent[2])
    assert [inbox.next("a batch"), inbox.next("a batch")] == sent[1:]


def test_a_stop_overtakes_batches() -> None:
    control, _ = Control.serve("127.0.0.1", 1, "t")
    inbox = Inbox(control, 5.0)
    for step in (1, 2, 3):
        control.post(batch(step))
    assert inbox.next("a batch") == batch(1)
    stop = StopMessage(save=True, reason="time is up")
    control.post(stop)
    assert inbox.next("a batch") == stop
    assert inbox.next("a batch") == stop, "whoever asks next hears of it too"


def test_one_type_is_waited_for_and_the_rest_is_kept() -> None:
    control, _ = Control.serve("127.0.0.1", 1, "t")
    inbox = Inbox(control, 5.0)
    engine = EngineMessage(index=0, incarnation=1)
    for message in (batch(1), engine, batch(2)):
        control.post(message)
    assert inbox.next("an engine", only=EngineMessage) == engine
    assert [inbox.next("a batch"), inbox.next("a batch")] == [batch(1), batch(2)]


def test_a_wait_is_bounded_and_named() -> None:
    control, _ = Control.serve("127.0.0.1", 1, "t")
    with pytest.raises(WaitTimeout, match=r"waited 0\.05 s for the batch of step 1"):
        Inbox(control, 0.05).next("the batch of step 1")
