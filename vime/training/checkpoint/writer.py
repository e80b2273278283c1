"""How Megatron's distributed checkpoints reach the disk: by threads of the rank itself."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

THREADS = 2
"""Files, and threads that write them, of one rank."""


def save_strategy() -> FullyParallelSaveStrategyWrapper:
    """Megatron's torch_dist format, written by all replicas: each writes a share of what they all hold.

    One for the life of a process: it remembers the division.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return FullyParallelSaveStrategyWrapper(_ThreadedSave("torch_dist", 1, thread_count=THREADS), group, True)


class _ThreadedSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """The same files as Megatron's strategy, without its helper processes.

    Those serve saving in the background. A manager started by spawn imports the main module and torch again, which
    takes seconds, and the writers are forks of a process that has threads of NCCL or gloo. The rank waits for the end
    of the save anyway.
    """

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        # Where a queue is there already, no manager is started. A new one each time, free of an earlier failure's rest.
        filesystem_async._results_queue = queue.Queue()
        return super().async_save(sharded_state_dict, checkpoint_dir)

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        request: AsyncRequest = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        if request.async_fn is None:  # this rank has nothing to write
            return request

        def write(rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
            results.put(_write(writer, buckets))

        return request._replace(async_fn=write)


def _write(writer: filesystem_async.FileSystemWriterAsync, buckets: list[Any]) -> dict[int, Any] | Exception:
    """Write each bucket to its file: the results by bucket, or the first exception."""
    written: queue.Queue[tuple[int, Any]] = queue.Queue()
    counted: queue.Queue[int] = queue.Queue()  # the writer takes one when it is done
    for index in range(len(buckets)):
        counted.put(index)
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    with ThreadPoolExecutor(len(buckets)) as pool:
        for index, bucket in enumerate(buckets):
            pool.submit(writer.write_preloaded_data, transforms, index, bucket, written, counted, True)
    results = dict(written.get_nowait() for _ in buckets)
    return next((result for result in results.values() if isinstance(result, Exception)), results)
