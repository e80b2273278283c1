import asyncio
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from vime.config import Data, Rollout, TinyModel
from vime.errors import UserError
from vime.models.tiny import make_tiny
from vime.rollout.data.format import FormatFailed, answer_end, answer_ids, load_tokenizer, make_format, probe_format
from vime.rollout.data.problem import Problem
from vime.rollout.data.user_calls import UserCalls

HERE = "tests.rollout.data.formats"


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


def rendered(data: Data, tokenizer: Any, problem: Problem, **rollout: Any) -> list[int]:
    async def run() -> list[int]:
        calls = UserCalls(1)
        try:
            return await make_format(data, tokenizer, Rollout.model_validate(rollout), calls)(problem)
        finally:
            calls.close()

    return asyncio.run(run())


def test_the_chat_template_alone_decides_about_special_tokens(adding_bos: Any) -> None:
    """Case 10: template and tokenizer both add BOS; the prompt has one."""
    ids = rendered(Data(format="chat"), adding_bos, Problem("hi", ""))
    assert ids == [adding_bos.bos_token_id, *answer_ids("hi", adding_bos)]


def test_a_doubled_bos_is_an_error(adding_bos: Any) -> None:
    adding_bos.chat_template = "{{ bos_token }}" + adding_bos.chat_template
    with pytest.raises(UserError, match="two beginning-of-sequence tokens"):
        rendered(Data(format="chat"), adding_bos, Problem("hi", ""))
    with pytest.raises(UserError, match="two beginning-of-sequence tokens"):
        rendered(Data(format="text", add_bos=True), adding_bos, Problem("<|reserved_0|>hi", ""))


def test_no_chat_template_is_an_error_at_start(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"no chat template; use data.format=text"):
        make_format(Data(format="chat"), tokenizer, Rollout(), UserCalls(1))


def test_text_has_a_bos_only_when_asked(adding_bos: Any, tokenizer: Any) -> None:
    plain = rendered(Data(format="text"), adding_bos, Problem("hi", ""))
    with_bos = rendered(Data(format="text", add_bos=True), adding_bos, Problem("hi", ""))
    assert with_bos == [adding_bos.bos_token_id, *plain]
    with pytest.raises(UserError, match="no beginning-of-sequence token"):
        make_format(Data(format="text", add_bos=True), tokenizer, Rollout(), UserCalls(1))
    with pytest.raises(UserError, match="list of messages"):
        rendered(Data(format="text"), tokenizer, Problem([{"role": "user", "content": "hi"}], ""))


def test_a_format_of_the_users(tokenizer: Any) -> None:
    problem = Problem("unused", "", {"word": "ab"})
    for name in ("letters", "letters_awaited", "letters_of_numpy"):
        assert rendered(Data(format=f"{HERE}:{name}"), tokenizer, problem) == answer_ids("ab", tokenizer)
    with pytest.raises(UserError, match=f"data.format={HERE}:of_other_arguments asks for 'text'; there are record"):
        rendered(Data(format=f"{HERE}:of_other_arguments"), tokenizer, problem)


@pytest.mark.parametrize("returned", [None, [], "ab", [1.5], {"input_ids": [1]}, [-1], [1 << 20], 7, [[1]]])
def test_what_is_no_list_of_token_ids_fails_this_prompt_alone(tokenizer: Any, returned: Any) -> None:
    data = Data(format=f"{HERE}:as_recorded")
    text = f"data.format={HERE}:as_recorded returned no list of token ids from 0 to .*, on prompt .*'q'"
    with pytest.raises(FormatFailed, match=text):
        rendered(data, tokenizer, Problem("q", "", {"returned": returned}))
    assert rendered(data, tokenizer, Problem("q", "", {"returned": [3, 4]})) == [3, 4]


@pytest.mark.parametrize("name", ["hangs", "waits_for_ever", "blocks"])
def test_a_format_that_hangs_is_cut_off(tokenizer: Any, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    text = r"took more than 0.1 s \(rollout.reward_timeout\), on prompt \w{16}, 'q'$"
    with pytest.raises(FormatFailed, match=f"^data.format={HERE}:{name} {text}"):
        rendered(Data(format=f"{HERE}:{name}"), tokenizer, Problem("q", ""), reward_timeout=0.1)
    assert time.monotonic() - begun < 5
    assert f"{HERE}:{name} took more than 0.1 s on prompt" in capsys.readouterr().err


attempts = 0


async def succeeds_at_last(record: dict[str, Any]) -> list[int]:
    global attempts
    attempts += 1
    if attempts < 3:
        raise OSError("not now")
    return [1]


def test_a_format_that_raises_is_tried_again(tokenizer: Any) -> None:
    global attempts
    for tries in (3, 2):
        attempts = 0
        expected = nullcontext() if tries == 3 else pytest.raises(FormatFailed, match="OSError: not now, on prompt")
        with expected:
            assert rendered(Data(format=f"{__name__}:succeeds_at_last"), tokenizer, Problem("q", ""), tries=tries) == [
                1
            ]
        assert attempts == tries


def test_a_format_has_a_tokenizer_of_its_own(tokenizer: Any) -> None:
    """One that leaves truncation switched on meets nobody else's calls in another thread."""
    assert len(rendered(Data(format=f"{HERE}:changes_its_tokenizer"), tokenizer, Problem("q", ""))) == 2
    assert tokenizer.backend_tokenizer.truncation is None


@pytest.mark.parametrize(("bad", "fails"), [({0}, False), ({0, 4}, False), ({0, 4, 8}, True)])
def test_a_format_that_fails_everywhere_is_refused_at_the_start(tokenizer: Any, bad: set[int], fails: bool) -> None:
    problems = [Problem(f"q{i}", "", {} if i in bad else {"returned": [1]}) for i in range(10)]

    async def run() -> None:
        render = make_format(Data(format=f"{HERE}:as_recorded"), tokenizer, Rollout(), UserCalls(1))
        await probe_format(render, problems)

    if not fails:
        asyncio.run(run())
        return
    with pytest.raises(UserError, match=r"raised KeyError: 'returned', on prompt .*'q8'; it failed on each of"):
        asyncio.run(run())


def test_messages_go_through_the_template(tokenizer: Any) -> None:
    messages = Problem([{"role": "user", "content": "1"}], "")
    assert rendered(Data(), tokenizer, messages) == rendered(Data(), tokenizer, Problem("1", ""))


STRINGS_ONLY = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant', 'tool') and m.content is string %}"
    "{{ '<|user|>' + (m.content | trim) }}{% else %}{{ '<|user|>' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("role", ["human", "User"])
def test_a_message_that_the_template_drops_is_refused_with_its_line(tokenizer: Any, role: str) -> None:
    tokenizer.chat_template = STRINGS_ONLY
    messages = [{"role": "system", "content": "be brief"}, {"role": role, "content": "what is 2 + 2?"}]
    with pytest.raises(UserError, match=rf"leaves out the text of message 1 of role '{role}' of train.jsonl:7 \("):
        rendered(Data(), tokenizer, Problem(messages, "4", where="train.jsonl:7"))


def test_what_a_template_trims_is_not_lost(tokenizer: Any) -> None:
    tokenizer.chat_template = STRINGS_ONLY
    messages = [
        {"role": "user", "content": " a\n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "a"},
    ]
    assert rendered(Data(), tokenizer, Problem(messages, "1"))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content.split('</think>')[-1] | trim }}{% endfor %}"
    assert tokenizer.decode(rendered(Data(), tokenizer, Problem(messages, "1"))) == "aba"
    moved = [{"role": "user", "content": "a"}, {"role": "system", "content": "s"}, {"role": "user", "content": "b"}]
    tokenizer.chat_template = "s{{ messages[0].content }}{{ messages[2].content }}"
    assert tokenizer.decode(rendered(Data(), tokenizer, Problem(moved, "1"))) == "sab"


def test_a_conversation_of_each_kind_is_rendered_at_the_start(tokenizer: Any) -> None:
    """The one bad record among many lies where no probe looks."""
    tokenizer.chat_template = STRINGS_ONLY
    problems = [Problem([{"role": "user", "content": str(i)}], "", where=f"f:{i}") for i in range(100)]
    problems[51] = Problem([{"role": "human", "content": "51"}], "", where="f:51")

    async def run() -> None:
        await probe_format(make_format(Data(), tokenizer, Rollout(), UserCalls(1)), problems)

    with pytest.raises(UserError, match=r"role 'human' of f:51"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("after", "stops", "end"),
    [
        ("<|end|>", ["<|end|>"], "<|end|>"),
        ("\n<|end|>\n", ["<|end|>", "<|pad|>"], "<|end|>"),
        ("", ["<|user|>"], "<|user|>"),
        ("<|end|>", ["<|pad|>"], None),
        ("<|reserved_1|>", ["<|end|>"], None),
        ("[/ANSWER]", ["<|end|>"], None),
        ("", ["<|end|>"], None),
    ],
)
def test_what_ends_an_answer_must_end_a_response(tokenizer: Any, after: str, stops: list[str], end: str | None) -> None:
    """A base model's tokenizer with a chat template of another: nothing but the limit would end a response."""
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% if m.role == 'assistant' %}"
        "{{ '" + after.replace("\n", "\\n") + "' }}{% endif %}{% endfor %}"
    )
    ids = tokenizer.convert_tokens_to_ids(stops)
    if end is not None:
        assert answer_end(Data(), tokenizer, ids) == tokenizer.convert_tokens_to_ids(end)
        return
    with pytest.raises(
        UserError, match=r"the chat template ends an answer with '.*' \(token \d+\), and a response ends"
    ):
        answer_end(Data(), tokenizer, ids)
    assert answer_end(Data(format="text"), tokenizer, ids) is None


def test_a_template_that_says_nothing_of_an_end_leaves_it_to_the_tokenizer(tokenizer: Any) -> None:
    for template in ("{{ messages[0].content }}", "{% for m in messages %}{{ m.content }}{% endfor %}"):
        tokenizer.chat_template = template
        assert answer_end(Data(), tokenizer, [0]) is None
    tokenizer.chat_template = "{{ raise_exception('no assistant here') }}"
    assert answer_end(Data(), tokenizer, [0]) is None


def test_tools_and_a_thinking_switch_reach_the_chat_template(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}[{{ tool['name'] }}]{% endfor %}{% if not enable_thinking %}/no_think {% endif %}"
        "{{ messages[-1]['content'] }}"
    )
    data = Data(tools=[{"name": "add"}], tools_key="tools", chat_args={"enable_thinking": False})

    def text(data: Data, record: dict[str, Any]) -> str:
        return str(tokenizer.decode(rendered(data, tokenizer, Problem("q", "", record))))

    assert text(data, {}) == "[add]/no_think q"
    assert text(data, {"tools": [{"name": "multiply"}]}) == "[multiply]/no_think q", "a record's own come first"
    assert text(Data(chat_args={"enable_thinking": True}), {}) == "q"


def test_an_error_of_a_format_names_the_prompt(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[5]['content'] + 1 }}"
    with pytest.raises(UserError, match=r"chat template failed on prompt [0-9a-f]{16}, 'what is':.*UndefinedError"):
        rendered(Data(), tokenizer, Problem("what is", ""))
    data = Data(format=f"{HERE}:broken")
    with pytest.raises(FormatFailed, match=f"{HERE}:broken raised KeyError: 'x', on prompt [0-9a-f]{{16}}, 'what is'"):
        rendered(data, tokenizer, Problem("what is", ""))
