"""NVLink domains, segments and the groups that should stay inside them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.errors import UserError
from vime.plan.nodes import NodeGroup, choose_segment, rank_groups, split_groups

RACK = 18


def segment(nodes: int, width: int = 1, wanted: int | None = None) -> int:
    groups = [NodeGroup(tuple(range(first, first + width)), f"width {width}") for first in range(0, nodes, width)]
    return choose_segment(nodes, RACK, groups, wanted, "the trainer component", "launch.trainer_nodes")


def test_ranks_of_a_group_are_neighbours() -> None:
    assert [group.nodes for group in rank_groups(16, 4, 4, "x")] == [(0,), (1,), (2,), (3,)]
    assert [group.nodes for group in rank_groups(16, 8, 4, "x")] == [(0, 1), (2, 3)]
    # Three ranks a group on nodes of four: the second group is on two nodes.
    assert [group.nodes for group in rank_groups(6, 3, 4, "x")] == [(0,), (0, 1)]


@pytest.mark.parametrize(
    ("nodes", "width", "right"),
    [
        (4, 1, 4),
        (8, 2, 8),
        (18, 1, 6),
        (36, 1, 4),
        (20, 1, 4),
        (19, 1, 1),
        (20, 2, 4),
        (28, 2, 4),
        (36, 6, 6),
        (34, 1, 2),
    ],
)
def test_a_segment_is_all_of_few_nodes_and_few_of_many(nodes: int, width: int, right: int) -> None:
    assert segment(nodes, width) == right


def test_nodes_that_cannot_keep_a_group_in_one_rack_are_refused_with_the_numbers() -> None:
    # 38 = 2 x 19: of its divisors only 2 fits a rack, and groups of 2 do fit; 57 = 3 x 19 fits groups of 3.
    assert segment(38, 2) == 2
    groups = [NodeGroup((0, 1), "rollout.tensor_parallel=8")]
    with pytest.raises(UserError) as caught:
        choose_segment(19, RACK, groups, None, "the rollout component", "launch.rollout_nodes")
    assert str(caught.value) == (
        "the rollout component: 19 nodes do not divide into segments of at most 18 nodes (an NVLink domain) that keep"
        " the 2 nodes of rollout.tensor_parallel=8 together; use launch.rollout_nodes=20"
    )


def test_a_site_s_own_segment_must_fit_too() -> None:
    assert segment(4, wanted=2) == 2
    with pytest.raises(UserError, match=r"segments of 2 nodes do not divide its 3 nodes; use .*=2 or 4 or"):
        segment(3, wanted=2)
    with pytest.raises(UserError, match="a segment of 20 nodes is more than the 18"):
        segment(40, wanted=20)


@given(st.integers(1, 80), st.integers(1, 8), st.integers(1, 20))
def test_a_chosen_segment_keeps_its_promises(count: int, width: int, domain: int) -> None:
    nodes = count * width
    groups = [NodeGroup(tuple(range(first, first + width)), "g") for first in range(0, nodes, width)]
    try:
        size = choose_segment(nodes, domain, groups, None, "it", "its nodes")
    except UserError:
        # Then no divisor that fits the domain keeps the groups whole.
        fitting = [size for size in range(1, domain + 1) if nodes % size == 0]
        assert width <= domain
        assert all(split_groups(groups, size) for size in fitting)
        return
    assert nodes % size == 0
    assert size <= domain
    assert not split_groups(groups, size) or width > domain
