"""torch, imported when it is first used: write `from vime.algorithms.lazy_torch import torch`.

The login node reads the names of losses and advantages from the modules that hold them. It computes none, and torch
takes seconds to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            value = getattr(torch, name)
            setattr(self, name, value)  # later uses find it here
            return value

    torch = _Torch()
