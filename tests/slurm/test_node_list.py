"""SLURM's host lists, against SLURM itself."""

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from vime.errors import UserError
from vime.slurm.node_list import compress, expand

needs_scontrol = pytest.mark.skipif(shutil.which("scontrol") is None, reason="SLURM's scontrol is not installed here")

GIVEN = {
    "n[001-003,7]": ["n001", "n002", "n003", "n7"],
    "a,b[001,003],c": ["a", "b001", "b003", "c"],
    "l[1,2]": ["l1", "l2"],
    "r[1-2]n[01-02]": ["r1n01", "r1n02", "r2n01", "r2n02"],
    "n[8-11]": ["n8", "n9", "n10", "n11"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "n[9-011]": ["n9", "n10", "n11"],
    "[1-3]": ["1", "2", "3"],
    "gpu-a[1-2]-x[3]": ["gpu-a1-x3", "gpu-a2-x3"],
    "a,,b": ["a", "b"],
    " a, b ": ["a", "b"],
    "a,a": ["a", "a"],
    "b,a": ["b", "a"],
    "": [],
}


@pytest.mark.parametrize("text", GIVEN)
def test_a_list_is_written_out_in_its_order(text: str) -> None:
    assert expand(text) == GIVEN[text]


@pytest.mark.parametrize(
    "text", ["n[3-1]", "n[1-]", "n[a]", "n[]", "n[1", "n]1", "n[1-2,,3]", "n[1-2]p", "n[[1]]", "n[1-99999999]"]
)
def test_what_is_not_a_list_is_refused_and_not_guessed(text: str) -> None:
    with pytest.raises(UserError, match="node list"):
        expand(text)


def test_a_long_list_is_refused_before_it_is_built() -> None:
    with pytest.raises(UserError, match="more than 65536 hosts"):
        expand("a[1-9999]b[1-9999]c[1-9999]")


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        (["n1", "n2", "n3", "m2"], "n[1-3],m2"),
        (["n01", "n02", "n4"], "n[01-02,4]"),
        (["n9", "n10"], "n[9-10]"),
        (["n09", "n10"], "n[09-10]"),
        (["n99", "n100"], "n[99-100]"),
        (["a-ib", "b-ib"], "a-ib,b-ib"),
        (["n1", "n1"], "n[1,1]"),
        (["login"], "login"),
        ([], ""),
    ],
)
def test_hosts_are_compressed(hosts: list[str], text: str) -> None:
    assert compress(hosts) == text
    assert expand(text) == hosts


def made(chance: random.Random) -> str:
    """A random list of the forms that SLURM prints and people write."""

    def bracket() -> str:
        items = []
        for _ in range(chance.randint(1, 4)):
            width = chance.choice([0, 0, 2, 3, 4])
            first = chance.randint(0, 120)
            last = first + chance.choice([0, 1, 2, 9, 15])
            item = str(first).zfill(width)
            items.append(f"{item}-{str(last).zfill(width)}" if last > first else item)
        return f"[{','.join(items)}]"

    def name() -> str:
        stem = chance.choice(["n", "node-", "gpu", "r1c", "a.b", "x0y"])
        match chance.randint(0, 4):
            case 0:
                return stem + chance.choice(["", "7", "007", "-ib"])
            case 1:
                return stem + bracket() + chance.choice(["n", "-s"]) + bracket()
            case _:
                return stem + bracket()

    return ",".join(name() for _ in range(chance.randint(1, 5)))


@needs_scontrol
def test_generated_lists_mean_what_scontrol_says(tmp_path: Path) -> None:
    # scontrol reads a configuration before it reads its arguments, also where no SLURM runs.
    (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n1\n")
    environment = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}

    def scontrol(text: str) -> list[str]:
        command = ["scontrol", "show", "hostnames", text]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()

    chance = random.Random(7)
    lists = [*(text for text in GIVEN if text), *(made(chance) for _ in range(300))]
    for text in lists:
        hosts = scontrol(text)
        assert expand(text) == hosts, text
        short = compress(hosts)
        assert expand(short) == hosts, text
        assert scontrol(short) == hosts, text
