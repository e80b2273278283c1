"""Where roles go, and the sizes that are refused before anything starts."""

import pytest

from vime.config import Config
from vime.config.compose import compose
from vime.errors import UserError
from vime.launch.preview import ranges
from vime.plan.checks import check_model
from vime.plan.plan import Plan, Process, make_plan


def config(*overrides: str, recipe: str = "tiny_grpo") -> Config:
    return compose("local", recipe, overrides, check=check_model)


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        config(*overrides)
    return str(caught.value)


def test_every_role_of_a_local_run_is_on_the_one_node() -> None:
    plan = make_plan(config("rollout.engines=2", "training.ranks=4", "training.tensor_parallel=2"))
    assert [(role.name, role.component, len(role.processes)) for role in plan.roles] == [
        ("supervisor", "trainer", 1),
        ("trainer", "trainer", 4),
        ("engine", "rollout", 2),
        ("router", "rollout", 1),
        ("generator", "rollout", 1),
    ]
    assert plan.data_parallel == 2
    assert plan.samples_per_step == 256
    for role in plan.roles:
        assert [process.rank for process in role.processes] == list(range(len(role.processes)))
        assert {process.node for process in role.processes} == {"127.0.0.1"}
        assert all(process.devices == () for process in role.processes)


def test_no_two_processes_share_a_gpu() -> None:
    plan = make_plan(config("cluster.device=cuda", "rollout.engines=2", "rollout.tensor_parallel=2"))
    trainer, engine = plan.role("trainer"), plan.role("engine")
    assert trainer is not None
    assert engine is not None
    assert trainer.processes == tuple(Process(rank=rank, node="127.0.0.1", devices=(rank,)) for rank in range(2))
    assert [process.devices for process in engine.processes] == [(2, 3), (4, 5)]


def test_an_sft_run_has_no_engine_and_its_generator_reads_demonstrations() -> None:
    plan = make_plan(config(recipe="tiny_sft"))
    assert plan.role("engine") is None
    assert plan.role("router") is None
    generator = plan.role("generator")
    assert generator is not None
    assert generator.module == "vime.rollout.demonstrations"


def test_a_plan_is_the_same_every_time_and_survives_its_file() -> None:
    plan = make_plan(config())
    assert make_plan(config()) == plan
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_case_5_samples_that_do_not_divide_over_the_ranks_are_refused_with_the_numbers() -> None:
    message = refused("rollout.prompts_per_step=1", "rollout.samples_per_prompt=3")
    assert "1 x 3 = 3 samples do not divide over the 2 data-parallel ranks" in message
    assert message.endswith("use rollout.prompts_per_step=2")
    assert config("rollout.prompts_per_step=2", "rollout.samples_per_prompt=3").rollout.prompts_per_step == 2
    # Two ranks that share one replica hold all three samples.
    config("rollout.prompts_per_step=1", "rollout.samples_per_prompt=3", "training.tensor_parallel=2")


def test_case_5_more_prompts_a_step_than_there_are_problems_are_refused() -> None:
    message = refused("rollout.prompts_per_step=8", "data.size=7")
    assert "rollout.prompts_per_step=8 prompts are more than data.size=7" in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("training.ranks=3", "training.tensor_parallel=3"),
            "training.tensor_parallel=3 does not divide the model's 4 att",
        ),
        (("training.ranks=4", "training.tensor_parallel=4"), "does not divide the model's 2 key-value heads; use 2"),
        (("training.ranks=3", "training.pipeline_parallel=3"), "does not divide the model's 4 layers; use 2"),
        (
            ("rollout.tensor_parallel=3",),
            "rollout.tensor_parallel=3 does not divide the model's 4 attention heads; use 2",
        ),
        (("training.ranks=3", "training.tensor_parallel=2"), "training.ranks=3 is not a multiple of tensor_parallel x"),
        (("rollout.context=129",), "rollout.context=129 is more than the model's own limit of 128 tokens"),
        (("training.max_tokens_per_microbatch=100",), "a sequence of up to 128 tokens (rollout.context) does not fit"),
        (("training.ranks=1024",), "fewer than the 1024 data-parallel ranks of training.ranks=1024"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_the_numbers(overrides: tuple[str, ...], words: str) -> None:
    message = refused("model.tiny={layers: 4, heads: 4, kv_heads: 2, context: 128}", *overrides)
    assert words in message
    assert message.startswith("command line: ")


def test_an_engine_may_hold_each_key_value_head_equally_often() -> None:
    wide = ("model.tiny={layers: 4, heads: 12, kv_heads: 2, context: 128}",)
    assert config(*wide, "rollout.tensor_parallel=4").rollout.tensor_parallel == 4
    assert "does not divide the model's 2 key-value heads; use 2" in refused(*wide, "rollout.tensor_parallel=3")


def test_rank_ranges() -> None:
    assert ranges([0]) == "0"
    assert ranges([3, 0, 1, 2, 6]) == "0-3,6"
    assert ranges([]) == ""
