"""Weights over NCCL, the engine's side: vLLM's own receiver, which gives a communicator back that it has left."""

from __future__ import annotations

from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferInitInfo


class NcclTransferEngine(NCCLWeightTransferEngine):
    """vLLM's forgets its communicator without destroying it, which keeps some 100 MB of GPU memory for each."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the sender's group, after leaving the one before."""
        self.shutdown()
        super().init_transfer_engine(init_info)

    def shutdown(self) -> None:
        """Leave the group."""
        if self.model_update_group is not None:
            self.model_update_group.destroy()
        super().shutdown()
