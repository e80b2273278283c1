"""The trainer's side of the buffer: wait for an announced batch, map its chunks, delete what is used up."""

from __future__ import annotations

from collections.abc import Sequence

from vime.buffer.chunk import Chunk
from vime.buffer.control import BatchMessage
from vime.buffer.manifest import BATCHES, CHUNKS, Manifest, collect, committed, read_manifest
from vime.buffer.sample import Sample
from vime.config import Buffer
from vime.errors import BufferFault
from vime.run.directory import RunDir
from vime.run.files import wait_for_file


class BufferReader:
    """Reads the batches of one run."""

    def __init__(self, run_dir: RunDir, config: Buffer) -> None:
        self._folder = run_dir.buffer
        self._timeout = config.file_timeout

    def manifest(self, message: BatchMessage) -> Manifest:
        """The announced manifest, waiting up to `buffer.file_timeout` for it to show on this node.

        Raises WaitTimeout, or BufferFault when the file is not what was announced; both name the file.
        """
        path = self._folder / BATCHES / message.manifest
        wait_for_file(path, message.bytes, self._timeout)
        manifest = read_manifest(path)
        if manifest.step != message.step:
            raise BufferFault(f"{path} was announced as the batch of step {message.step}, not of {manifest.step}")
        return manifest

    def samples(self, manifest: Manifest, indices: Sequence[int], layers: Sequence[int] | None = None) -> list[Sample]:
        """The samples at `indices` (positions in `manifest.samples`), in that order, with the routes of `layers` only.

        layers: places in the routes' first axis, in rising order; None for all.
        Waits for each chunk that it needs, and touches only the pages of what is asked for. The arrays are views of the
        mapped files: keep them no longer than until the batch is collected. Raises like `manifest`.
        """
        sizes = {chunk.name: chunk.bytes for chunk in manifest.chunks}
        opened: dict[str, Chunk] = {}
        samples: list[Sample] = []
        for index in indices:
            entry = manifest.samples[index]
            chunk = opened.get(entry.chunk)
            if chunk is None:
                path = self._folder / CHUNKS / entry.chunk
                wait_for_file(path, sizes[entry.chunk], self._timeout)
                chunk = opened[entry.chunk] = Chunk.open(path)
            if entry.index >= len(chunk):
                raise BufferFault(
                    f"{chunk.path} has {len(chunk)} samples, the batch of step {manifest.step} wants {entry.index}"
                )
            sample = chunk.sample(entry.index, layers)
            if (len(sample.token_ids), sample.response_length) != (entry.tokens, entry.response_tokens):
                raise BufferFault(f"{chunk.path} sample {entry.index} is not that of the batch of step {manifest.step}")
            samples.append(sample)
        return samples

    def pending(self, after_step: int) -> list[Manifest]:
        """The committed batches of later steps than `after_step`, in order: what a resumed run trains on first."""
        return [manifest for manifest in committed(self._folder) if manifest.step > after_step]

    def collect(self, up_to_step: int) -> list[int]:
        """Delete the batches up to `up_to_step`, once a complete checkpoint covers them; returns the steps deleted.

        For trainer rank 0, after every rank has let go of those batches' samples.
        """
        return collect(self._folder, up_to_step)
