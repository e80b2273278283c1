"""Memory of published models: what the estimate says, and what it refuses."""

import pytest

from vime.compose import compose
from vime.config import Config
from vime.errors import UserError
from vime.memory import count, engine_gb, memory_warnings, trainer_gb


def config(cluster: str, recipe: str, *overrides: str) -> Config:
    return compose(cluster, recipe, overrides)


@pytest.mark.parametrize(
    ("recipe", "billions"), [("qwen3_4b_grpo", 4.02), ("qwen3_30b_a3b_grpo", 30.5), ("glm45_air_grpo", 106.9)]
)
def test_parameters_are_those_that_the_models_are_named_for(recipe: str, billions: float) -> None:
    shape = config("h200", recipe).model.shape
    assert shape is not None
    assert count(shape).total / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_dense_model_by_hand() -> None:
    made = config("h200", "qwen3_4b_grpo")
    shape = made.model.shape
    assert shape is not None
    # 8 ranks, tensor parallel 2: half of the weights at 2 + 4 bytes, and a quarter of that half's 12 of the optimizer.
    half = count(shape).total / 2
    assert trainer_gb(made, shape) == pytest.approx(half * (2 + 4 + 12 / 4) / 1e9)
    assert engine_gb(made, shape) == pytest.approx(count(shape).total * 2 / 2 / 1e9)
    whole = config("h200", "qwen3_4b_grpo", "training.distributed_optimizer=false")
    assert trainer_gb(whole, shape) == pytest.approx(half * (2 + 4 + 12) / 1e9)


def test_a_critic_is_a_second_model_and_a_reference_only_weights() -> None:
    plain = config("h200", "qwen3_4b_grpo")
    shape = plain.model.shape
    assert shape is not None
    critic = config("h200", "qwen3_4b_grpo", "algorithm.name=ppo")
    assert trainer_gb(critic, shape) == pytest.approx(2 * trainer_gb(plain, shape))
    reference = config("h200", "qwen3_4b_grpo", "algorithm.kl_coefficient=0.001")
    assert trainer_gb(reference, shape) - trainer_gb(plain, shape) == pytest.approx(count(shape).total / 2 * 2 / 1e9)


def test_experts_are_divided_over_their_own_ranks() -> None:
    made = config("h200", "qwen3_30b_a3b_grpo")
    shape = made.model.shape
    assert shape is not None
    parts = count(shape)
    # Tensor parallel 4 leaves two replicas of the rest; expert parallel 8 leaves one of the experts.
    expected = (parts.layers + parts.edges) / 4 * (6 + 12 / 2) + parts.experts / 8 * (6 + 12)
    assert trainer_gb(made, shape) == pytest.approx(expected / 1e9)


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        UserError, match=r"take about 123 GB of each trainer GPU, and A100-80 has 80 GB: raise training"
    ):
        memory_warnings(config("a100", "glm45_air_grpo", "training.ranks=16", "training.expert_parallel=8"))
    with pytest.raises(
        UserError, match=r"about 107 GB of each engine GPU, and rollout\.memory_fraction=0\.9 of A100-80"
    ):
        memory_warnings(config("a100", "glm45_air_grpo", "rollout.tensor_parallel=2"))


def test_what_fits_tightly_is_a_warning() -> None:
    [trainer] = memory_warnings(config("h200", "glm45_air_grpo", "training.ranks=16"))
    assert "123 GB of each trainer GPU (141 GB): little is left for activations" in trainer
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
