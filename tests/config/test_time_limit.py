"""Time limits in every form that SLURM accepts (case 20)."""

from pathlib import Path

import pytest

from vime.config.compose import compose, dump_resolved, load_resolved
from vime.config.time_limit import seconds, text
from vime.errors import UserError

H = 3600
GIVEN = {
    "12:00:00": 12 * H,
    "3-00:00": 72 * H,
    "4:00": 240,
    "2-12": 60 * H,
    "90": 90 * 60,
    "1-02:03:04": 26 * H + 184,
    "100:00:00": 100 * H,
    "0-1": H,
    "120:30": 120 * 60 + 30,
}


@pytest.mark.parametrize("written", GIVEN)
def test_a_limit_is_what_slurm_takes_it_for(written: str) -> None:
    assert seconds(written) == GIVEN[written]
    assert seconds(text(GIVEN[written])) == GIVEN[written]


@pytest.mark.parametrize(
    "written",
    [
        "banana",
        "",
        "0",
        "0:00",
        "UNLIMITED",
        "infinite",
        "-1",
        "1.5",
        "1:2:3:4",
        "1-24",
        "4:60",
        "1:60:00",
        "12h",
        "1-",
    ],
)
def test_what_is_not_a_limit_is_never_read_as_one(written: str) -> None:
    with pytest.raises(ValueError, match="time limit"):
        seconds(written)


@pytest.mark.parametrize(
    ("written", "held"),
    [
        ("12:00:00", "12:00:00"),
        ("3-00:00", "3-00:00:00"),
        ("4:00", "00:04:00"),
        ("2-12", "2-12:00:00"),
        ("90", "01:30:00"),
    ],
)
def test_a_cluster_file_may_leave_the_quotes_out(tmp_path: Path, written: str, held: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        f"name: mine\nscheduler: slurm\nnode: {{slots: 2, cpus: 8}}\nslurm:\n  time: {written}\n  signal_seconds: 60\n"
    )
    config = compose(str(file), "tiny_grpo")
    assert config.cluster.slurm.time == held
    assert config.time_limit == GIVEN[written]
    (tmp_path / "config.yaml").write_text(dump_resolved(config))
    assert load_resolved(tmp_path / "config.yaml") == config
    assert compose(str(file), "tiny_grpo", ["launch.time=1-0"]).time_limit == 86400


def test_a_bad_limit_is_an_error_that_names_the_field_and_the_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nscheduler: slurm\nnode: {slots: 2, cpus: 8}\nslurm:\n  time: banana\n")
    with pytest.raises(UserError) as caught:
        compose(str(file), "tiny_grpo")
    assert str(caught.value) == (
        f"{file}:5: cluster.slurm.time=banana is not a time limit; write M, M:S, H:M:S, D-H, D-H:M or D-H:M:S"
    )


def test_a_limit_that_leaves_no_time_before_the_signal_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nscheduler: slurm\nnode: {slots: 2, cpus: 8}\nslurm:\n  time: 4\n")
    with pytest.raises(UserError, match=r"slurm\.time=00:04:00 is not longer than slurm\.signal_seconds=300"):
        compose(str(file), "tiny_grpo")
