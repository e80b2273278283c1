"""The control plane: small JSON facts that roles tell each other through the run's TCPStore.

The supervisor hosts the store (`Control.serve`); every other role is a client of it (`Control.connect`). Nothing here
is pickled, and what is read is validated before it is used. A wait blocks in the server, so it costs nothing while it
lasts and ends as soon as the value is there.

torch's store asks nobody who they are: whoever reaches its port can write to it. So every value is signed with the
run's token (`seal`), and one that is not counts as absent: it is said in the log, and named when a wait for the true
one runs out. What this cannot prevent: a stranger can make the store forget values or fill the supervisor's memory,
which ends the run by a named wait, and can read what it holds, none of which is secret. The process groups of torch
that are built on `store` meet through unsigned values, and gloo and NCCL know no authentication: a stranger who is
faster than a rank could take its place in a group while it forms. They bind to the run's interface, and need nodes and
a network that strangers do not share where that matters.

One connection does one thing at a time: while a thread waits in `get`, `next_message`, `wait_version` or
`wait_consumed`, every other call on the same `Control` waits behind it, and Python runs no signal handler of that
thread. A second thread therefore uses its own connection, from `Control.clone()`; asyncio code calls the waits through
`asyncio.to_thread` on a clone that is only used there.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from vime.buffer.seal import Seal
from vime.config.section import Strict
from vime.errors import BadMessage, ControlLost, Unsigned, WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import PrefixStore

    from vime.run.role import Role

BACKLOG = 4096
"""Connections that may be waiting to be accepted: every rank of a large run connects in the same second."""
MAX_FALSE = 1000
"""Values of strangers that one connection passes over before it gives up."""
FALSE_PAUSE = 0.2
"""Seconds between two looks at a key that holds a stranger's value."""


class EngineAddress(Strict):
    """Where one engine answers. `incarnation` counts its restarts from 0."""

    index: int = Field(ge=0)
    url: str
    world_size: int = Field(ge=1)
    incarnation: int = Field(ge=0)


class BatchMessage(Strict):
    """The generator announces the batch of one step: `manifest` is its file name, of `bytes` bytes."""

    kind: Literal["batch"] = "batch"
    step: int = Field(ge=1)
    manifest: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    bytes: int = Field(ge=1)


class EngineMessage(Strict):
    """A restarted engine waits for the current weights."""

    kind: Literal["engine"] = "engine"
    index: int = Field(ge=0)
    incarnation: int = Field(ge=0)


class StopMessage(Strict):
    """The supervisor asks the trainer to stop after the step that it is in, with a checkpoint or without."""

    kind: Literal["stop"] = "stop"
    save: bool
    reason: str


class Beat(Strict):
    """A rank's sign of life. Times are Unix times by the clock of its node."""

    time: float
    node: str
    place: str
    """Where it stands."""
    since: float
    """When it came there."""


Message = Annotated[BatchMessage | EngineMessage | StopMessage, Field(discriminator="kind")]
_MESSAGE: TypeAdapter[BatchMessage | EngineMessage | StopMessage] = TypeAdapter(Message)
_T = TypeVar("_T")


def parse_message(data: bytes) -> BatchMessage | EngineMessage | StopMessage:
    """A message from its JSON, as trainer rank 0 passes it to the other ranks. Raises BadMessage."""
    try:
        return _MESSAGE.validate_json(data)
    except ValidationError as error:
        raise BadMessage(f"not a message: {data[:80]!r}") from error


class Control:
    """One connection to the run's store, in the name space of one attempt.

    Every method raises `ControlLost` when the store has ended, and `BadMessage` when a value has the wrong shape.
    """

    def __init__(self, store: PrefixStore, seal: Seal) -> None:
        self._store = store
        self._seal = seal
        self._false = 0
        """Values of strangers met so far."""
        self._newest: dict[str, int] = {}
        """What each growing number has reached: an older value of this run, stored again by a stranger, is no news."""
        self._posted = 0
        """Places of the inbox that are known to be taken."""

    @classmethod
    def serve(cls, host: str, attempt: int, token: str) -> tuple[Control, int]:
        """Host the store on a free port of `host`, and on no other address of this machine.

        Returns a connection to it and the port. The store lives as long as this `Control`. token: the run's.
        """
        from torch.distributed import PrefixStore, TCPStore

        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        port: int = listener.getsockname()[1]
        # The store takes over the descriptor: bound by us, so it listens on `host` only and on a port that was never
        # free in between. Left to itself it listens on every interface.
        server = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=_delta(60)
        )
        return cls(PrefixStore(_prefix(attempt), server), Seal.of(token, attempt)), port

    @classmethod
    def connect(cls, role: Role, timeout: float) -> Control:
        """Join the store that `role` names, waiting for it at most `timeout` seconds.

        The same bound holds for the requests of process groups that are built on `store`.
        """
        from torch.distributed import DistError, PrefixStore, TCPStore

        try:
            client = TCPStore(role.store_host, role.store_port, wait_for_workers=False, timeout=_delta(timeout))
        except DistError as error:
            where = f"{role.store_host}:{role.store_port}"
            raise WaitTimeout(f"waited {timeout:g} s for the run's store at {where}: {_first_line(error)}") from error
        return cls(PrefixStore(_prefix(role.attempt), client), Seal.of(role.token, role.attempt))

    def clone(self) -> Control:
        """A second connection to the same store, for another thread."""
        with _reporting():
            return Control(self._store.clone(), self._seal)  # type: ignore[attr-defined]

    @property
    def store(self) -> PrefixStore:
        """The store below, unsigned: for `torch.distributed.init_process_group`, through a `PrefixStore` of its own."""
        return self._store

    # Values

    def put(self, key: str, value: Any) -> None:
        """Set `key` to a JSON value (no NaN: it is not JSON)."""
        text = self._sealed(key, value)
        with _reporting():
            self._store.set(key, text)

    def claim(self, key: str, value: Any) -> None:
        """As `put`, but the first value of this run stays."""
        text, seen = self._sealed(key, value).encode(), b""
        while True:
            with _reporting():
                now = self._store.compare_set(key, seen, text)  # type: ignore[arg-type]
            if now == text or self._open(key, now) is not None:
                return
            seen = now

    def get(self, key: str, timeout: float, what: str, said: float | None = None) -> Any:
        """The value of `key`, waiting for it at most `timeout` seconds; then `WaitTimeout` naming `what`.

        said: what the error gives as the timeout. Raises Unsigned instead when all that came is a stranger's.
        """
        said = timeout if said is None else said
        deadline = time.monotonic() + timeout
        while True:
            self._wait(key, max(deadline - time.monotonic(), 0.0), what, said)
            with _reporting():
                raw = self._store.get(key)
            text = self._open(key, raw)
            if text is not None:
                return _parsed(key, text)
            if time.monotonic() > deadline:
                raise Unsigned(
                    f"waited {said:g} s for {what}: the store's {key} is not signed with this run's token,"
                    " somebody else wrote it"
                )
            time.sleep(min(FALSE_PAUSE, timeout))

    def try_get(self, key: str) -> Any | None:
        """The value of `key`, or None when nobody of this run has set it yet."""
        with _reporting():
            raw = self._store.get(key) if self._store.check([key]) else None
        text = None if raw is None else self._open(key, raw)
        return None if text is None else _parsed(key, text)

    def _sealed(self, key: str, value: Any) -> str:
        return self._seal.close(key, json.dumps(value, allow_nan=False, separators=(",", ":")))

    def _open(self, key: str, raw: bytes) -> bytes | None:
        """The text that this run stored; None for a stranger's, of which MAX_FALSE are passed over."""
        try:
            return self._seal.open(key, raw)
        except Unsigned as error:
            self._false += 1
            if self._false > MAX_FALSE:
                raise
            if self._false in (1, 10, 100, MAX_FALSE):
                print(f"passed over: {error} (the {self._false}. such value)", file=sys.stderr, flush=True)
            return None

    # Addresses

    def publish_engine(self, address: EngineAddress) -> None:
        """Say where an engine answers; a restarted engine replaces its earlier address."""
        self.put(f"engine/{address.index}", address.model_dump())

    def engine(self, index: int, timeout: float) -> EngineAddress:
        """Where engine `index` answers now."""
        key = f"engine/{index}"
        address = _checked(key, EngineAddress, self.get(key, timeout, f"engine {index} to become ready"))
        if address.incarnation < self._newest.get(key, 0):
            raise BadMessage(f"the store's {key} is of incarnation {address.incarnation}, which has ended")
        self._newest[key] = address.incarnation
        return address

    def publish_router(self, url: str) -> None:
        """Say where the router answers."""
        self.put("router", url)

    def router(self, timeout: float) -> str:
        """The router's URL."""
        return _checked("router", str, self.get("router", timeout, "the router to become ready"))

    # Progress

    def publish_version(self, version: int) -> None:
        """The engines serve policy `version` from now on. One role publishes; versions only grow."""
        self._advance("version", version)

    def version(self) -> int | None:
        """The policy version that the engines serve, or None before the first."""
        return self._reached("version")

    def wait_version(self, at_least: int, timeout: float) -> int:
        """Wait until a version of `at_least` is served; returns the newest."""
        return self._reach("version", at_least, timeout, f"policy version {at_least} from the trainer")

    def publish_consumed(self, step: int) -> None:
        """The batches up to `step` are trained and will not be read again. Published by trainer rank 0."""
        self._advance("consumed", step)

    def consumed(self) -> int | None:
        """The last step whose batch is trained, or None before the first."""
        return self._reached("consumed")

    def wait_consumed(self, at_least: int, timeout: float, what: str) -> int:
        """Wait until the batch of step `at_least` is trained; returns the newest such step."""
        return self._reach("consumed", at_least, timeout, what)

    # The trainer's inbox

    def post(self, message: Message | dict[str, Any]) -> int:
        """Append a message to the trainer's inbox; returns its position, from 0."""
        value = _checked("inbox", _MESSAGE, message).model_dump()
        # The first place that nobody has taken. A counter in the store could be moved by strangers.
        while True:
            key = f"inbox/{self._posted}"
            text = self._sealed(key, value)
            with _reporting():
                taken = self._store.compare_set(key, "", text)
            self._posted += 1
            if taken == text.encode():
                return self._posted - 1
            self._open(key, taken)

    def next_message(
        self, position: int, timeout: float, what: str
    ) -> BatchMessage | EngineMessage | StopMessage | None:
        """Message `position` of the inbox (from 0), waiting for it at most `timeout` seconds; None for a stranger's."""
        key = f"inbox/{position}"
        self._wait(key, timeout, what)
        with _reporting():
            raw = self._store.get(key)
        text = self._open(key, raw)
        return None if text is None else _checked(key, _MESSAGE, _parsed(key, text))

    def posted(self) -> int:
        """How many places of the inbox are taken."""
        with _reporting():
            while self._store.check([f"inbox/{self._posted}"]):
                self._posted += 1
        return self._posted

    # Heartbeats

    def beat(self, role: str, rank: int, beat: Beat) -> None:
        """Say that rank `rank` of `role` is alive, and where it stands."""
        self.put(f"beat/{role}/{rank}", beat.model_dump())

    def beats(self, role: str, count: int) -> dict[int, Beat]:
        """The last beat of each rank of `count` that ever beat. One question a rank: for when something is wrong."""
        found = {rank: self.try_get(f"beat/{role}/{rank}") for rank in range(count)}
        return {rank: _checked(f"beat/{role}/{rank}", Beat, beat) for rank, beat in found.items() if beat is not None}

    # A number that only grows. `name` holds the newest, and there is one key `name/<n>` a value, because a wait can
    # only be for a key to exist. The newest is set first: who waited for `name/<n>` must not read an older one.

    def _advance(self, name: str, value: int) -> None:
        previous = self._reached(name)
        if previous is not None and value < previous:
            raise ValueError(f"{name} cannot go back from {previous} to {value}")
        self.put(name, value)
        self._newest[name] = value
        for step in range(value if previous is None else previous + 1, value + 1):
            self.put(f"{name}/{step}", True)

    def _reached(self, name: str) -> int | None:
        value = self.try_get(name)
        return self._newest.get(name) if value is None else self._grown(name, value)

    def _grown(self, name: str, value: Any) -> int:
        newest = max(_checked(name, int, value), self._newest.get(name, 0))
        self._newest[name] = newest
        return newest

    def _reach(self, name: str, at_least: int, timeout: float, what: str) -> int:
        deadline = time.monotonic() + timeout
        newest = self._grown(name, self.get(name, timeout, what))
        if newest >= at_least:
            return newest
        # Only the first value published may lie above values that have no key; it was below, so the key will come.
        self.get(f"{name}/{at_least}", max(deadline - time.monotonic(), 0.0), what, said=timeout)
        return max(at_least, self._grown(name, self.get(name, max(deadline - time.monotonic(), 1.0), what)))

    def _wait(self, key: str, timeout: float, what: str, said: float | None = None) -> None:
        from torch.distributed import DistStoreError

        try:
            with _reporting():
                # A wait of zero milliseconds would mean the store's own default.
                self._store.wait([key], _delta(max(timeout, 0.001)))
        except DistStoreError as error:
            raise WaitTimeout(f"waited {timeout if said is None else said:g} s for {what}") from error


def _parsed(key: str, text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadMessage(f"the store's {key} is not JSON: {text[:80]!r}") from error


def _checked(key: str, shape: type[_T] | TypeAdapter[_T], value: Any) -> _T:
    adapter = shape if isinstance(shape, TypeAdapter) else TypeAdapter(shape)
    try:
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise BadMessage(f"the store's {key} has the wrong shape: {place or 'value'}: {problem['msg']}") from error


@contextmanager
def _reporting() -> Iterator[None]:
    from torch.distributed import DistNetworkError

    try:
        yield
    except DistNetworkError as error:
        raise ControlLost(f"the run's store does not answer any more: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    # torch appends a C++ stack.
    return str(error).partition("\n")[0]


def _delta(seconds: float) -> timedelta:
    return timedelta(milliseconds=max(1, round(seconds * 1000)))


def _prefix(attempt: int) -> str:
    return f"attempt_{attempt}"
