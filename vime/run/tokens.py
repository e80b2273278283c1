"""The secrets of a run: one random token, and what is derived from it, so that nobody holds more than they need.

The derivation (HMAC-SHA256 of a purpose, keyed with the token) cannot be turned back: who gets hold of an engine's
token has that engine, not the run.
"""

from __future__ import annotations

import hashlib
import hmac


def _derived(token: str, purpose: str) -> bytes:
    return hmac.digest(token.encode(), purpose.encode(), hashlib.sha256)


def generation_token(token: str) -> str:
    """What every engine takes for generation alone: the router chooses the engine, so all have the same."""
    return _derived(token, "generation").hex()


def engine_token(token: str, index: int) -> str:
    """What engine `index` takes for everything, and no other engine takes."""
    return _derived(token, f"engine/{index}").hex()


def router_token(token: str) -> str:
    """What the proxy before the router takes."""
    return _derived(token, "router").hex()


def store_key(token: str) -> bytes:
    """The key with which values of the run's store are signed."""
    return _derived(token, "store")
