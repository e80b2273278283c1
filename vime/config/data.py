"""The configuration of prompts: where they come from, how they become token ids, how an answer is scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from vime.config.import_path import ImportPath
from vime.config.section import Section


class Data(Section):
    """Prompts, how they become token ids, and how an answer is scored."""

    source: Literal["reasoning_gym", "jsonl"] | ImportPath = "reasoning_gym"
    """Prompt source: a reasoning_gym task, a JSONL file, or module:function, within cluster.startup_timeout."""
    task: str = "chain_sum"
    """reasoning_gym: the task's name."""
    task_args: dict[str, Any] = {}
    """reasoning_gym: the task's configuration, passed on unchanged."""
    template: str = "{question}"
    """reasoning_gym: the prompt's text, from the problem's `question` and its metadata, such as "{expression} ="."""
    size: int = Field(10_000, ge=1)
    """reasoning_gym: how many problems to draw before the held-out ones are set aside."""
    held_out: float = Field(0.1, gt=0, lt=1)
    """Share of the problems (by a hash of the question) that is never trained on and is used for evaluation."""
    path: Path | None = None
    """jsonl: file of training records, one JSON object a line."""
    name: str | None = None
    """jsonl: the data set's name on the Hugging Face hub. With it a run is planned without `path`, not submitted."""
    eval_path: Path | None = None
    """jsonl: file of evaluation records. Without it the held-out share of `path` is used."""
    prompt_key: str = "prompt"
    """jsonl: key of the prompt, a string or a list of chat messages."""
    answer_key: str = "answer"
    """jsonl: key of the reference answer."""
    format: Literal["chat", "text"] | ImportPath = "chat"
    """How a record becomes token ids: the tokenizer's chat template, plain text, or module:function (within
    rollout.reward_timeout)."""
    chat_args: dict[str, Any] = {}
    """chat: further variables of the chat template, such as {enable_thinking: false}."""
    tools: list[dict[str, Any]] = []
    """chat: tools that the chat template describes to the policy, as JSON schemas."""
    tools_key: str | None = None
    """chat: key of a record's own tools, which then stand in for `tools`."""
    add_bos: bool = False
    """text only: put the tokenizer's beginning-of-sequence token in front. A chat template decides by itself."""
    reward: Literal["task", "math_verify", "exact", "choice", "format", "remote"] | ImportPath = "task"
    """Scorer: reasoning_gym's own; against the answer math_verify, exact match or the choice's letter; format (a
    <think> block, then an answer); remote (a POST to `reward_url`); or module:function. Code execution needs a sandbox
    and is out of scope: run it behind `remote`."""
    reward_url: str | None = Field(None, pattern=r"^https?://")
    """remote: where to POST {"prompt", "response", "answer", "record", "metadata"}. The reward comes back as JSON."""
    reward_tries: int = Field(3, ge=1)
    """remote: requests for one sample, within rollout.reward_timeout, before it counts as unscored."""
    reward_key: str | None = None
    """Which entry is the reward when the scorer returns a dict."""
    shuffle: bool = True
    """Shuffle the prompts anew in each epoch (seeded by run.seed)."""
    allow_change: bool = False
    """Resume although the data, or how prompts are made of them, differ from the checkpoint's: with a new epoch of what
    there is now. Without it such a change is named and refused."""

    @model_validator(mode="after")
    def _source_is_complete(self) -> Data:
        if self.source == "jsonl" and self.path is None and self.name is None:
            raise ValueError("data.source is jsonl, so data.path must name a file")
        if self.source != "reasoning_gym" and self.reward == "task":
            raise ValueError(
                "data.reward=task is reasoning_gym's scorer;"
                " with another source use math_verify, exact, choice, format, remote or module:function"
            )
        for name in ("tools", "chat_args"):
            if getattr(self, name) and self.format == "text":
                raise ValueError(f"data.{name} is for chat templates, and data.format is text; use data.format=chat")
        if (self.reward == "remote") != (self.reward_url is not None):
            raise ValueError("data.reward=remote and data.reward_url belong together")
        return self
