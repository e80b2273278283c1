"""The trainer's side of a weight transfer, for tests: sends a Hugging Face folder to the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from vime.buffer.control import EngineAddress
from vime.training.weights.engines import Fleet
from vime.training.weights.gloo_sender import GlooTrainerInitInfo, GlooTrainerTransfer


class FolderSource(WeightSource):
    """The tensors of a folder's safetensors."""

    def __init__(self, folder: Path) -> None:
        self.tensors = load_file(folder / "model.safetensors")

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())


@contextmanager
def sending(folder: Path, url: str, token: str) -> Iterator[Callable[[Path, int], None]]:
    """A transfer group with the engine at `url`: what is given sends a folder's weights as a version.

    folder: any of the folders that will be sent.
    """
    fleet = Fleet([EngineAddress(index=0, url=url, world_size=1, incarnation=0)], token, 60)
    source = FolderSource(folder)
    info = GlooTrainerInitInfo("127.0.0.1", 2, 60.0, rank=0)
    sender = GlooTrainerTransfer.trainer_init(info, client=fleet, source=source)

    def update(folder: Path, version: int) -> None:
        source.tensors = FolderSource(folder).tensors
        fleet.version = version
        fleet.pause()
        sender.send_weights()
        fleet.reset_prefix_cache()
        fleet.resume()
        assert fleet.versions() == [str(version)]

    try:
        yield update
    finally:
        sender.shutdown()
        fleet.close()


def send(folder: Path, url: str, token: str, version: int, rounds: int = 1) -> None:
    """Sends the weights of `folder` to the engine at `url` as `version`, through a transfer group of its own."""
    with sending(folder, url, token) as update:
        for _ in range(rounds):
            update(folder, version)
