"""The configuration of generation: the engines, the buffer behind them, and held-out evaluation on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from vime.config.import_path import ImportPath
from vime.config.section import Section

Dtype = Literal["float32", "bfloat16"]


class Rollout(Section):
    """Generation: the engines and what is asked of them."""

    engines: int = Field(1, ge=0)
    """vLLM servers. 0 only with algorithm.name=sft."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs (or CPU processes) of one engine."""
    dtype: Dtype = "bfloat16"
    """Number format of the engines' weights and activations."""
    prompts_per_step: int = Field(32, ge=1)
    """Prompts of one training step."""
    samples_per_prompt: int = Field(8, ge=1)
    """Responses to each prompt: the group size."""
    max_response_tokens: int = Field(8192, ge=1)
    """Longest response; clamped so that prompt and response fit `context`."""
    context: int | None = Field(None, ge=2)
    """Longest prompt plus response, in tokens. Default: the model's own limit."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature. Logprobs are those of the scaled distribution on both sides."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling. Below 1 the trainer's logprobs are not those that were sampled from: refused for training."""
    stop_token_ids: list[int] = []
    """Token ids that end a response, besides the model's end-of-sequence token."""
    seeded: bool = True
    """Seed each request from run.seed, the prompt and the sample, so that a run can be repeated."""
    concurrency: int = Field(256, ge=1)
    """Prompts in flight at once."""
    request_timeout: float = Field(600.0, gt=0)
    """Seconds one request may take."""
    tries: int = Field(3, ge=1)
    """Attempts at a sample whose request, reward, format or filter fails, before it is dropped and counted."""
    generate: ImportPath | None = None
    """module:function, async, that makes one response in several turns: `generate(episode)`. Default: one turn."""
    generate_timeout: float = Field(1800.0, gt=0)
    """Seconds one call of `generate` may take."""
    group_filter: Literal["nonzero_std"] | ImportPath | None = None
    """Which groups a batch may have: nonzero_std (rewards that differ), or module:function. Others are replaced."""
    batch_filter: ImportPath | None = None
    """module:function that is given the groups of a whole batch and says which to keep. Others are replaced."""
    over_sampling: float = Field(1.0, ge=1)
    """Prompts that are started at once, as a multiple of those that the batch still misses. The surplus goes into the
    next batch, responses under way too; what buffer.max_staleness forbids (with 0 all of it) is discarded and made
    anew, unless mask_off_policy leaves something to train on."""
    filter_tries: int = Field(10, ge=1)
    """Prompts that may be filtered out in one step, as a multiple of `prompts_per_step`, before the run ends."""
    mask_off_policy: bool = False
    """Train only on the tokens that the newest of a sample's versions sampled, when weights changed while it ran. Older
    tokens then do not count as stale: over-sampled responses under way are kept with any buffer.max_staleness."""
    reward_timeout: float = Field(60.0, gt=0)
    """Seconds one call of a reward function, of `data.format`, or of a group or batch filter may take, and one response
    of vime's own scorers, which then gets 0."""
    reward_workers: int | None = Field(None, ge=1)
    """Processes that score: so many for vime's own scorers, without network, files to write and the run's token, and so
    many for blocking functions of yours (reward, format, filters), one call at a time each. A call that takes too long
    ends with its process, and what it started ends with the call. Each process imports the function for itself, so it
    shares no variables with the generator or other processes. An async function, and `generate`, runs in the generator
    itself, where many can wait at once, for a server for instance, but where none can be ended. Default: a quarter of
    the cores."""
    memory_fraction: float = Field(0.9, gt=0, lt=1)
    """Share of a GPU's memory that an engine may take. On a CPU `kv_cache_gb` counts instead."""
    kv_cache_gb: float = Field(1.0, gt=0)
    """CPU only: memory of the KV cache in GiB."""
    max_restarts: int = Field(2, ge=0)
    """Restarts of one engine before its end is the run's failure."""
    engine_args: dict[str, Any] = {}
    """Further vLLM server arguments by their long name, such as {max_num_seqs: 128}."""

    @model_validator(mode="after")
    def _filter_can_keep_some(self) -> Rollout:
        if self.group_filter == "nonzero_std" and self.samples_per_prompt < 2:
            raise ValueError("rollout.group_filter=nonzero_std refuses every group of rollout.samples_per_prompt=1")
        return self


class Buffer(Section):
    """The bridge between the speeds of generation and training."""

    max_staleness: int = Field(0, ge=0)
    """How many versions the tokens a batch trains on may lag behind the policy. 0: strictly on-policy, trainers and
    engines take turns; over-sampled responses under way are discarded, unless rollout.mask_off_policy is on. 1: the
    next batch is generated while one is trained. k: generation goes on through the weight updates, up to k versions
    ahead."""
    max_bytes: int = Field(1 << 34, ge=1 << 20)
    """Unconsumed data at which the generator waits."""
    groups_per_chunk: int = Field(8, ge=1)
    """Prompt groups in one chunk file."""
    wait_timeout: float = Field(1800.0, gt=0)
    """Seconds a trainer waits for a batch, or the generator for a new version."""
    file_timeout: float = Field(60.0, gt=0)
    """Seconds an announced file may take to show on this node (NFS)."""


class EvaluationSet(Section):
    """A JSONL file of evaluation records, with its own sampling. What is null is as in `evaluation` and `data`."""

    path: Path
    """One JSON object a line, with the keys of `data`."""
    prompts: int | None = Field(None, ge=1)
    """How many records, the first by a hash of the question. null: all."""
    samples_per_prompt: int | None = Field(None, ge=1)
    """Responses to each."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Longest response."""
    reward: Literal["math_verify", "exact", "choice", "format", "remote"] | ImportPath | None = None
    """Scorer, as data.reward."""


class Evaluation(Section):
    """Held-out evaluation on the same engines: of data's own held-out problems, and of further data sets."""

    every: int = Field(0, ge=0)
    """Evaluate every so many versions; the first and the last are always evaluated unless there is nothing to ask."""
    prompts: int = Field(0, ge=0)
    """Held-out prompts of `data`. 0 asks none."""
    samples_per_prompt: int = Field(1, ge=1)
    """Responses to each: pass@k is reported for k = 1, 2, 4, ... up to it."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Longest response. Default: rollout.max_response_tokens."""
    datasets: dict[str, EvaluationSet] = {}
    """Further data sets by name."""
