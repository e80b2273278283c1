"""The environment that a submission starts from: the caller's, without what an enclosing job or run left in it."""

from __future__ import annotations

from collections.abc import Mapping

from vime.config.algorithm import TEACHER_KEY

INHERITED = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_", "OMPI_", "SUBMITIT_", "VIME_", "TORCHELASTIC_")
"""Prefixes of variables that describe another job. They break a nested sbatch or srun, and mislead a role."""
RENDEZVOUS = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
"""What torchrun sets for its children."""
SETTINGS = frozenset({"VIME_CACHE", "VIME_VENV", "SLURM_CONF", TEACHER_KEY})
"""A person's or a site's own settings among those."""
SRUN_NEEDS = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CONF", "SLURM_HET_SIZE", "SLURM_WORKING_CLUSTER")
"""What srun must know of the job that it runs in. It takes most other variables of the job for its own options."""


def submission_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` as a login shell would have it."""
    return {
        name: value
        for name, value in environ.items()
        if name in SETTINGS or not (name.startswith(INHERITED) or name in RENDEZVOUS)
    }


def without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a process of a role: it does not know that a scheduler started it."""
    return {name: value for name, value in submission_environment(environ).items() if name != "SLURM_CONF"}


def srun_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of an srun of the job that `environ` describes, without the options of the job script.

    Those of component 0 would hold for every component, and `--ntasks` of the batch script for every step.
    """
    job = {name: value for name, value in environ.items() if name in SRUN_NEEDS or "_HET_GROUP_" in name}
    return {**submission_environment(environ), **job}
