"""Weights over gloo, the trainer's side: it speaks the wire format of `vime.rollout.engine.gloo_receiver`."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import PrefixStore, ProcessGroup, TCPStore
from vllm.distributed.utils import init_gloo_process_group
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """Where the sender's rendezvous listens, how many processes meet there, and how long they may take."""

    backend: ClassVar[str] = "gloo"
    master_address: str
    world_size: int
    timeout: float


class GlooTrainerTransfer(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """Sends a WeightSource to all engines, one broadcast a tensor, from trainer rank 0."""

    init_info_cls = GlooTrainerInitInfo

    def __init__(self, *, client: VLLMWeightSyncClient, source: WeightSource, is_sender: bool) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._group: ProcessGroup | None = None
        self._store: TCPStore | None = None

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> GlooTrainerTransfer:
        """Meet the engines' workers in a gloo group. Ranks other than the sender only take part in the gathering."""
        assert source is not None
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if not init_info.is_sender:
            return engine
        address, timeout = init_info.master_address, timedelta(seconds=init_info.timeout)
        # Bound here and handed over: the port is ours before its number is known to anyone, and on this interface only.
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        engine._store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
        )
        payload: dict[str, Any] = {
            "master_address": address,
            "master_port": port,
            "world_size": init_info.world_size,
            "timeout": init_info.timeout,
        }
        with ThreadPoolExecutor(max_workers=1) as executor:
            answer = executor.submit(client.init_weight_transfer_engine, payload)
            store = PrefixStore(f"tcp://{address}:{port}", engine._store)
            try:
                engine._group = init_gloo_process_group(store, 0, init_info.world_size, timeout)
            except Exception:
                if answer.done():
                    answer.result()  # an engine that said why it does not come says more than the wait for it
                raise
            answer.result()
        return engine

    def send_weights(self) -> None:
        """Send the source's tensors and put them in service. A collective over the first model replica."""
        assert self.source is not None
        listing = self.source.metadata()
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        self.client.start_weight_update()
        announcement = {
            "names": [entry.name for entry in listing],
            "dtype_names": [str(entry.dtype).removeprefix("torch.") for entry in listing],
            "shapes": [list(entry.shape) for entry in listing],
        }
        executor = ThreadPoolExecutor(max_workers=1)
        try:
            answer = executor.submit(self.client.update_weights, announcement)
            try:
                self._broadcast(listing, self.source)
            except RuntimeError:
                if answer.done():
                    answer.result()
                raise
            answer.result()
        finally:
            # After a failed broadcast an engine may wait in its own until the group's timeout: do not wait for it here.
            executor.shutdown(wait=False)
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Leave the group and close the rendezvous."""
        if self._group is not None:
            self._group.shutdown()
        self._group = self._store = None

    def _broadcast(self, listing: list[ParamMeta], source: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert self._group is not None
        expected, tensors = iter(listing), iter(source)
        try:
            for name, tensor in tensors:
                entry = next(expected)
                if (name, tensor.dtype, tuple(tensor.shape)) != (entry.name, entry.dtype, entry.shape):
                    raise ValueError(f"{name} is {tensor.dtype}{list(tensor.shape)}, announced as {entry}")
                self._group.broadcast(tensor.contiguous().cpu(), 0).wait()
        except Exception:
            # Gathering is a collective: the other ranks wait for this one to take part to the end.
            for _ in tensors:
                pass
            raise
