"""Plans on SLURM: components, nodes, devices, ranks, and what is refused or warned about."""

import json
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.models.published import QWEN3_30B_A3B
from vime.config.compose import compose
from vime.errors import UserError
from vime.launch.checks import check_ready
from vime.launch.preview import preview_data
from vime.plan.checks import check_model
from vime.plan.plan import Plan, make_plan

CLUSTERS = ("a100", "h200", "gb200")
RECIPES = ("qwen3_4b_grpo", "qwen3_30b_a3b_grpo", "glm45_air_grpo")


def plan(cluster: str, recipe: str, *overrides: str) -> Plan:
    return make_plan(compose(cluster, recipe, overrides, check=check_model))


def refused(cluster: str, recipe: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        plan(cluster, recipe, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def sizes(planned: Plan) -> list[tuple[str, int, int, int | None]]:
    return [(part.name, len(part.nodes), part.tasks_per_node, part.segment) for part in planned.components]


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["hetjob", "partitioned"])
def test_a_published_recipe_fits_every_cluster(cluster: str, recipe: str, layout: str) -> None:
    config = compose(cluster, recipe, [f"launch.layout={layout}"])
    planned = make_plan(config)
    assert planned.layout == layout
    assert Plan.model_validate_json(planned.model_dump_json()) == planned
    used = [
        (process.node, device) for role in planned.roles for process in role.processes for device in process.devices
    ]
    # Each GPU once, none that a node does not have, and exactly as many as the ranks and engines need.
    assert len(used) == len(set(used))
    assert max(device for _, device in used) < config.cluster.node.gpus
    assert len(used) == config.training.ranks + config.rollout.engines * config.rollout.tensor_parallel
    for part in planned.components:
        assert part.tasks_per_node * part.cpus_per_task <= config.cluster.node.cpus


def test_the_published_sizes() -> None:
    config = compose("gb200", "glm45_air_grpo")
    training, rollout = config.training, config.rollout
    assert (training.tensor_parallel, training.pipeline_parallel, training.context_parallel) == (4, 2, 2)
    assert (training.expert_parallel, training.ranks, training.data_parallel) == (8, 16, 1)
    assert (rollout.tensor_parallel, rollout.memory_fraction) == (2, 0.9)
    assert rollout.stop_token_ids == [151329, 151336, 151338]
    for recipe, limit, memory in (("qwen3_4b_grpo", 9216, 0.7), ("qwen3_30b_a3b_grpo", 20480, 0.7)):
        config = compose("h200", recipe)
        assert config.training.max_tokens_per_microbatch == limit
        assert config.rollout.memory_fraction == memory
        assert (config.training.learning_rate, config.training.weight_decay) == (1e-6, 0.1)
        assert (config.training.adam_beta1, config.training.adam_beta2) == (0.9, 0.98)
        assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)
        assert (config.rollout.prompts_per_step, config.rollout.samples_per_prompt) == (32, 8)
    config = compose("h200", "qwen3_30b_a3b_grpo")
    assert (config.training.tensor_parallel, config.training.expert_parallel) == (4, 8)
    assert config.rollout.tensor_parallel == 8


def test_where_ranks_and_engines_are() -> None:
    planned = plan("gb200", "glm45_air_grpo")
    assert sizes(planned) == [("trainer", 4, 4, 8), ("rollout", 4, 2, 8)]
    trainer, engine, router = (planned.role(name) for name in ("trainer", "engine", "router"))
    assert trainer is not None
    assert engine is not None
    assert router is not None
    assert [(p.node, p.devices) for p in trainer.processes[3:5]] == [("trainer-0", (3,)), ("trainer-1", (0,))]
    assert [(p.node, p.devices) for p in engine.processes[1:3]] == [("rollout-0", (2, 3)), ("rollout-1", (0, 1))]
    assert router.processes[0].node == "rollout-0"
    assert (planned.gpus, planned.nodes, planned.time_limit) == (32, 8, 4 * 3600)


def test_slices_of_a_partitioned_job_follow_each_other() -> None:
    planned = plan("gb200", "glm45_air_grpo", "launch.layout=partitioned")
    assert [(part.first_node, len(part.nodes)) for part in planned.components] == [(0, 4), (4, 4)]
    assert {part.segment for part in planned.components} == {8}


def test_an_engine_wider_than_a_node_is_on_whole_nodes_of_one_domain() -> None:
    wide = ("rollout.tensor_parallel=8", "rollout.engines=2")
    planned = plan("gb200", "qwen3_30b_a3b_grpo", *wide)
    engine = planned.role("engine")
    assert engine is not None
    assert [(p.rank, p.engine_node, p.node, p.devices) for p in engine.processes] == [
        (0, 0, "rollout-0", (0, 1, 2, 3)),
        (1, 1, "rollout-1", (0, 1, 2, 3)),
        (2, 0, "rollout-2", (0, 1, 2, 3)),
        (3, 1, "rollout-3", (0, 1, 2, 3)),
    ]
    assert not any("tensor_parallel" in warning for warning in planned.warnings)
    data = preview_data(compose("gb200", "qwen3_30b_a3b_grpo", wide), planned)
    assert data["engine_urls"] == ["http://rollout-0:<port>", "http://rollout-2:<port>"]


def test_groups_that_leave_an_nvlink_domain_are_warned_about_with_the_speeds() -> None:
    wide = plan("h200", "qwen3_4b_grpo", "rollout.tensor_parallel=16", "rollout.engines=1")
    assert wide.warnings == (
        "rollout.tensor_parallel=16 spans 2 nodes and leaves the NVLink domain of 8 GPUs: 50 GB/s a GPU instead of 900",
    )
    moe = plan("a100", "glm45_air_grpo")
    assert any("training.expert_parallel=16 spans 2 nodes" in warning for warning in moe.warnings)
    # In a rack the same two nodes are one domain, as long as the scheduler is asked to keep them there.
    together = plan("gb200", "qwen3_30b_a3b_grpo", "launch.layout=partitioned")
    assert together.warnings == ()
    [apart] = plan("gb200", "qwen3_30b_a3b_grpo", "launch.layout=partitioned", "cluster.slurm.segment=false").warnings
    assert apart.endswith("; cluster.slurm.segment=true would keep them together")


def test_a_heterogeneous_job_of_racks_is_warned_about_imex_and_offered_the_way_out() -> None:
    [warning] = plan("gb200", "qwen3_4b_grpo", "launch.layout=hetjob").warnings
    assert "IMEX channel" in warning
    assert "NCCL fails" in warning
    assert "launch.layout=partitioned" in warning
    assert plan("h200", "qwen3_4b_grpo").warnings == ()
    assert plan("gb200", "qwen3_4b_grpo").warnings == ()


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_one_allocation_unless_the_components_ask_for_different_nodes(cluster: str) -> None:
    def layout(*overrides: str) -> str:
        return plan(cluster, "qwen3_4b_grpo", *overrides).layout

    assert layout() == "partitioned"
    assert layout("cluster.slurm.trainer.partition=a", "cluster.slurm.rollout.partition=a") == "partitioned"
    assert layout("cluster.slurm.trainer.partition=a") == "hetjob"
    assert layout("cluster.slurm.rollout.constraint=h100") == "hetjob"
    assert layout("cluster.slurm.rollout.constraint=h100", "launch.layout=partitioned") == "partitioned"


def test_what_shares_experts_or_a_sequence_is_kept_near_by_its_whole_width() -> None:
    wide = ("training.ranks=16", "training.tensor_parallel=2", "training.expert_parallel=8")
    far = plan("h200", "qwen3_30b_a3b_grpo", *wide, "training.expert_tensor_parallel=2").warnings
    assert any("training.expert_parallel=8 x expert_tensor_parallel=2 spans 2 nodes" in line for line in far)
    sequence = ("training.ranks=16", "training.tensor_parallel=4", "training.context_parallel=4")
    assert any(
        "training.tensor_parallel=4 x context_parallel=4 spans 2 nodes" in line
        for line in plan("h200", "qwen3_4b_grpo", *sequence).warnings
    )


def test_gpus_that_are_paid_for_and_idle_are_named() -> None:
    [warning] = plan("h200", "qwen3_4b_grpo", "rollout.engines=3").warnings
    assert warning == "the rollout component uses 6 of the 8 GPUs of its 1 nodes"


def test_nodes_that_are_shared_are_asked_for_in_part() -> None:
    part = ("rollout.engines=3", "cluster.slurm.exclusive=false")
    shared = plan("h200", "qwen3_4b_grpo", *part, "cluster.slurm.mem=500G")
    assert shared.warnings == ()
    assert (shared.components[1].gpus_per_node, shared.components[1].cpus_per_task) == (6, 28)
    [warning] = plan("h200", "qwen3_4b_grpo", *part).warnings
    assert warning.startswith("cluster.slurm.mem=0 takes all memory of nodes")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("launch.trainer_nodes=3",), "training.ranks=8 do not divide over launch.trainer_nodes=3; with 4 slots"),
        (("launch.trainer_nodes=1",), "8 ranks a node, more than the 4 slots of a node of gb200; use one of 2, 4"),
        (("launch.rollout_nodes=1",), "4 engines of 2 slots fit on 2 to 4 nodes of 4 slots"),
        (("launch.rollout_nodes=5",), "4 engines of 2 slots fit on 2 to 4 nodes of 4 slots"),
        (("rollout.tensor_parallel=8", "launch.rollout_nodes=5"), "4 engines of 2 nodes each take 8 nodes"),
        (("cluster.slurm.trainer.segment=3",), "segments of 3 nodes do not divide its 4 nodes; use launch.trainer"),
        (("cluster.slurm.rollout.segment=19",), "a segment of 19 nodes is more than the 18 of an NVLink domain"),
        (("launch.time=4:00",), "the time limit of 240 s is not longer than cluster.slurm.signal_seconds=1200"),
        (("cluster.node.cpus=3",), "cluster.node.cpus=3 do not give each of 4 tasks of a node one"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_the_numbers(overrides: tuple[str, ...], words: str) -> None:
    assert words in refused("gb200", "qwen3_4b_grpo", *overrides)


@pytest.mark.parametrize(
    ("recipe", "overrides", "words"),
    [
        ("qwen3_4b_grpo", ("training.expert_parallel=2",), "the model has no experts; use 1"),
        ("qwen3_4b_grpo", ("algorithm.routing_replay=true",), "replays the choice of experts, and the model has none"),
        ("qwen3_30b_a3b_grpo", ("training.expert_parallel=3",), "does not divide the 8 ranks of a pipeline stage"),
        ("qwen3_30b_a3b_grpo", ("training.sequence_parallel=false",), "training.sequence_parallel must be true"),
        ("qwen3_30b_a3b_grpo", ("model.shape.experts=12",), "does not divide the model's 12 experts; use 6"),
        (
            "qwen3_30b_a3b_grpo",
            ("training.expert_parallel=1",),
            "training.expert_parallel=1 needs training.expert_tensor_parallel=4, the tensor_parallel of the rest"
            " (or divide the experts: expert_parallel=4)",
        ),
        ("qwen3_30b_a3b_grpo", ("training.virtual_stages=2",), "needs training.pipeline_parallel above 1"),
        ("glm45_air_grpo", ("training.virtual_stages=2",), "does not divide the 23 layers of a pipeline stage; use 1"),
        ("qwen3_30b_a3b_grpo", ("rollout.tensor_parallel=6",), "does not divide the model's 32 attention heads; use 4"),
        ("glm45_air_grpo", ("training.context_parallel=3",), "pipeline_parallel x context_parallel = 4 x 2 x 3 = 24"),
        ("glm45_air_grpo", ("training.pipeline_parallel=4", "training.ranks=32"), "the model's 46 layers; use 2"),
        ("qwen3_4b_grpo", ("cluster.container.kind=none",), "set container.image=null"),
        ("qwen3_4b_grpo", ("cluster.container.image=",), "container.kind=pyxis needs container.image"),
    ],
)
def test_sizes_that_a_model_cannot_take_are_refused(recipe: str, overrides: tuple[str, ...], words: str) -> None:
    assert words in refused("gb200", recipe, *overrides)


@settings(max_examples=60)
@given(
    cluster=st.sampled_from(CLUSTERS),
    layout=st.sampled_from(["hetjob", "partitioned"]),
    replicas=st.integers(1, 12),
    width=st.sampled_from([1, 2, 4, 8]),
    experts=st.sampled_from([1, 2, 8, 16]),
    engines=st.integers(1, 12),
    engine=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_whatever_is_planned_keeps_its_promises(
    cluster: str, layout: str, replicas: int, width: int, experts: int, engines: int, engine: int
) -> None:
    ranks = replicas * width
    assume(ranks % experts == 0 and 256 % replicas == 0)
    base = compose(cluster, "glm45_air_grpo", [f"launch.layout={layout}", "training.context_parallel=1"])
    sizes = {"ranks": ranks, "tensor_parallel": width, "pipeline_parallel": 1, "expert_parallel": experts}
    config = base.model_copy(
        update={
            "training": base.training.model_copy(update=sizes),
            "rollout": base.rollout.model_copy(update={"engines": engines, "tensor_parallel": engine}),
            # Memory is another test's.
            "cluster": base.cluster.model_copy(
                update={"node": base.cluster.node.model_copy(update={"gpu_memory_gb": None})}
            ),
        }
    )
    try:
        planned = make_plan(config)
    except UserError:
        return
    node = config.cluster.node
    seats = [(p.node, device) for role in planned.roles for p in role.processes for device in p.devices]
    assert len(seats) == len(set(seats)) == ranks + engines * engine
    assert max(device for _, device in seats) < node.gpus
    trainer, engine_role = planned.role("trainer"), planned.role("engine")
    assert trainer is not None
    assert engine_role is not None
    assert [p.rank for p in trainer.processes] == list(range(ranks))
    assert [p.rank for p in engine_role.processes] == list(range(engines * config.nodes_per_engine))

    def domain(name: str) -> tuple[str, int]:
        component, index = name.split("-")
        part = planned.component(component)  # type: ignore[arg-type]
        assert part is not None
        return (component if layout == "hetjob" else "", (part.first_node + int(index)) // (part.segment or 1))

    for size, what in ((width, "tensor_parallel"), (experts, "expert_parallel")):
        groups = [trainer.processes[first : first + size] for first in range(0, ranks, size)]
        inside = all(len({domain(p.node) for p in group}) == 1 for group in groups)
        assert inside or any(f"training.{what}={size} spans" in warning for warning in planned.warnings)
    span = config.nodes_per_engine
    assert [p.engine_node for p in engine_role.processes] == list(range(span)) * engines
    parts = [engine_role.processes[first : first + span] for first in range(0, engines * span, span)]
    inside = all(len({domain(p.node) for p in group}) == 1 for group in parts)
    assert inside or any(f"rollout.tensor_parallel={engine} spans" in warning for warning in planned.warnings)


def test_an_sft_run_needs_no_rollout_nodes(tmp_path: Path) -> None:
    file = tmp_path / "mini.yaml"
    file.write_text("name: mini\nscheduler: slurm\nnode: {slots: 1, cpus: 4}\n")
    planned = plan(str(file), "tiny_sft")
    assert (planned.layout, [part.name for part in planned.components]) == ("partitioned", ["trainer"])
    generator = planned.role("generator")
    assert generator is not None
    assert (generator.component, generator.processes[0].node) == ("trainer", "trainer-0")


def test_a_cluster_says_what_a_node_holds(tmp_path: Path) -> None:
    file = tmp_path / "mini.yaml"
    file.write_text("name: mini\nscheduler: slurm\n")
    assert "needs cluster.node.gpus, or cluster.node.slots" in refused(str(file), "tiny_grpo")


class TestOn:
    """`on:` in a recipe: values for one kind of cluster."""

    RECIPE = (
        "model: {tiny: {}}\nrollout: {context: 128, engines: 1}\nweights: {backend: gloo}\n"
        "on:\n  local:\n    training: {ranks: 4}\n  gb200:\n    training:\n      rank: 8\n"
    )

    def recipe(self, folder: Path, text: str = RECIPE) -> str:
        (folder / "mine.yaml").write_text(text)
        return str(folder / "mine.yaml")

    def test_the_cluster_s_entry_wins_over_the_recipe_and_an_override_over_both(self, tmp_path: Path) -> None:
        recipe = self.recipe(tmp_path)
        assert compose("local", recipe).training.ranks == 4
        assert compose("local", recipe, ["training.ranks=2"]).training.ranks == 2

    def test_a_copy_of_a_cluster_file_keeps_its_entry_by_its_kind(self, tmp_path: Path) -> None:
        (tmp_path / "site.yaml").write_text("name: ours\nkind: gb200\n")
        message = refused(str(tmp_path / "site.yaml"), self.recipe(tmp_path))
        assert message == f"{tmp_path}/mine.yaml:9: unknown key training.rank; did you mean training.ranks?"

    @pytest.mark.parametrize(
        ("entry", "words"),
        [
            ("on: {local: {cluster: {name: x}}}", ":2: on.local cannot set `cluster`"),
            ("on: 3", ":2: `on` must map kinds of cluster to sections"),
            ("on: {local: 3}", ":2: `on` must map kinds of cluster to sections"),
        ],
    )
    def test_what_is_no_entry_is_refused_with_its_line(self, tmp_path: Path, entry: str, words: str) -> None:
        assert words in refused("local", self.recipe(tmp_path, f"model: {{tiny: {{}}}}\n{entry}\n"))


class TestReady:
    """What a dry run leaves open and a submission does not."""

    def refused(self, cluster: str, recipe: str, *overrides: str) -> str:
        config = compose(cluster, recipe, overrides, check=check_model)
        make_plan(config)
        with pytest.raises(UserError) as caught:
            check_ready(config)
        return str(caught.value)

    def folder(self, tmp_path: Path, **sizes: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B | sizes))
        return f"model.path={tmp_path}"

    def test_tied_embeddings_that_no_engine_has(self) -> None:
        message = self.refused("local", "tiny_glm_grpo", "model.tiny.tied_embeddings=true")
        assert message.startswith("model.tiny.tied_embeddings is true, and vLLM cannot tie")

    def test_files_that_a_site_has_to_name(self, tmp_path: Path) -> None:
        message = self.refused("h200", "qwen3_4b_grpo")
        assert message.startswith("model.path is not set: give the folder of Qwen/Qwen3-4B, model.path=FOLDER")
        message = self.refused("h200", "qwen3_30b_a3b_grpo", self.folder(tmp_path))
        assert message == "data.path is not set: give the JSONL file of zhuzilin/dapo-math-17k, data.path=FILE"

    def test_another_model_s_folder_is_noticed_by_its_sizes(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"has 36 layers, but model\.shape\.layers=48: is it Qwen/Qwen3-30B-A3B\?"):
            compose("h200", "qwen3_30b_a3b_grpo", [self.folder(tmp_path, num_hidden_layers=36)], check=check_model)
