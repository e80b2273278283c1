"""What transformers says: the reference for the engines' logprobs."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def logprobs(
    model: Path, prompt: list[int], response: NDArray[np.int32], temperature: float = 1.0
) -> NDArray[np.float32]:
    """[R] float32 logprobs of `response` after `prompt`, of the distribution at `temperature`."""
    ids = torch.tensor([[*prompt, *response.tolist()]])
    with torch.no_grad():
        logits = load(model)(ids).logits[0, len(prompt) - 1 : -1]
    chosen = torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt) :, None])
    return np.asarray(chosen[:, 0])


@lru_cache(maxsize=4)
def load(model: Path) -> Any:
    """The network of a folder that does not change, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
