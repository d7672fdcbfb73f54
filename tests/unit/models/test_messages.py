"""Messages and tools to tokens: formats of tool calls, what clients send, and the joint between a sampled reply and what follows it."""

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tether.core.errors import BadInput
from tether.models.chat import ChatFormat
from tether.models.messages import AgentChat, Message, assistant_message, read_messages, read_tools
from tether.models.tool_formats import FORMATS, Reply, ToolCall, UnreadableCall, read_reply

HERMES = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}'
    "{% if loop.first and tools %}[{{ tools | length }} tools]{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
XML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    '{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{% endfor %}]{% endif %}<|im_end|>{% endfor %}'
)
UNKNOWN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}},
}


@pytest.fixture
def agent_chat(tiny: Any) -> Any:
    def make(template: str, **options: Any) -> AgentChat:
        tokenizer = copy.deepcopy(tiny.tokenizer)
        tokenizer.chat_template = template
        return AgentChat(ChatFormat(tokenizer), **options)

    return make


# --- formats ---


@pytest.mark.parametrize(("template", "name"), [(HERMES, "hermes"), (XML, "xml"), (LLAMA, "llama3"), (MISTRAL, "mistral")])
def test_a_template_says_its_format(agent_chat: Any, template: str, name: str) -> None:
    assert agent_chat(template).tool_format == name


def test_an_unknown_format_is_refused_where_tools_are_used(agent_chat: Any) -> None:
    chat = agent_chat(UNKNOWN)
    assert chat.read("CALL add", (), thinking=False) == Reply("CALL add")
    with pytest.raises(
        BadInput, match=r"no format that is known here; name one as agent\.tool_format, or --tool-format of a server \(hermes, xml"
    ):
        chat.read("CALL add", [TOOL], thinking=False)
    assert agent_chat(UNKNOWN, tool_format="hermes").read("x", [TOOL], thinking=False) == Reply("x")
    with pytest.raises(BadInput, match="did you mean 'hermes'"):
        agent_chat(UNKNOWN, tool_format="hermse")


CALL = ToolCall("add", {"a": 2, "s": "x y"})


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 2, "s": "x y"}}\n</tool_call>', "", (CALL,)),
        ("hermes", 'So.\n<tool_call>{"arguments":{"s":"x y","a":2},"name":"add"}</tool_call>', "So.\n", (CALL,)),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2, \\"s\\": \\"x y\\"}"}', "", (CALL,)),
        ("hermes", '<tool_call>\n{{"name": "add", "arguments": {"a": 2, "s": "x y"}}}\n</tool_call>', "", (CALL,)),
        (
            "hermes",
            '<tool_call>{"name": "add"}</tool_call><tool_call>{"name": "b", "arguments": {}}</tool_call>',
            "",
            (ToolCall("add", {}), ToolCall("b", {})),
        ),
        ("hermes", "no call", "no call", ()),
        (
            "xml",
            "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=s>\nx y\n</parameter>\n</function>\n</tool_call>",
            "",
            (CALL,),
        ),
        ("xml", "<tool_call><function=add><parameter=s>2</parameter></function></tool_call>", "", (ToolCall("add", {"s": "2"}),)),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 2, "s": "x y"}}', "", (CALL,)),
        (
            "llama3",
            '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2, "s": "x y"}}',
            "",
            (ToolCall("add", {"a": 1}), CALL),
        ),
        ("llama3", "It is 4.", "It is 4.", ()),
        ("llama3", '{"x": 1}', '{"x": 1}', ()),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "s": "x y"}}]', "", (CALL,)),
        ("mistral", 'Yes.[TOOL_CALLS]add[ARGS]{"a": 2, "s": "x y"}', "Yes.", (CALL,)),
    ],
)
def test_calls_that_models_write(name: str, text: str, content: str, calls: tuple[ToolCall, ...]) -> None:
    assert FORMATS[name](text, [TOOL]) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>add(2)</tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>'),
        ("xml", "<tool_call>add</tool_call>"),
        ("xml", "<tool_call><function=add><parameter=a>2</function></tool_call>"),
        ("llama3", '<|python_tag|>{"name": "add"'),
        ("mistral", "[TOOL_CALLS]add"),
    ],
)
def test_a_call_that_cannot_be_read_is_text(name: str, text: str) -> None:
    with pytest.raises(UnreadableCall):
        FORMATS[name](text, [TOOL])
    assert read_reply(text, FORMATS[name], [TOOL]) == Reply(text, unparsed=1)


def test_reasoning_is_apart_from_content() -> None:
    assert read_reply("<think>\nwhy\n</think>\n\nIt is 4.", None) == Reply("\n\nIt is 4.", "why")
    assert read_reply("why</think>4", None, thinking=True) == Reply("4", "why")
    assert read_reply("why</think>4", None) == Reply("why</think>4"), "nothing opened it"
    assert read_reply("<think>endless", None) == Reply("<think>endless")


@pytest.mark.parametrize("family", ["<tool_call>", "</tool_call>", "<parameter=a>", "{", "[TOOL_CALLS]", "</think>", "<function="])
@pytest.mark.parametrize("name", list(FORMATS))
def test_hostile_replies_take_time_in_proportion(name: str, family: str) -> None:
    """A hundred thousand openings: a parser of quadratic time would not come back."""
    assert isinstance(read_reply(family * 100_000, FORMATS[name], [TOOL]), Reply)


# --- messages ---


def test_spellings_of_one_conversation_are_equal() -> None:
    plain = read_messages(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "tool_calls": [_wire("add", '{"a": 2, "s": "x"}')]},
            {"role": "tool", "tool_call_id": "1", "content": "4"},
        ]
    )
    other = read_messages(
        [
            {"role": "developer", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "hm",
                "tool_calls": [_wire("add", {"s": "x", "a": 2})],
                "refusal": None,
            },
            {"role": "tool", "tool_call_id": "other", "name": "add", "content": [{"type": "text", "text": "4"}]},
        ]
    )
    assert [message.key for message in plain] == [message.key for message in other]


def _wire(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ([], "messages must be a list with at least one message"),
        ("hi", "messages must be a list with at least one message"),
        (["hi"], r"messages\[0\] is a str"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\] has the role 'robot'; send one of system, developer"),
        ([{"role": "user", "content": None}], r"messages\[0\] has no content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\] has a part of type 'image_url'; the model reads text only",
        ),
        ([{"role": "user", "content": 3}], r"has content that is a int"),
        ([{"role": "assistant", "tool_calls": [_wire("add", "{")]}], "arguments are no JSON"),
        ([{"role": "assistant", "tool_calls": [_wire("add", "[1]")]}], "arguments are no object"),
        ([{"role": "assistant", "content": "x", "function_call": {}}], "send tool_calls"),
    ],
)
def test_messages_that_cannot_be_used(messages: Any, line: str) -> None:
    with pytest.raises(BadInput, match=line):
        read_messages(messages)


def test_tools_that_cannot_be_used() -> None:
    assert read_tools(None) == read_tools([]) == ()
    for tools, line in (
        ({}, None),
        ([{"type": "web_search"}], "of type 'web_search'"),
        ([{"type": "function", "function": {}}], "with a name"),
    ):
        if line is None:
            assert read_tools(tools) == ()
        else:
            with pytest.raises(BadInput, match=line):
                read_tools(tools)


# --- the joint ---

OPENING = read_messages([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
FOLLOWS = [
    [{"role": "user", "content": "and then?"}],
    [{"role": "tool", "tool_call_id": "c00000000", "content": "4"}],
    [
        {"role": "tool", "tool_call_id": "c00000000", "content": "4"},
        {"role": "tool", "tool_call_id": "c00000001", "content": "5"},
        {"role": "user", "content": "so?"},
    ],
]


@pytest.mark.parametrize("follows", FOLLOWS)
@pytest.mark.parametrize("template", [HERMES, XML])
def test_prompt_reply_and_joint_are_the_template(agent_chat: Any, template: str, follows: list[dict[str, Any]]) -> None:
    """Where the reply is written as the template writes it, appending gives the text of rendering everything."""
    chat, after = agent_chat(template), read_messages(follows)
    reply = Reply("Let me see.")
    sampled = (*chat._chat.encode(reply.content), chat._chat.end_of_turn)
    joint = chat.joint(OPENING, after, [TOOL], sampled)
    appended = chat.decode((*chat.prompt(OPENING, [TOOL]), *sampled, *joint))
    assert appended == chat.decode(chat.prompt((*OPENING, assistant_message(reply, ()), *after), [TOOL]))
    cut = sampled[:-1]
    assert chat.decode((*cut, *chat.joint(OPENING, after, [TOOL], cut))) == chat.decode((*sampled, *joint)), (
        "a reply that was cut gets the end of its turn"
    )


def test_a_template_that_hides_replies_has_no_joint(agent_chat: Any) -> None:
    chat = agent_chat("{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}")
    assert chat.joint(OPENING, read_messages([{"role": "user", "content": "x"}]), [], (1, 2)) is None


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="its chat templates come with trl")
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_8"])
@pytest.mark.parametrize("follows", FOLLOWS)
def test_joints_of_templates_in_use(agent_chat: Any, name: str, follows: list[dict[str, Any]]) -> None:
    import trl

    chat = agent_chat((Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text())
    after, calls = read_messages(follows), (ToolCall("add", {"a": 2}), ToolCall("add", {"a": 3}))
    said = assistant_message(Reply("", calls=calls), ["c00000000", "c00000001"])
    whole = chat.decode(chat.prompt((*OPENING, said, *after), [TOOL]))
    joint = chat.decode(chat.joint(OPENING, after, [TOOL], (chat._chat.end_of_turn,)))
    assert whole.endswith(joint) and len(joint) > 10


def test_a_message_for_templates() -> None:
    message = Message("assistant", "", (("add", json.dumps({"a": 2})),), "why", ("call_abc123def456",))
    shown = message.for_template()
    assert shown["tool_calls"][0]["function"]["arguments"] == {"a": 2} and shown["reasoning_content"] == "why"
    assert len(shown["tool_calls"][0]["id"]) == 9 and shown["tool_calls"][0]["id"].isalnum()
