"""Weights over NCCL, the trainer's side: vLLM's own sender, that meets the engines without a port of its own.

vLLM's meets in a store on a port number that it is told, which somebody else may take before. Here NCCL makes its own
address and a secret (`ncclGetUniqueId`; it listens on the run's interface), and the engines learn it with the call that
asks them to join.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.weight_transfer.base import TrainerInitInfo, VLLMWeightSyncClient, WeightSource
from vllm.distributed.weight_transfer.nccl_common import (
    NCCLWeightTransferInitInfo,
    uid_init_process_group,
    worker_init_payload,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

from vime.errors import WaitTimeout

_T = TypeVar("_T")


@dataclass
class NcclTrainerInitInfo(TrainerInitInfo):
    """How many processes meet (sender and workers), and how many seconds they may take."""

    backend: ClassVar[str] = "nccl"
    world_size: int
    timeout: float


class NcclTrainerTransfer(NCCLTrainerWeightTransferEngine):
    """Sends a WeightSource to all engines in packed broadcasts from trainer rank 0."""

    init_info_cls = NcclTrainerInitInfo  # type: ignore[assignment]

    @classmethod
    def trainer_init(  # type: ignore[override]
        cls, init_info: NcclTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> NcclTrainerTransfer:
        """Meet the engines' workers in a communicator. Ranks other than the sender only take part in the gathering.

        Raises what an engine answered instead of joining, and WaitTimeout.
        """
        assert source is not None
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if not init_info.is_sender:
            return engine
        unique = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        invitation = worker_init_payload(
            NCCLWeightTransferInitInfo(
                nccl_unique_id_b64=base64.b64encode(unique).decode(),
                rank_offset=1,
                world_size=init_info.world_size,
                packed=engine.packed,
                packed_buffer_size_bytes=engine.packed_buffer_size_bytes,
                packed_num_buffers=engine.packed_num_buffers,
            )
        )
        device = torch.accelerator.current_device_index()
        answer = _beside(lambda: client.init_weight_transfer_engine(invitation))
        group = _beside(lambda: uid_init_process_group(unique, 0, init_info.world_size, device))
        done, waiting = wait([answer, group], init_info.timeout, FIRST_EXCEPTION)
        for ended in done:
            ended.result()
        if waiting:
            raise WaitTimeout(f"waited {init_info.timeout:g} s for the engines' workers to meet the trainer in NCCL")
        engine.model_update_group = group.result()
        return engine

    def shutdown(self) -> None:
        """Give the communicator back: each holds some 100 MB of GPU memory on every rank."""
        if self.model_update_group is not None:
            self.model_update_group.destroy()
        super().shutdown()


def _beside(call: Callable[[], _T]) -> Future[_T]:
    """The result of `call` in a thread that does not hold up the end of this process: NCCL waits in C, for ever."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="nccl").start()
    return future
