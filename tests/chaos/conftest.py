from __future__ import annotations

from tests.supervise.conftest import start

__all__ = ["start"]
