"""The interface of Anthropic: bodies, events, tools, failures."""

import json
from typing import Any

import pytest

from colibri import Model

pytest.importorskip("fastapi")

from server_client import Client  # noqa: E402

ASK: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 20,
    "temperature": 0,
    "messages": [{"role": "user", "content": "What color is the sky?"}],
}
TOOL = {
    "name": "get_weather",
    "description": "The weather somewhere.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def model(served: Any) -> Model:
    return served.model  # type: ignore[no-any-return]


def events(client: Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = client.post("/v1/messages", {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    found = []
    for block in filter(None, answer.text.split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def rebuilt(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that a client makes of events."""
    content: list[dict[str, Any]] = []
    for one in found:
        if one["type"] == "content_block_start":
            assert one["index"] == len(content)
            content.append({**one["content_block"], "partial": ""})
        elif one["type"] == "content_block_delta":
            delta = one["delta"]
            name = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"], "partial_json")
            if name == "partial_json":
                content[-1]["partial"] += delta[name]
            else:
                content[-1][name] += delta[name]
    for block in content:
        partial = block.pop("partial")
        if block["type"] == "tool_use":
            block["input"] = json.loads(partial)
            block["id"] = "id"
    return content


def test_an_answer_and_its_stream(client: Client, model: Model) -> None:
    answer = client.post("/v1/messages", ASK).json()
    expected = model.chat(ASK["messages"], temperature=0, max_tokens=20)
    assert answer["content"] == [{"type": "text", "text": expected.text}]
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "end_turn")
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected.n_prompt
    assert usage["output_tokens"] == expected.n_generated
    found = events(client, ASK)
    assert [found[0]["type"], found[-2]["type"], found[-1]["type"]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert rebuilt(found) == answer["content"] and found[-2]["delta"]["stop_reason"] == "end_turn"


def test_ends(client: Client) -> None:
    assert client.post("/v1/messages", {**ASK, "max_tokens": 1}).json()["stop_reason"] == "max_tokens"
    answer = client.post("/v1/messages", {**ASK, "stop_sequences": ["zz", "is"]}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "is")
    assert "is" not in answer["content"][0]["text"]
    assert events(client, {**ASK, "stop_sequences": ["is"]})[-2]["delta"]["stop_sequence"] == "is"


def test_conversations_of_blocks(client: Client, model: Model) -> None:
    blocks = [{"type": "text", "text": "What color "}, {"type": "text", "text": "is the sky?"}]
    body = {
        **ASK,
        "messages": [{"role": "user", "content": blocks}],
    }
    answer = client.post("/v1/messages", body).json()
    messages = ASK["messages"]
    assert answer["content"][0]["text"] == model.chat(messages, temperature=0, max_tokens=20).text
    body.pop("max_tokens"), body.pop("temperature")
    counted = client.post("/v1/messages/count_tokens", body).json()
    assert counted == {"input_tokens": len(model.chat_ids(messages))}
    refused = client.post("/v1/messages", {**ASK, "system": "Be kind."})
    assert refused.status_code == 400 and "template" in refused.json()["error"]["message"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_tools(client: Client, choice: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    body = {**ASK, "max_tokens": 80, "tools": [TOOL], "tool_choice": choice}
    answer = client.post("/v1/messages", body).json()
    (call,) = answer["content"]
    assert answer["stop_reason"] == "tool_use" and call["type"] == "tool_use" and call["id"]
    assert call["name"] == "get_weather" and call["input"]["city"] in ("Oslo", "Rome")
    assert rebuilt(events(client, body)) == [{**call, "id": "id"}]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}
    more = [*ASK["messages"], {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert client.post("/v1/messages", {**ASK, "messages": more, "tools": [TOOL]}).status_code in (200, 400)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
        ({"temperature": 2}, "temperature"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"nothing": 1}, "nothing"),
    ],
)
def test_failures_have_its_shape(client: Client, changes: dict[str, Any], says: str) -> None:
    answer = client.post("/v1/messages", {**ASK, **changes})
    assert answer.status_code == 400
    error = answer.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert says in error["error"]["message"]


def test_other_failures_too(client: Client) -> None:
    answer = client.post("/v1/messages", {**ASK, "model": "x"})
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"
    assert client.ask("GET", "/v1/messages").json()["type"] == "error"
