"""The environment that a submission starts from: the caller's, without what an enclosing job or run left in it."""

from __future__ import annotations

from collections.abc import Mapping

INHERITED = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_", "OMPI_", "SUBMITIT_", "VIME_", "TORCHELASTIC_")
"""Prefixes of variables that describe another job. They break a nested sbatch or srun, and mislead a role."""
RENDEZVOUS = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
"""What torchrun sets for its children."""
SETTINGS = frozenset({"VIME_CACHE"})
"""A person's own settings among those."""


def submission_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` as a login shell would have it."""
    return {
        name: value
        for name, value in environ.items()
        if name in SETTINGS or not (name.startswith(INHERITED) or name in RENDEZVOUS)
    }
