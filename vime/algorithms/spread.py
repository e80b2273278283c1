"""Whether rewards differ, by the one test that advantages, group filter and metrics share."""

from __future__ import annotations

from typing import Any

RESIDUE = 2.0**-20
"""Rewards that differ by no more than this share of the largest of them count as equal. They travel in float32, where
one number computed in two ways differs by a few units of 2**-23; what is left of such a difference must not be divided
by itself and become an advantage."""


def spread_is_residue(smallest: Any, largest: Any) -> Any:
    """Whether numbers between these are equal but for rounding in float32: a bool, or of tensors a bool tensor."""
    spread = largest - smallest
    return (spread <= RESIDUE * abs(largest)) | (spread <= RESIDUE * abs(smallest))
