from pathlib import Path
from typing import Any

import pytest

from vime.config import Data, TinyModel
from vime.errors import UserError
from vime.models.tiny import make_tiny
from vime.rollout.format import answer_ids, load_tokenizer, make_format
from vime.rollout.problem import Problem


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("format") / "model"
    make_tiny(TinyModel(layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, ffn=8, context=32), folder)
    return folder


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder)


@pytest.fixture
def adding_bos(folder: Path) -> Any:
    """A tokenizer that adds its BOS by itself, as Llama's does, with a template that adds one too."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(folder)
    bos = "<|reserved_0|>"
    tokenizer.bos_token = bos
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.convert_tokens_to_ids(bos))]
    )
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    return tokenizer


def test_the_chat_template_alone_decides_about_special_tokens(adding_bos: Any) -> None:
    """Case 10: template and tokenizer both add BOS; the prompt has one."""
    ids = make_format(Data(format="chat"), adding_bos)(Problem("hi", ""))
    assert ids == [adding_bos.bos_token_id, *answer_ids("hi", adding_bos)]


def test_a_doubled_bos_is_an_error(adding_bos: Any) -> None:
    adding_bos.chat_template = "{{ bos_token }}" + adding_bos.chat_template
    with pytest.raises(UserError, match="two beginning-of-sequence tokens"):
        make_format(Data(format="chat"), adding_bos)(Problem("hi", ""))
    with pytest.raises(UserError, match="two beginning-of-sequence tokens"):
        make_format(Data(format="text", add_bos=True), adding_bos)(Problem("<|reserved_0|>hi", ""))


def test_no_chat_template_is_an_error_at_start(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"no chat template; use data.format=text"):
        make_format(Data(format="chat"), tokenizer)


def test_text_has_a_bos_only_when_asked(adding_bos: Any, tokenizer: Any) -> None:
    plain = make_format(Data(format="text"), adding_bos)(Problem("hi", ""))
    with_bos = make_format(Data(format="text", add_bos=True), adding_bos)(Problem("hi", ""))
    assert with_bos == [adding_bos.bos_token_id, *plain]
    with pytest.raises(UserError, match="no beginning-of-sequence token"):
        make_format(Data(format="text", add_bos=True), tokenizer)
    with pytest.raises(UserError, match="list of messages"):
        make_format(Data(format="text"), tokenizer)(Problem([{"role": "user", "content": "hi"}], ""))


def letters(record: dict[str, Any], tokenizer: Any) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(letter) for letter in record["word"]]


def out_of_range(record: dict[str, Any], tokenizer: Any) -> list[int]:
    return [len(tokenizer)]


def test_a_format_of_the_users(tokenizer: Any) -> None:
    problem = Problem("unused", "", {"word": "ab"})
    assert make_format(Data(format="tests.rollout.test_format:letters"), tokenizer)(problem) == answer_ids(
        "ab", tokenizer
    )
    with pytest.raises(UserError, match="token ids from 0 to"):
        make_format(Data(format="tests.rollout.test_format:out_of_range"), tokenizer)(problem)
    with pytest.raises(UserError, match="KeyError"):
        make_format(Data(format="tests.rollout.test_format:letters"), tokenizer)(Problem("unused", ""))


def test_messages_go_through_the_template(tokenizer: Any) -> None:
    render = make_format(Data(format="chat"), tokenizer)
    assert render(Problem([{"role": "user", "content": "1"}], "")) == render(Problem("1", ""))


def test_tools_and_a_thinking_switch_reach_the_chat_template(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}[{{ tool['name'] }}]{% endfor %}{% if not enable_thinking %}/no_think {% endif %}"
        "{{ messages[-1]['content'] }}"
    )
    data = Data(tools=[{"name": "add"}], tools_key="tools", chat_args={"enable_thinking": False})

    def text(data: Data, record: dict[str, Any]) -> str:
        return str(tokenizer.decode(make_format(data, tokenizer)(Problem("q", "", record))))

    assert text(data, {}) == "[add]/no_think q"
    assert text(data, {"tools": [{"name": "multiply"}]}) == "[multiply]/no_think q", "a record's own come first"
    assert text(Data(chat_args={"enable_thinking": True}), {}) == "q"


def test_an_error_of_a_format_names_the_prompt(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[5]['content'] + 1 }}"
    with pytest.raises(UserError, match=r"chat template failed on prompt [0-9a-f]{16}, 'what is':.*UndefinedError"):
        make_format(Data(), tokenizer)(Problem("what is", ""))
    data = Data(format="tests.rollout.test_format:broken")
    with pytest.raises(UserError, match=r"test_format:broken raised KeyError: 'x', on prompt [0-9a-f]{16}: 'what is'"):
        make_format(data, tokenizer)(Problem("what is", ""))


def broken(record: dict[str, Any], tokenizer: Any) -> list[int]:
    return [record["x"]]
