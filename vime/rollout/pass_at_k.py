"""pass@k: the chance that at least one of k responses is right, from n >= k responses of which c were right."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) of one problem.

    Source: Evaluating Large Language Models Trained on Code, arXiv 2107.03374, equation 1. Raises ValueError unless
    1 <= k <= samples and 0 <= solved <= samples.
    """
    if not 1 <= k <= samples or not 0 <= solved <= samples:
        raise ValueError(f"pass@{k} of {solved} right responses among {samples}")
    return 1.0 - comb(samples - solved, k) / comb(samples, k)


def mean_pass_at(counts: Sequence[tuple[int, int]], most: int) -> dict[str, float]:
    """pass@k averaged over problems of (samples, solved), for k = 1, 2, 4, ... up to `most`.

    A problem with fewer than k samples does not count for that k; a k without problems is left out.
    """
    result = {}
    k = 1
    while k <= most:
        values = [pass_at_k(samples, solved, k) for samples, solved in counts if samples >= k]
        if values:
            result[str(k)] = sum(values) / len(values)
        k *= 2
    return result
