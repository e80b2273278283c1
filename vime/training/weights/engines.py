"""The engines as the trainer sees them: each is called at its own address, never through the router."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from vime.buffer.control import EngineAddress
from vime.errors import WaitTimeout
from vime.run.http_client import Client, RequestRefused, Unavailable
from vime.run.tokens import engine_token

ONCE = frozenset({"init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"})
"""Calls that must not be made twice: each goes over a connection of its own, which no server has closed meanwhile."""
_T = TypeVar("_T")


class EngineFault(RuntimeError):
    """An engine broke while it answered, or does not answer. The message names the engine and the call."""


class EngineRefused(Exception):
    """An engine that is well refused a call: it would refuse it again. The message names the engine and the call."""


@dataclass(frozen=True)
class ProbeResult:
    """What one engine says of a probe prompt of P tokens.

    logprobs: P - 1 natural log-probabilities of the prompt's tokens after the first.
    token: the token that it generates next; token_logprob: that token's log-probability, by way of the prefix cache.
    """

    logprobs: list[float]
    token: int
    token_logprob: float


class Fleet:
    """All engines of the run, called side by side. Implements vLLM's VLLMWeightSyncClient for the whole fleet."""

    def __init__(self, addresses: Sequence[EngineAddress], token: str, timeout: float) -> None:
        """token: the run's secret. timeout: seconds one call may take."""
        self.addresses = tuple(addresses)
        self.version: int | None = None
        self._timeout = timeout
        self._tokens = {address.index: engine_token(token, address.index) for address in self.addresses}
        self._client = Client()
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(addresses)), thread_name_prefix="engine")

    @property
    def world_size(self) -> int:
        """Workers of all engines."""
        return sum(address.world_size for address in self.addresses)

    def close(self) -> None:
        """Drop the connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    # vLLM's VLLMWeightSyncClient

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let every worker join the transfer group: the sender is rank 0, then engine after engine."""
        offsets, offset = {}, 1
        for address in self.addresses:
            offsets[address.index] = offset
            offset += address.world_size
        self._all(
            lambda address: self._post(
                address,
                "init_weight_transfer_engine",
                json={"init_info": {**init_info, "rank_offset": offsets[address.index]}},
            )
        )

    def start_weight_update(self) -> None:
        """Make every engine ready to receive."""
        self._all(lambda address: self._post(address, "start_weight_update"))

    def update_weights(self, update_info: Any) -> None:
        """Let every engine receive the tensors that are named; returns when they have them."""
        self._all(lambda address: self._post(address, "update_weights", json={"update_info": update_info}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Put the received weights in service, labelled with the policy version that is being sent."""
        label = weight_version if weight_version is not None else str(self.version)
        self._all(lambda address: self._post(address, "finish_weight_update", json={"weight_version": label}))

    # the rest of an update

    def pause(self) -> None:
        """Freeze generation; running requests stay and go on after `resume`."""
        self._all(lambda address: self._post(address, "pause", params={"mode": "keep"}))

    def resume(self) -> None:
        """Go on generating."""
        self._all(lambda address: self._post(address, "resume"))

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes, which belong to the old weights. Raises EngineFault when an engine could not."""

        def reset(address: EngineAddress) -> None:
            answer = self._post(address, "reset_prefix_cache", params={"reset_running_requests": "true"})
            if answer.get("success") is not True:
                raise EngineFault(f"engine {address.index} kept its prefix cache: {answer}")

        self._all(reset)

    def versions(self) -> list[str]:
        """The policy version that each engine says it serves."""
        return self._all(lambda address: str(self._call(address, "GET", "weight_info").get("weight_version")))

    def probe(self, token_ids: Sequence[int]) -> list[ProbeResult]:
        """Each engine's logprobs of a prompt, at temperature 1."""
        return self._all(lambda address: self._probe(address, list(token_ids)))

    def _probe(self, address: EngineAddress, token_ids: list[int]) -> ProbeResult:
        request = {
            "model": "policy",
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "return_token_ids": True,
        }
        scored = self._post(address, "v1/completions", json={**request, "prompt_logprobs": 0})
        # Asking for prompt logprobs makes vLLM pass its prefix cache by; this second request goes through it.
        sampled = self._post(address, "v1/completions", json={**request, "logprobs": 0})
        try:
            rows = scored["choices"][0]["prompt_logprobs"][1:]
            logprobs = [float(row[str(token)]["logprob"]) for row, token in zip(rows, token_ids[1:], strict=True)]
            choice = sampled["choices"][0]
            return ProbeResult(logprobs, int(choice["token_ids"][0]), float(choice["logprobs"]["token_logprobs"][0]))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineFault(f"engine {address.index} answered the probe in an unknown form: {error!r}") from error

    def _all(self, call: Callable[[EngineAddress], _T]) -> list[_T]:
        futures = [self._pool.submit(call, address) for address in self.addresses]
        return [future.result() for future in futures]

    def _post(self, address: EngineAddress, path: str, **rest: Any) -> dict[str, Any]:
        return self._call(address, "POST", path, **rest)

    def _call(
        self, address: EngineAddress, method: str, path: str, json: Any = None, params: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        token, once = self._tokens[address.index], path in ONCE
        try:
            answer = self._client.ask(method, f"{address.url}/{path}", token, self._timeout, json, params, once=once)
        except TimeoutError as error:
            raise WaitTimeout(
                f"waited {self._timeout:g} s for engine {address.index} at {address.url} to answer /{path}"
            ) from error
        except (Unavailable, RequestRefused) as error:
            if error.status is None:
                raise EngineFault(
                    f"engine {address.index} at {address.url} cannot be reached for /{path}: {error}"
                ) from error
            raise (EngineFault if error.status >= 500 else EngineRefused)(
                f"engine {address.index} answered /{path} with {error.status}: {error.text}"
            ) from error
        return answer if isinstance(answer, dict) else {}
