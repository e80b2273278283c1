"""One trainer rank: takes batches from the buffer, steps, hands the new weights to the engines."""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vime.buffer.control import BatchMessage, Control, EngineMessage, StopMessage, parse_message
from vime.buffer.manifest import Manifest
from vime.buffer.reader import BufferReader
from vime.config import Config
from vime.config.compose import load_resolved
from vime.errors import UserError
from vime.run.directory import RunDir, utc_now
from vime.run.role import Role, die_with_parent
from vime.training.heartbeat import Heartbeat
from vime.training.inbox import RANK_0_MARGIN, Inbox, TrainerMessage

if TYPE_CHECKING:
    from vime.training.checkpoint.checkpoints import Checkpoints
    from vime.training.learner import Learner
    from vime.training.weights.sync import Update, WeightSync


def main() -> int:
    """Train the run's steps. Returns the exit code; a failure is an exception, whose traceback is the log's tail.

    A stop that the supervisor asked for ends with 0 as well, before the last step.
    """
    die_with_parent()
    role = Role.from_environment()
    run = RunDir(role.run_dir)
    config = load_resolved(run.config)
    # Megatron-core says in eight lines that it runs without Apex and Transformer Engine; that is a choice here.
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|cuda_graph_scope).*")
    if config.cluster.device == "cpu":
        from vime.training import cpu

        cpu.enable()
    control = Control.connect(role, config.cluster.startup_timeout)
    try:
        Trainer(config, role, run, control).run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


class Trainer:
    """The life of one rank. Rank 0 alone reads the inbox and writes files; what it decides is broadcast."""

    def __init__(self, config: Config, role: Role, run: RunDir, control: Control) -> None:
        from torch.distributed import PrefixStore

        from vime.training import parallel
        from vime.training.checkpoint.checkpoints import Checkpoints
        from vime.training.learner import Learner

        self.config, self.role, self.run_dir, self.control = config, role, run, control
        self.first = role.rank == 0
        self._event("started")
        self.heartbeat = Heartbeat(control.clone(), role.rank)
        parallel.initialize(config, PrefixStore("trainer", control.store), role.rank, role.world_size)
        self.learner: Learner = Learner(config, role.model)
        self.checkpoints: Checkpoints = Checkpoints(self.learner, run.checkpoints, config, role.attempt)
        self.reader = BufferReader(run, config.buffer)
        self.sync: WeightSync | None = None
        if config.rollout.engines:
            from vime.training.weights.sync import WeightSync

            self.sync = WeightSync(config, role, control.clone(), self.learner)
        self.step = 0
        self.cursor: dict[str, Any] = {}
        """Of the prompt stream after the last batch that was trained."""
        self.saved = -1
        """Step of the newest complete checkpoint."""
        self.decisions = 0
        """How many messages rank 0 has passed on."""
        self.stop: StopMessage | None = None
        self.inbox = Inbox(control, config.buffer.wait_timeout)

    def run(self) -> None:
        """Train until the last step, or until the supervisor asks to stop."""
        from vime.training import parallel

        if self.role.attempt > 1:
            self._resume()
        if self.first:
            self.control.put("start", {"step": self.step, "cursor": self.cursor})
            if self.step:
                self.control.publish_consumed(self.step)  # who waits for an earlier attempt's batch waits for nothing
        if self.sync is not None:
            self.heartbeat.at("the meeting with the engines")
            self.sync.connect()
        self._event("ready")
        self._publish()
        ended = time.monotonic()
        while self.step < self.config.training.steps and self.stop is None:
            waited = time.monotonic()
            message, manifest = self._next(f"the batch of step {self.step + 1} from the generator")
            waited = time.monotonic() - waited
            if isinstance(message, EngineMessage):
                self._readmit(message)
                self._publish()
            elif isinstance(message, StopMessage):
                self.stop = message
            else:
                assert manifest is not None
                ended = self._train(manifest, waited, ended)
                if self.config.training.save_interval and self.step % self.config.training.save_interval == 0:
                    self._save()
        self.heartbeat.at("its end")
        if self.stop is None:
            self._finish()
        elif self.stop.save:
            self._save()
        parallel.shutdown()
        self.heartbeat.close()
        self._event("stopped", step=self.step)

    def _resume(self) -> None:
        """Go on where the newest complete checkpoint ended.

        SLURM may start a run again before its first checkpoint: then it begins anew, with the batches that are there.
        """
        from vime.training.collectives import broadcast_json

        self.heartbeat.at("the loading of its checkpoint")
        if not broadcast_json(self.first and any(self.run_dir.checkpoints.glob("step_*"))):
            self._event("begun_anew")
            return
        loaded = self.checkpoints.load()
        self.step, self.cursor, self.saved = loaded.step, loaded.cursor, loaded.step
        for incomplete in loaded.incomplete:
            self._event("checkpoint_incomplete", **incomplete)
        self._event(
            "checkpoint_loaded",
            step=loaded.step,
            path=loaded.path,
            saved_by_attempt=loaded.attempt,
            same_layout=loaded.same_layout,
            seconds=loaded.seconds,
            bytes=loaded.bytes,
        )

    def _save(self) -> None:
        """Save a checkpoint, and drop the batches that it covers."""
        if self.saved == self.step:
            return
        self.heartbeat.at(f"the checkpoint of step {self.step}")
        saved = self.checkpoints.save(self.step, self.cursor)
        self.saved = self.step
        self._event("checkpoint_saved", **asdict(saved))
        if self.first:
            self.reader.collect(self.step)

    def _next(self, what: str, only: type[TrainerMessage] | None = None) -> tuple[TrainerMessage, Manifest | None]:
        """The next message of the inbox, and the manifest when it announces a batch, on every rank."""
        from vime.training.collectives import broadcast_bytes

        self.heartbeat.at(f"the wait for {what}")
        kind, body = b"", b""
        turn = f"decided/{self.decisions}"
        self.decisions += 1
        if not self.first:
            # A collective would give up after training.timeout, and generation may take longer than that.
            self.control.get(turn, self.config.buffer.wait_timeout + RANK_0_MARGIN, f"rank 0, which waits for {what}")
        else:
            message = self.inbox.next(what, only)
            self.control.put(turn, True)
            kind = message.model_dump_json().encode()
            if isinstance(message, BatchMessage):
                body = self.reader.manifest(message).to_bytes()
        received = parse_message(broadcast_bytes(kind))
        data = broadcast_bytes(body)
        return received, Manifest.from_bytes(data) if isinstance(received, BatchMessage) else None

    def _train(self, manifest: Manifest, waited: float, ended: float) -> float:
        """One step on one batch; returns the time at its end."""
        from vime.training import batch

        if manifest.step != self.step + 1:
            raise RuntimeError(f"the batch of step {manifest.step} arrived when that of step {self.step + 1} was due")
        self.heartbeat.at(f"the training of step {manifest.step}")
        started = time.monotonic()
        loaded = batch.load(manifest, self.reader, self.config, version=self.step, replay=self.learner.replay)
        metrics = self.learner.train(loaded)
        trained = time.monotonic() - started
        self.step += 1
        self.cursor = manifest.cursor
        updating = self._publish()
        now = time.monotonic()
        if self.first:
            self.control.publish_consumed(self.step)
            total = now - ended
            self.run_dir.append_metrics(
                {
                    "step": self.step,
                    "version": self.step,
                    "attempt": self.role.attempt,
                    "time": utc_now(),
                    **manifest.metrics,
                    **metrics,
                    "perf/step_time": total,
                    "perf/log_probs_time": self.learner.scoring_seconds,
                    "perf/actor_train_time": trained - self.learner.scoring_seconds,
                    "perf/update_weights_time": updating,
                    "perf/wait_time_ratio": waited / total,
                    "perf/actor_train_tok_per_s": loaded.tokens / trained,
                    "perf/tokens_per_gpu_per_sec": loaded.tokens / total / self.role.world_size,
                }
            )
            if self.config.training.save_interval == 0:
                self.reader.collect(self.step)  # nothing will resume from here, so nothing needs the batch again
        return now

    def _publish(self) -> float:
        """Give the engines the current weights and say so; returns the seconds it took."""
        self.heartbeat.at(f"the update of the engines to version {self.step}")
        started = time.monotonic()
        if self.sync is not None:
            update = self._update(self.sync)
            if update is not None:
                self._event("weights_updated", **asdict(update))
        if self.first and self.stop is None:
            self.control.publish_version(self.step)
        return time.monotonic() - started

    def _update(self, sync: WeightSync) -> Update | None:
        """Update the engines, once more after each that ended meanwhile and was started again by its parent.

        None on other ranks than 0, and when a request to stop came first: the engines then keep what they have.
        """
        from vime.training.weights.sync import EngineLost

        while True:
            try:
                return sync.update(self.step)
            except EngineLost as lost:
                self._event("engine_lost", reason=str(lost))
                message, _ = self._next(f"a restart: {lost}", only=EngineMessage)
                if isinstance(message, StopMessage):
                    self.stop = message
                    return None
                assert isinstance(message, EngineMessage)
                self._readmit(message)

    def _readmit(self, message: EngineMessage) -> None:
        """Take a restarted engine into the transfer group: it serves nobody before it has the current weights."""
        self._event("engine_rejoins", engine=message.index, incarnation=message.incarnation)
        assert self.sync is not None
        self.sync.connect()

    def _finish(self) -> None:
        """What remains after the last step."""
        if self.config.training.save_interval:
            self._save()
        if self.config.training.export:
            from vime.training.weights.hf_export import export_folder

            target = self.run_dir.export / f"step_{self.step}"
            export_folder(self.learner, self.role.model, target, self.config.training.dtype)
            self._event("exported", step=self.step, path=str(target))

    def _event(self, event: str, **details: Any) -> None:
        if self.first:
            self.run_dir.append_event(self.role, event, **details)


if __name__ == "__main__":
    sys.exit(main())
