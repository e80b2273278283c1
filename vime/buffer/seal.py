"""What proves that this run wrote a value: the store that holds it takes values of anyone who reaches its port."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from vime.errors import Unsigned
from vime.run.tokens import store_key

_SIGNATURE = 64
"""Hex digits before the value."""


@dataclass(frozen=True)
class Seal:
    """HMAC-SHA256 over attempt, key and value, so that a signed value holds under its own key and attempt only."""

    secret: bytes
    attempt: int

    @classmethod
    def of(cls, token: str, attempt: int) -> Seal:
        """The seal of one attempt of the run whose token this is."""
        return cls(store_key(token), attempt)

    def close(self, key: str, text: str) -> str:
        """`text` as it is stored under `key`."""
        return self._sign(key, text.encode()) + text

    def open(self, key: str, raw: bytes) -> bytes:
        """The text that was stored under `key`. Raises Unsigned when another than this run stored it there."""
        text = raw[_SIGNATURE:]
        if not hmac.compare_digest(raw[:_SIGNATURE], self._sign(key, text).encode()):
            raise Unsigned(f"the store's {key} is not signed with this run's token: somebody else wrote it")
        return text

    def _sign(self, key: str, text: bytes) -> str:
        return hmac.digest(self.secret, f"{self.attempt}\0{key}\0".encode() + text, hashlib.sha256).hex()
