"""`python -m benchmarks.trl_trainer JOB`: TRL's GRPOTrainer on the task of a recipe; one JSON line a step.

After half of the steps it waits for a line on its input, so that vime's run can take its turn in between.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from vime.config import Config
from vime.config.compose import load_resolved


def main() -> None:
    """Train by the resolved recipe JOB/config.yaml from its model; the policy goes to JOB/out."""
    job = Path(sys.argv[1])
    config = load_resolved(job / "config.yaml")
    assert config.model.path is not None, "both start from one policy"
    train(config, config.model.path, job / "out")


def train(config: Config, model: Path, out: Path) -> None:
    """The recipe's settings in TRL's words. What has no counterpart is listed in `benchmarks.trl.NOTES`."""
    import reasoning_gym
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    from vime.rollout.data.sources import load_problems
    from vime.rollout.prompts import PromptStream

    data, rollout, training, algorithm = config.data, config.rollout, config.training, config.algorithm
    training_problems = load_problems(data, config.run.seed, config.cluster.startup_timeout).training
    stream = PromptStream(training_problems, config.run.seed, data.shuffle)
    problems = [stream.take()[1] for _ in range(training.steps * rollout.prompts_per_step)]
    scorer = reasoning_gym.create_dataset(data.task, size=1, seed=0, **data.task_args)
    rows = [
        {"prompt": [{"role": "user", "content": problem.prompt}], "record": json.dumps(problem.record)}
        for problem in problems
    ]

    def reward(completions: list[Any], record: list[str], **rest: Any) -> list[float]:
        texts = [completion[0]["content"].strip() for completion in completions]
        return [float(scorer.score_answer(text, json.loads(entry))) for text, entry in zip(texts, record, strict=True)]

    class Turns(TrainerCallback):
        """Times each step, and lets the other one run in the middle."""

        def __init__(self) -> None:
            self.started = 0.0
            self.seconds = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            self.started = self.started or time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            now = time.monotonic()
            self.seconds, self.started = now - self.started, now

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
            if logs is None or "reward" not in logs:
                return
            line = {"step": state.global_step, "seconds": self.seconds, "reward": logs["reward"]}
            print(json.dumps(line), flush=True)
            if state.global_step == training.steps // 2:
                sys.stdin.readline()
                self.started = time.monotonic()

    settings = trl.GRPOConfig(
        output_dir=str(out),
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        seed=config.run.seed,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        shuffle_dataset=False,
        per_device_train_batch_size=rollout.prompts_per_step * rollout.samples_per_prompt,
        num_generations=rollout.samples_per_prompt,
        max_completion_length=rollout.max_response_tokens,
        temperature=rollout.temperature,
        max_steps=training.steps,
        learning_rate=training.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        max_grad_norm=training.clip_grad,
        beta=0.0,
        epsilon=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        loss_type="dapo",
        scale_rewards="group",
    )
    trainer = trl.GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Turns()],
    )
    trainer.train()
    trainer.save_model(str(out))


if __name__ == "__main__":
    main()
