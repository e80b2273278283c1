"""New weights for the engines: pause, transfer, reset the prefix cache, resume, verify."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerWeightTransferEngine, WeightSource

from vime.buffer.control import Control
from vime.buffer.sample import Sample
from vime.config import Config
from vime.models.hf_folder import torch_dtype
from vime.run.role import Role
from vime.training import parallel
from vime.training.collectives import broadcast_json
from vime.training.inbox import RANK_0_MARGIN
from vime.training.learner import Learner
from vime.training.weights.engines import EngineFault, Fleet
from vime.training.weights.gloo_sender import GlooTrainerInitInfo, GlooTrainerTransfer
from vime.training.weights.hf_export import Exporter

PROBE_TOKENS = 256
"""Longest probe: a few blocks of the engines' prefix cache."""
_T = TypeVar("_T")


class StaleEngine(RuntimeError):
    """An engine does not serve the weights that the trainer holds."""


class EngineLost(RuntimeError):
    """An engine ended while it was sent weights. Its parent starts it again, or ends the run."""


@dataclass(frozen=True)
class Update:
    """What one update did. seconds: the whole; bytes: to each engine; differences: |engine - trainer| in nats."""

    version: int
    seconds: float
    bytes: int
    verified: bool
    max_abs_diff: float
    mean_abs_diff: float
    engines: int


class PolicySource(WeightSource):
    """The policy as vLLM's trainer engines read it: Hugging Face names and full tensors, one at a time."""

    def __init__(self, learner: Learner, dtype: torch.dtype) -> None:
        """A collective over the leading ranks."""
        self._exporter = Exporter(learner.policy, dtype)

    def metadata(self) -> list[ParamMeta]:
        """Names, types and shapes of what iteration yields."""
        return [ParamMeta(meta.name, meta.dtype, meta.shape) for meta in self._exporter.metadata]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A collective over the leading ranks; only rank 0 sees tensors.

        All is gathered on one stream of its own, and is complete when it is handed on: vLLM packs on several streams in
        turn, and asks for the next tensor under any of them. A unit that began under one and went on under another
        would be packed before it was there, and its memory given away while it was read.
        """
        torch.cuda.synchronize()  # what was trained is there, on whatever stream that was
        gathering, gathered = torch.cuda.Stream(), torch.cuda.Event()
        tensors = iter(self._exporter)
        while True:
            with torch.cuda.stream(gathering):
                item = next(tensors, None)
                gathered.record(gathering)
            gathered.synchronize()
            if item is None:
                return
            name, tensor = item
            if tensor is not None:
                tensor.record_stream(torch.cuda.current_stream())
            yield name, tensor  # type: ignore[misc]


class WeightSync:
    """Keeps all engines at the learner's version. Its methods are collectives over all trainer ranks."""

    def __init__(self, config: Config, role: Role, control: Control, learner: Learner) -> None:
        self._config = config
        self._role = role
        self._control = control
        self._learner = learner
        self._source = PolicySource(learner, torch_dtype(config.rollout.dtype)) if parallel.is_leading() else None
        self._transfer: TrainerWeightTransferEngine[Any] | None = None
        self._fleet: Fleet | None = None
        self._connections = 0
        shape = learner.policy[0].architecture.shape
        context = config.rollout.context or shape.context
        self._probe = _probe_tokens(shape.vocabulary, context, config.run.seed)

    def connect(self) -> None:
        """Find the engines and join them in a transfer group; again after an engine has restarted."""
        startup, turn = self._config.cluster.startup_timeout, f"engines/{self._connections}"
        self._connections += 1
        self.close()
        if self._role.rank == 0:
            addresses = [self._control.engine(i, startup) for i in range(self._config.rollout.engines)]
            self._fleet = Fleet(addresses, self._role.token, self._config.weights.timeout)
            self._control.put(turn, True)
        else:
            # Engines may take longer to start than a collective may wait.
            self._control.get(turn, startup + RANK_0_MARGIN, "rank 0, which waits for the engines")
        if parallel.is_leading():
            self._transfer = self._open()
        dist.barrier()

    def update(self, version: int) -> Update | None:
        """Send the policy, as `version`, to every engine and prove that each serves it. What was done, on rank 0.

        Raises StaleEngine when an engine's logprobs are not the trainer's, WaitTimeout when one does not answer, and on
        every rank EngineLost when one has ended: `connect` once it is back, and update again.
        """
        report, lost = None, ""
        if parallel.is_leading():
            try:
                report = self._update(version)
            except EngineFault as error:
                lost = str(error)
        lost = broadcast_json(lost)
        if lost:
            raise EngineLost(lost)
        return report

    def close(self) -> None:
        """Leave the transfer group."""
        if self._transfer is not None:
            self._transfer.shutdown()
        if self._fleet is not None:
            self._fleet.close()
        self._transfer = self._fleet = None

    def _open(self) -> TrainerWeightTransferEngine[Any]:
        assert self._source is not None
        world_size = 1 + (self._fleet.world_size if self._fleet is not None else 0)
        rank, timeout = self._role.rank, self._config.weights.timeout
        if self._config.weights_backend == "nccl":
            from vime.training.weights.nccl_sender import NcclTrainerInitInfo, NcclTrainerTransfer

            joining = NcclTrainerInitInfo(rank=rank, world_size=world_size, timeout=timeout)
            return NcclTrainerTransfer.trainer_init(joining, client=self._fleet, source=self._source)  # type: ignore[arg-type]
        info = GlooTrainerInitInfo(rank=rank, master_address=self._role.host, world_size=world_size, timeout=timeout)
        return GlooTrainerTransfer.trainer_init(info, client=self._fleet, source=self._source)  # type: ignore[arg-type]

    def _update(self, version: int) -> Update | None:
        """An update by the leading ranks. Raises EngineFault on all of them or on none."""
        assert self._source is not None
        assert self._transfer is not None, "connect first"
        started = time.monotonic()
        if self._fleet is not None:
            self._fleet.version = version
        self._on_engines(lambda fleet: fleet.pause())
        problem = ""
        try:
            self._transfer.send_weights()
        except RuntimeError as error:  # what gloo, NCCL and a failed call raise when an engine ends meanwhile
            problem = str(error)

        def serve(fleet: Fleet) -> None:
            if problem:
                raise EngineFault(f"the weights of version {version} did not arrive: {problem}")
            fleet.reset_prefix_cache()
            fleet.resume()

        self._on_engines(serve)
        verified = self._config.weights.verify
        mean, largest = self._verify(version) if verified else (0.0, 0.0)
        if self._fleet is None:
            return None
        return Update(
            version=version,
            seconds=time.monotonic() - started,
            bytes=sum(entry.dtype.itemsize * int(np.prod(entry.shape)) for entry in self._source.metadata()),
            verified=verified,
            max_abs_diff=largest,
            mean_abs_diff=mean,
            engines=len(self._fleet.addresses),
        )

    def _verify(self, version: int) -> tuple[float, float]:
        """Compare every engine with the trainer on the probe. Largest mean and single |difference|, on rank 0."""
        answers = self._on_engines(lambda fleet: list(zip(fleet.probe(self._probe), fleet.versions(), strict=True)))
        # Every leading rank scores the probe, followed by each token that some engine chose.
        chosen = sorted({answer.token for answer, _ in answers}) if answers is not None else None
        tokens: list[int] = broadcast_json(chosen, group=parallel.leading_group())
        samples = [_trained_sample([*self._probe, token]) for token in tokens]
        scores = dict(zip(tokens, self._learner.score(samples, temperature=1.0), strict=True))
        if answers is None or self._fleet is None:
            return 0.0, 0.0
        means, largest = [], []
        for address, (answer, label) in zip(self._fleet.addresses, answers, strict=True):
            expected = scores[answer.token].double().numpy()
            differences = np.abs(np.array([*answer.logprobs, answer.token_logprob]) - expected)
            means.append(float(differences.mean()))
            largest.append(float(differences.max()))
            where = f"engine {address.index} at {address.url}"
            if label != str(version):
                raise StaleEngine(f"{where} serves version {label} after the update to version {version}")
            check(means[-1], self._config.weights.tolerance, where, version)
            # The last value alone went through the prefix cache: what a stale cache changes must not hide in the mean.
            check(
                float(differences[-1]), 10 * self._config.weights.tolerance, f"{where}, by its prefix cache,", version
            )
        return max(means), max(largest)

    def _on_engines(self, call: Callable[[Fleet], _T]) -> _T | None:
        """Call the engines from rank 0; its result there. When one fails, EngineFault on every leading rank.

        The ranks gather weights and score probes together: none may begin unless rank 0 will go through with it.
        """
        result, problem = None, ""
        if self._fleet is not None:
            try:
                result = call(self._fleet)
            except EngineFault as error:
                problem = str(error)
        problem = broadcast_json(problem, group=parallel.leading_group())
        if problem:
            raise EngineFault(problem)
        return result


def check(difference: float, tolerance: float, where: str, version: int) -> None:
    """Raises StaleEngine unless a mean |logprob difference| is within the tolerance; NaN is not."""
    if not difference <= tolerance:
        raise StaleEngine(
            f"{where} does not serve version {version}: its logprobs of the probe differ from the trainer's by"
            f" {difference:.3g} on average, more than weights.tolerance={tolerance:g}"
        )


def _probe_tokens(vocabulary_size: int, context: int, seed: int) -> list[int]:
    """A fixed prompt of random tokens, as long as fits with one more token."""
    length = min(PROBE_TOKENS, context - 1)
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocabulary_size, length)]


def _trained_sample(token_ids: list[int]) -> Sample:
    """A sample of which every token but the first counts."""
    response = len(token_ids) - 1
    return Sample(
        token_ids=np.array(token_ids, dtype=np.int32),
        prompt_length=1,
        loss_mask=np.ones(response, dtype=np.uint8),
        rollout_logprobs=np.zeros(response, dtype=np.float32),
        versions=np.zeros((1, 2), dtype=np.int32),
        reward=0.0,
        finish_reason="probe",
    )
