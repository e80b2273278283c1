"""Memory of published models: what the estimate says, and what it refuses."""

import pytest

from vime.config import Config, Shape
from vime.config.compose import compose
from vime.errors import UserError
from vime.models.shape import shape_of
from vime.plan.memory import activation_bytes, engine_memory, memory_warnings, trainer_memory
from vime.plan.parameters import count, of_stage, stage_layers


def config(cluster: str, recipe: str, *overrides: str) -> Config:
    return compose(cluster, recipe, overrides)


def shape(config: Config) -> Shape:
    made = shape_of(config.model)
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("recipe", "billions"), [("qwen3_4b_grpo", 4.02), ("qwen3_30b_a3b_grpo", 30.5), ("glm45_air_grpo", 106.9)]
)
def test_parameters_are_those_that_the_models_are_named_for(recipe: str, billions: float) -> None:
    assert count(shape(config("h200", recipe))) / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_dense_model_by_hand() -> None:
    made = config("h200", "qwen3_4b_grpo")
    memory = trainer_memory(made, shape(made))
    # 8 ranks, tensor parallel 2: half of the weights at 2 + 4 bytes, and a quarter of that half's 12 of the optimizer.
    half = count(shape(made)) / 2 / 1e9
    assert memory.parameters == pytest.approx(half * 2, rel=1e-3)  # norms are whole on both
    assert memory.gradients == pytest.approx(2 * memory.parameters)
    assert memory.optimizer == pytest.approx(half * 12 / 4, rel=1e-3)
    whole = config("h200", "qwen3_4b_grpo", "training.distributed_optimizer=false")
    assert trainer_memory(whole, shape(whole)).optimizer == pytest.approx(4 * memory.optimizer)
    engine = engine_memory(made, shape(made))
    assert engine.parameters == pytest.approx(half * 2)
    # 70% of 141 GB less the weights; 4 of 8 key-value heads of 128, keys and values, 36 layers, 2 bytes
    assert engine.kv_cache == pytest.approx(0.7 * 141 - half * 2)
    assert engine.kv_tokens == int(engine.kv_cache * 1e9 / (2 * 36 * 4 * 128 * 2))


def test_a_critic_is_a_second_model_and_a_reference_only_weights() -> None:
    critic = config("h200", "qwen3_4b_grpo", "algorithm.name=ppo")
    memory = trainer_memory(critic, shape(critic))
    assert memory.critic == pytest.approx(memory.parameters + memory.gradients + memory.optimizer)
    reference = config("h200", "qwen3_4b_grpo", "algorithm.kl_coefficient=0.001")
    memory = trainer_memory(reference, shape(reference))
    assert memory.frozen == pytest.approx(memory.parameters)


def test_experts_are_divided_over_their_own_ranks() -> None:
    made = config("h200", "qwen3_30b_a3b_grpo")
    parts = of_stage(shape(made), 0, 1)
    # Tensor parallel 4 leaves two replicas of the rest; expert parallel 8 leaves one of the experts.
    rest = parts.split / 4 + parts.whole
    assert trainer_memory(made, shape(made)).optimizer * 1e9 == pytest.approx(rest * 12 / 2 + parts.experts / 8 * 12)


def test_stages_hold_their_layers_and_ends() -> None:
    made = shape(config("gb200", "glm45_air_grpo"))
    stages = [of_stage(made, stage, 2) for stage in range(2)]
    assert sum((stage.total for stage in stages), 0) == count(made)
    assert stages[1].experts > stages[0].experts  # the first layer is dense
    assert stage_layers(made, 1, 2, 1) == list(range(23, 46))
    assert stage_layers(made.model_copy(update={"layers": 8}), 1, 2, 2) == [2, 3, 6, 7]


def test_early_stages_keep_more_microbatches() -> None:
    made = config("h200", "qwen3_4b_grpo", "training.pipeline_parallel=4", "training.recompute=none")
    of_layers = [activation_bytes(made, shape(made), stage) for stage in range(3)]
    assert of_layers == pytest.approx([of_layers[2] / 2 * 4, of_layers[2] / 2 * 3, of_layers[2]])


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        UserError,
        match=r"takes about \d+ GB of each trainer GPU \(parameters 14\.5, gradients 29\.0, optimizer 81\.8,"
        r" activations 2\.2\), and A100-80 has 80 GB: raise training\.ranks=16",
    ):
        memory_warnings(config("a100", "glm45_air_grpo", "training.ranks=16", "training.expert_parallel=8"))
    with pytest.raises(UserError, match=r"A100-80 has 80 GB: set training\.recompute=full, or lower"):
        memory_warnings(config("a100", "qwen3_30b_a3b_grpo", "training.recompute=none"))
    with pytest.raises(
        UserError, match=r"about 107 GB of each engine GPU, and rollout\.memory_fraction=0\.9 of A100-80"
    ):
        memory_warnings(config("a100", "glm45_air_grpo", "rollout.tensor_parallel=2"))
    with pytest.raises(UserError, match=r"leaves a key-value cache of \d+ tokens for sequences of 10240"):
        memory_warnings(config("h200", "glm45_air_grpo", "rollout.tensor_parallel=2", "rollout.memory_fraction=0.76"))


def test_what_fits_tightly_is_a_warning() -> None:
    [trainer] = memory_warnings(config("h200", "glm45_air_grpo", "training.ranks=16"))
    assert "128 GB of each trainer GPU" in trainer
    assert "of 141 GB: little is left for the fragments" in trainer
    [engine] = memory_warnings(
        config("h200", "glm45_air_grpo", "rollout.tensor_parallel=2", "rollout.memory_fraction=0.8")
    )
    assert "107 GB of each engine GPU (an engine may use 113 GB)" in engine


@pytest.mark.parametrize("cluster", ["a100", "h200", "gb200"])
@pytest.mark.parametrize("recipe", ["qwen3_4b_grpo", "qwen3_30b_a3b_grpo", "glm45_air_grpo"])
def test_the_recipes_fit_every_cluster_with_room(cluster: str, recipe: str) -> None:
    assert memory_warnings(config(cluster, recipe)) == []


def test_a_model_of_unknown_sizes_is_not_judged() -> None:
    assert memory_warnings(config("local", "tiny_grpo")) == []
