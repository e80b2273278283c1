"""Every model of a run is held against its own shape: all of them are divided over the same ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training.ranks import tiny_config
from vime.config import Shape
from vime.errors import UserError
from vime.plan.checks import SizedModel, check_sizes


def shape(layers: int = 4, heads: int = 4, kv_heads: int = 2, context: int = 512, experts: int = 0) -> Shape:
    sizes = {"hidden": 64, "head_dim": 16, "ffn": 64, "vocabulary": 264, "top_k": min(experts, 2)}
    return Shape(layers=layers, heads=heads, kv_heads=kv_heads, context=context, experts=experts, **sizes)


DENSE = shape()
SPARSE = shape(experts=8)
CRITIC, TEACHER = "algorithm.critic.path", "algorithm.teacher"


@pytest.mark.parametrize(
    ("policy", "key", "other", "training", "message"),
    [
        # Gradients of a critic's whole experts would be summed over the wrong ranks, whatever the policy is.
        (
            DENSE, CRITIC, SPARSE, {"tensor_parallel": 2, "sequence_parallel": True},
            "training.expert_parallel=1 needs training.expert_tensor_parallel=2 for the model of algorithm.critic.path",
        ),
        (DENSE, CRITIC, SPARSE, {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2}, None),
        (DENSE, TEACHER, SPARSE, {"tensor_parallel": 2, "sequence_parallel": True}, None),
        (DENSE, TEACHER, SPARSE, {"tensor_parallel": 2}, "the model of algorithm.teacher has experts and"),
        (DENSE, CRITIC, SPARSE, {"expert_parallel": 2}, None),
        (SPARSE, TEACHER, DENSE, {"expert_parallel": 2}, None),
        (DENSE, TEACHER, DENSE, {"expert_parallel": 2}, "training.expert_parallel=2: the model has no experts; use 1"),
        (
            SPARSE, TEACHER, shape(4, 4, 2, 512, 9), {"expert_parallel": 2},
            "training.expert_parallel=2 does not divide the model of algorithm.teacher's 9 experts; use 1",
        ),
        (
            DENSE, TEACHER, shape(3, 4, 2, 512), {"pipeline_parallel": 2},
            "training.pipeline_parallel=2 does not divide the model of algorithm.teacher's 3 layers; use 1",
        ),
        (
            DENSE, CRITIC, shape(4, 3, 3, 512), {"tensor_parallel": 2},
            "training.tensor_parallel=2 does not divide the model of algorithm.critic.path's 3 attention heads; use 1",
        ),
        (DENSE, TEACHER, shape(4, 4, 2, 256), {}, "more than the model of algorithm.teacher's own limit of 256"),
    ],
)  # fmt: skip
def test_each_model_has_its_own_shape(
    policy: Shape, key: str, other: Shape, training: dict[str, Any], message: str | None
) -> None:
    config = tiny_config(training={"ranks": 2, **training})
    models = [
        SizedModel("the model", policy, trained=True, served=True),
        SizedModel(f"the model of {key}", other, trained=key == CRITIC, served=False),
    ]
    if message is None:
        check_sizes(config, models)
        return
    with pytest.raises(UserError) as caught:
        check_sizes(config, models)
    assert message in str(caught.value)
