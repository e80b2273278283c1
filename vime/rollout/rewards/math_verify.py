"""math_verify in processes of their own.

Its time limits are alarms, which only work in a process's main thread, and sympy can hang. So each call runs in the
main thread of a worker; one that does not answer is killed and replaced.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

ALARM_SECONDS = 5
"""math_verify's own limit for parsing and for comparing."""


def score_math(response: str, answer: str) -> float:
    """1.0 when the response's final expression equals the reference, else 0.0. Runs in a worker.

    A reference that math_verify cannot read is an error, not a wrong answer.
    """
    from math_verify import parse, verify

    gold = parse(answer, parsing_timeout=ALARM_SECONDS)
    if not gold:
        raise ValueError(f"math_verify finds no expression in the reference answer {answer!r}")
    return float(verify(gold, parse(response, parsing_timeout=ALARM_SECONDS), timeout_seconds=ALARM_SECONDS))


class MathScorer:
    """A pool of workers that score. `close` ends them."""

    def __init__(self, workers: int, timeout: float) -> None:
        self._workers = workers
        self._timeout = timeout
        self._pool: ProcessPoolExecutor | None = None
        # No more calls than workers are handed over, so that the time limit counts work and not waiting.
        self._free = asyncio.Semaphore(workers)

    async def score(self, response: str, answer: str) -> float:
        """Raises TimeoutError when it takes too long, ValueError for a reference that cannot be read."""
        async with self._free:
            if self._pool is None:
                self._pool = ProcessPoolExecutor(self._workers, multiprocessing.get_context("spawn"))
            pool = self._pool
            loop = asyncio.get_running_loop()
            try:
                return await asyncio.wait_for(loop.run_in_executor(pool, score_math, response, answer), self._timeout)
            except TimeoutError:
                self._drop(pool)
                raise
            except BrokenProcessPool as error:
                self._drop(pool)
                raise TimeoutError("its worker was ended") from error

    def close(self) -> None:
        """Ends the workers."""
        if self._pool is not None:
            self._drop(self._pool)

    def _drop(self, pool: ProcessPoolExecutor) -> None:
        if self._pool is pool:
            self._pool = None
        # shutdown() waits for a worker that hangs, so the workers are killed first.
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
