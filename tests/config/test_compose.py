"""A configuration that exists is right; one that is wrong is one line that says where and what instead."""

import json
from pathlib import Path

import pytest

from tests.models.published import QWEN3_4B
from vime.config import Config
from vime.config.compose import compose, compose_warmup, dump_resolved, load_resolved
from vime.errors import UserError
from vime.plan.checks import check_model


def tiny(*overrides: str) -> Config:
    return compose("local", "tiny_grpo", overrides)


def refused(*overrides: str, recipe: str = "tiny_grpo", cluster: str = "local") -> str:
    with pytest.raises(UserError) as caught:
        compose(cluster, recipe, overrides, check=check_model)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text("model: {tiny: {}}\nrollout: {context: 128}\nweights: {backend: gloo}\n")
    return file


def test_case_26_a_learning_rate_is_the_number_from_a_file_and_from_the_command_line(recipe_file: Path) -> None:
    recipe_file.write_text(recipe_file.read_text() + "training:\n  learning_rate: 1e-6\n")
    assert compose("local", str(recipe_file)).training.learning_rate == 1e-6
    assert tiny("training.learning_rate=1e-6").training.learning_rate == 1e-6


@pytest.mark.parametrize("text", ["007", "12_00", "1e-6", "true", "0x1F", "1.50", "on"])
def test_a_text_field_keeps_its_text_as_written(recipe_file: Path, text: str) -> None:
    assert tiny(f"run.name=x{text}").run.name == f"x{text}"
    assert tiny(f"data.task={text}").data.task == text
    assert tiny(f"cluster.environment.FLAG={text}").cluster.environment["FLAG"] == text
    recipe_file.write_text(recipe_file.read_text() + f"data: {{task: {text}, path: null}}\n")
    assert compose("local", str(recipe_file)).data.task == text


def test_a_time_in_a_text_field_is_not_a_number_of_seconds() -> None:
    assert tiny("data.task=12:00:00").data.task == "12:00:00"


def test_a_path_that_looks_like_a_number_is_that_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tiny("run.root=007").run.root == tmp_path / "007"


def test_free_form_values_keep_their_types() -> None:
    arguments = tiny("rollout.engine_args.max_num_seqs=128", "rollout.engine_args.x=[1, on, 2.5]").rollout.engine_args
    assert arguments == {"max_num_seqs": 128, "x": [1, "on", 2.5]}


def test_the_last_of_two_overrides_counts() -> None:
    assert tiny("training.steps=3", "training.steps=4").training.steps == 4
    model = tiny("model.tiny={layers: 2, context: 128}", "model.tiny.hidden=64").model.tiny
    assert model is not None
    assert (model.layers, model.hidden) == (2, 64)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.lr=1", "unknown key training.lr; did you mean training.learning_rate?"),
        ("training.learning_rat=1", "did you mean training.learning_rate?"),
        ("trainig.steps=1", "unknown key trainig; did you mean training?"),
        ("ranks=2", "did you mean training.ranks?"),
        ("model.tiny.layer=2", "did you mean model.tiny.layers?"),
        ("training.ranks=two", "training.ranks=two must be a whole number"),
        ("training.ranks=3.5", "training.ranks=3.5 must be a whole number"),
        ("training.steps=3.0", "must be a whole number; write 3"),
        ("training.steps=1_000", "must be a whole number; write 1000"),
        ('training.steps="10"', "training.steps=10 must be a whole number"),
        ("training.steps=true", "training.steps=true must be a whole number"),
        ("training.steps=", "training.steps=null must be a whole number"),
        ("training.learning_rate=fast", "training.learning_rate=fast must be a number"),
        ("training.learning_rate=.inf", "must be a finite number"),
        ("training.learning_rate=.nan", "must be"),
        ("weights.verify=yes", "must be true or false; write true"),
        ("weights.verify=1", "weights.verify=1 must be true or false"),
        ("data.task=", "data.task=null must be text"),
        ("data.source=reasoning_gim", "one of reasoning_gym, jsonl, or an import path module:function; did you mean"),
        ("training.dtype=float16", "must be one of float32, bfloat16"),
        ("rollout.temperature=0", "must be greater than 0"),
        ("rollout.stop_token_ids=3", "must be a list"),
        ("rollout.stop_token_ids=[1, a]", "rollout.stop_token_ids[1]=a must be a whole number"),
        ("training=4", "must be a section"),
        ("training.ranks.x=3", "training.ranks is not a section"),
        ("run.name=a/b", "run.name=a/b"),
        ("run.name=[", "not valid YAML"),
        ("run.name", "is not dotted.key=value"),
        ("run..name=1", "is not dotted.key=value"),
        ("training.tensor_parallel=3", "is not a multiple of tensor_parallel x pipeline_parallel = 3 x 1 = 3"),
        ("data.path=nope.jsonl", "data.path: there is no file"),
        ("data.eval_path=nope.jsonl", "data.eval_path: there is no file"),
        ("model.path=/nonexistent", "set the other to null"),
        (
            "model.warmup=tiny_sf",
            "model.warmup: recipe=tiny_sf: there is no configs/tiny_sf.yaml; did you mean tiny_sft?",
        ),
        ("model.warmup=tiny_grpo", "tiny_grpo is a grpo recipe; it must be an sft recipe"),
    ],
)
def test_a_wrong_override_is_one_line_that_names_the_command_line(override: str, words: str) -> None:
    message = refused(override)
    assert message.startswith("command line: ")
    assert words in message


def test_a_wrong_key_in_a_file_is_named_with_its_line(recipe_file: Path) -> None:
    recipe_file.write_text(recipe_file.read_text() + "training:\n  steps: 3\n  learning_rat: 1e-6\n")
    message = refused(recipe=str(recipe_file))
    assert message == f"{recipe_file}:6: unknown key training.learning_rat; did you mean training.learning_rate?"


def test_an_unknown_key_comes_before_other_mistakes_and_they_are_counted() -> None:
    message = refused("training.steps=x", "training.lr=1")
    assert "unknown key training.lr" in message
    assert message.endswith("(and 1 more)")


def test_a_recipe_without_a_model_is_named(recipe_file: Path) -> None:
    recipe_file.write_text("run: {seed: 1}\n")
    assert refused(recipe=str(recipe_file)) == f"{recipe_file}:1: model is missing"


def test_a_recipe_does_not_choose_its_cluster(recipe_file: Path) -> None:
    recipe_file.write_text(recipe_file.read_text() + "cluster: {name: other}\n")
    assert f"{recipe_file}:4: a recipe cannot set `cluster`" in refused(recipe=str(recipe_file))


def test_unknown_names_are_answered_with_the_nearest(tmp_path: Path) -> None:
    assert refused(recipe="tiny_grop").endswith("there is no configs/tiny_grop.yaml; did you mean tiny_grpo?")
    assert refused(cluster="lokal").endswith("there is no clusters/lokal.yaml; did you mean local?")
    (tmp_path / "recipe.yaml").touch()
    assert refused(recipe=str(tmp_path / "recip.yaml")).endswith("there is no such file; did you mean recipe.yaml?")
    assert "recipe=" in refused(recipe="")


def test_a_cluster_file_is_checked_with_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nhots: 127.0.0.1\n")
    assert refused(cluster=str(file)) == f"{file}:2: unknown key cluster.hots; did you mean cluster.host?"


def test_paths_become_absolute_from_the_current_folder(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text("{}\n")
    recipe_file.write_text(recipe_file.read_text() + "data: {source: jsonl, path: data.jsonl, reward: exact}\n")
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    assert compose("local", "./mine.yaml", ["run.root=$SCRATCH/runs"]).run.root.parent == tmp_path / "scratch"
    config = compose("local", "./mine.yaml", ["run.root=here"])
    assert config.recipe == "mine"
    assert config.data.path == tmp_path / "data.jsonl"
    assert config.run.root == tmp_path / "here"
    (tmp_path / "data.jsonl").rename(tmp_path / "dota.jsonl")
    assert refused(recipe="mine.yaml").endswith(f"no file {tmp_path}/data.jsonl; did you mean dota.jsonl?")


def test_a_model_folder_must_be_there_and_say_its_sizes(tmp_path: Path) -> None:
    overrides = (f"model.path={tmp_path}/model", "model.tiny=null", "model.warmup=null")
    assert f"command line: model.path: there is no folder {tmp_path}/model" in refused(*overrides)
    (tmp_path / "model").mkdir()
    assert "has no config.json" in refused(*overrides)
    file = tmp_path / "model" / "config.json"
    file.write_text("{")
    assert f"command line: model.path: cannot read {file}" in refused(*overrides)
    sizes = QWEN3_4B | {"num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 3}
    file.write_text(json.dumps({key: value for key, value in sizes.items() if key != "hidden_size"}))
    assert refused(*overrides) == f"command line: model.path: {tmp_path}/model/config.json: hidden_size is missing"
    file.write_text(json.dumps(sizes | {"max_position_embeddings": 128}))
    assert compose("local", "tiny_grpo", overrides).model.path == tmp_path / "model"
    assert "does not divide the model's 3 layers; use 1" in refused(*overrides, "training.pipeline_parallel=2")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.advantage=gae"], "algorithm.advantage=gae needs a critic: use algorithm.name=ppo"),
        (["algorithm.name=ppo", "algorithm.advantage=rloo"], "takes no critic: use algorithm.name=grpo"),
        (["algorithm.advantage=grop"], "did you mean grpo?"),
        (["algorithm.clip_dual=1.1"], "above 1 + clip_high = 1.28"),
        (["algorithm.loss=cispo", "algorithm.clip_dual=3"], "algorithm.clip_dual=3 is for algorithm.loss=clip"),
        (["algorithm.importance_low=3"], "algorithm.importance_low=3 must be below algorithm.importance_high=2"),
        (["algorithm.reference_refresh=5"], "needs a reference: algorithm.kl_coefficient above 0"),
        (["algorithm.old_logprobs=rollout", "algorithm.importance_sampling=truncated"], "set algorithm.importance_sam"),
        (["algorithm.kl_in=reward", "algorithm.kl_unbiased=true"], "a reward has no gradient"),
        (["rollout.samples_per_prompt=1", "algorithm.advantage=rloo"], "rloo compares responses of one prompt"),
        (
            ["algorithm.loss=gspo", "algorithm.importance_sampling=truncated", "buffer.max_staleness=1"],
            "set algorithm.old_logprobs=trainer, or rollout.mask_off_policy=true",
        ),
        (["algorithm.minibatches=3"], "a step's 256 samples do not divide over 3 minibatches x 2 data-parallel ranks"),
        (["algorithm.teacher=nowhere"], "algorithm.teacher: there is no folder"),
        (["algorithm.teacher=http://u:p@host:1"], "must be http://host:port, without user, password or query"),
        (["algorithm.teacher=https:///v1"], "algorithm.teacher=https:///v1 must be http://host:port"),
        (["algorithm.teacher=http:host"], "algorithm.teacher=http:host must be http://host:port"),
        (["algorithm.teacher=http://host:port"], "algorithm.teacher=http://host:port is no address: Port could not"),
        (
            ["algorithm.teacher=http://host:1", "rollout.temperature=0.6"],
            "set rollout.temperature=1, or give the teache",
        ),
        (["algorithm.kl_coefficient=1", "algorithm.reference=nowhere"], "algorithm.reference: there is no folder"),
    ],
)
def test_an_update_rule_that_contradicts_itself_is_refused(overrides: list[str], words: str) -> None:
    assert words in refused(*overrides)


@pytest.mark.parametrize("teacher", ["http://host:8000", "nowhere"])
def test_sft_has_nothing_that_a_teacher_could_judge(teacher: str) -> None:
    with pytest.raises(UserError, match=r"algorithm\.teacher judges what engines sample, and sft has no engines"):
        compose("local", "tiny_sft", [f"algorithm.teacher={teacher}"])


def test_a_teacher_is_a_server_or_a_folder(tmp_path: Path) -> None:
    served = tiny("algorithm.teacher=https://host:8000/v1")
    assert served.algorithm.teacher == served.algorithm.teacher_url == "https://host:8000/v1"
    assert served.algorithm.folders == {}
    file = tmp_path / "config.yaml"
    file.write_text(dump_resolved(served))
    assert load_resolved(file) == served
    folder = tiny(f"algorithm.teacher={tmp_path}").algorithm
    assert (folder.teacher, folder.teacher_url, folder.folders) == (tmp_path, None, {"algorithm.teacher": tmp_path})
    file.write_text(dump_resolved(tiny(f"algorithm.teacher={tmp_path}")))
    assert load_resolved(file).algorithm == folder


def test_an_update_rule_without_a_group_takes_one_response_a_prompt() -> None:
    lone = ["rollout.samples_per_prompt=1", "rollout.prompts_per_step=64"]
    for rule in ("algorithm.advantage=reinforce_plus_plus", "algorithm.name=ppo"):
        assert tiny(rule, *lone).rollout.samples_per_prompt == 1


def test_a_warmup_trains_the_run_s_own_tiny_model() -> None:
    config = tiny("model.tiny.layers=2")
    warmup = compose_warmup(config)
    assert warmup is not None
    assert warmup.algorithm.name == "sft"
    assert warmup.model.tiny == config.model.tiny
    assert warmup.model.warmup is None
    assert warmup.cluster == config.cluster
    assert compose_warmup(warmup) is None


def test_a_warmup_that_needs_a_warmup_is_refused_rather_than_followed(recipe_file: Path) -> None:
    recipe_file.write_text(
        f"model: {{tiny: {{}}, warmup: {recipe_file}}}\n"
        "rollout: {engines: 0, context: 64}\n"
        "algorithm: {name: sft}\n"
    )
    assert "a warm-up starts from a new model" in refused(recipe=str(recipe_file))


def test_what_is_dumped_loads_as_the_same_configuration(tmp_path: Path) -> None:
    config = tiny("data.task=007", "cluster.environment.X='null'", "training.learning_rate=1e-6", "run.name=1e5")
    assert config.cluster.environment["X"] == "null"
    file = tmp_path / "config.yaml"
    file.write_text(dump_resolved(config))
    assert load_resolved(file) == config


def test_a_resolved_file_must_be_whole(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("recipe: x\n")
    with pytest.raises(UserError, match=r"config\.yaml:1: cluster is missing \(and 1 more\)"):
        load_resolved(file)


@pytest.mark.parametrize("host", ["0.0.0.0", "'::'", "'[::]'", "'0'", "''", "'*'"])
def test_a_host_that_is_every_interface_is_refused(host: str) -> None:
    assert "is every interface of this machine" in refused(f"cluster.host={host}")


def test_hosts_that_are_one_address() -> None:
    for host in ("127.0.0.1", "::1", "node01.cluster", "10.0.0.10"):
        assert tiny(f"cluster.host={host}").cluster.host == host


LONG = "n" * 300


@pytest.mark.parametrize(
    "overrides",
    [
        [f"data.path={LONG}"],
        [f"model.path=/{LONG}", "model.tiny=null", "model.warmup=null"],
        [f"model.warmup={LONG}/x.yaml"],
        [f"run.name={LONG}"],
        [f"training.{LONG}=1"],
        ["run.name=a\x1b[31mb"],
        ["data.task=a\x00b"],
        ["training.steps=\x1b]0;title\x07"],
        [f"data.task={'x' * 5_000_000}"],
        [f"{'a.' * 5000}b=1"],
    ],
)
def test_what_no_file_or_terminal_takes_is_one_printable_line(overrides: list[str]) -> None:
    message = refused(*overrides)
    assert message.isprintable()
    assert len(message) < 2100


@pytest.mark.parametrize(("cluster", "recipe"), [(LONG, "tiny_grpo"), ("local", LONG), ("local", f"{LONG}/x.yaml")])
def test_a_name_that_is_too_long_for_a_file_is_not_found(cluster: str, recipe: str) -> None:
    assert "there is no" in refused(cluster=cluster, recipe=recipe)


def test_a_config_json_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n")
    message = refused(f"model.path={tmp_path}", "model.tiny=null", "model.warmup=null")
    assert message.startswith(f"model.path: {tmp_path}/config.json is a Git LFS pointer")
