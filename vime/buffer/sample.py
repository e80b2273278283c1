"""What generation hands to training: one response with all that is needed to train on it, and the group it is in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Sample:
    """One prompt with one response. T tokens, of which the last R = T - prompt_length are the response.

    Raises ValueError when the arrays do not fit together.
    """

    token_ids: NDArray[np.int32]
    """[T] prompt and response, as sampled: never tokenised again."""
    prompt_length: int
    """Tokens of the prompt, 0 to T."""
    loss_mask: NDArray[np.uint8]
    """[R] 1 where the policy chose the token and is trained on it, 0 where a tool or a template did."""
    rollout_logprobs: NDArray[np.float32]
    """[R] natural log-probability the engine sampled each token with. Any value, NaN too, where the mask is 0."""
    versions: NDArray[np.int32]
    """[K, 2] rows (first response position, policy version): the version holds from there to the next row. Empty
    when the response is; otherwise the first row starts at 0 and the positions grow."""
    reward: float
    """Scalar reward of the response."""
    finish_reason: str
    """Why the response ended: stop, length, truncated, abort or what the engine said."""
    routed_experts: NDArray[np.integer[Any]] | None = None
    """[layers, max(T-1, 0), top-k] expert ids that the engine chose in each layer with experts, at each position that
    predicts a token; None without routes. Layers come first, so that a pipeline stage reads its own and no others."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """[R] natural log-probability that a teacher gives each token. Any value where the mask is 0. None without one."""
    first_route: int = 0
    """Position from which `routed_experts` holds what the engine chose; before it the values mean nothing."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """JSON facts for reports and custom logic."""

    def __post_init__(self) -> None:
        total, response = len(self.token_ids), len(self.token_ids) - self.prompt_length
        if not 0 <= self.prompt_length <= total:
            raise ValueError(f"prompt_length {self.prompt_length} is outside the {total} tokens of the sample")
        for name, dtype, shape in (
            ("token_ids", np.int32, (total,)),
            ("loss_mask", np.uint8, (response,)),
            ("rollout_logprobs", np.float32, (response,)),
            ("versions", np.int32, (len(self.versions), 2)),
            ("teacher_logprobs", np.float32, (response,)),
        ):
            value = getattr(self, name)
            if value is not None and (value.dtype != dtype or value.shape != shape):
                raise ValueError(f"{name} is {value.dtype}{list(value.shape)}, expected {np.dtype(dtype)}{list(shape)}")
        if response and self.loss_mask.max() > 1:
            raise ValueError("loss_mask has values other than 0 and 1")
        if (len(self.versions) == 0) != (response == 0):
            raise ValueError(f"{len(self.versions)} version ranges for {response} response tokens")
        starts = self.versions[:, 0]
        if len(starts) and (starts[0] != 0 or starts[-1] >= response or (starts[1:] <= starts[:-1]).any()):
            raise ValueError(f"versions start at {starts.tolist()}: they must grow from 0 within {response} tokens")
        if not np.isfinite(self.reward):
            raise ValueError(f"reward is {self.reward}")
        routes, rows = self.routed_experts, max(total - 1, 0)
        if routes is not None and (routes.ndim != 3 or routes.shape[1] != rows or routes.dtype.kind not in "iu"):
            raise ValueError(
                f"routed_experts is {routes.dtype}{list(routes.shape)}, expected integers [layers, {rows}, top-k]"
                f" for {total} tokens"
            )
        if not 0 <= self.first_route <= (0 if routes is None else rows):
            raise ValueError(f"first_route is {self.first_route}, of {0 if routes is None else rows} positions")

    @property
    def response_length(self) -> int:
        """R, tokens of the response."""
        return len(self.token_ids) - self.prompt_length

    @property
    def newest_version(self) -> int:
        """The newest policy version that generated a token; -1 for an empty response."""
        return int(self.versions[:, 1].max()) if len(self.versions) else -1

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that generated a token; -1 for an empty response. `max_staleness` bounds it."""
        return int(self.versions[:, 1].min()) if len(self.versions) else -1

    def version_per_token(self) -> NDArray[np.int32]:
        """[R] int32: the policy version that generated each response token."""
        lengths = np.diff(np.append(self.versions[:, 0], self.response_length))
        return np.repeat(self.versions[:, 1], lengths)


@dataclass(frozen=True, eq=False)
class Group:
    """The responses to one prompt, compared with each other by group-relative advantages."""

    uid: str
    """Identity of the prompt."""
    index: int
    """Position in the prompt stream, from 0 and over epochs: no two groups of a run share it."""
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError(f"group {self.uid} has no samples")
