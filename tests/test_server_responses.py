"""The interface of OpenAI's responses: items, events, tools, formats, failures."""

import json
from typing import Any

import pytest

from colibri import Model

pytest.importorskip("fastapi")

from server_client import Client, error_of  # noqa: E402

ASK: dict[str, Any] = {
    "model": "demo",
    "max_output_tokens": 20,
    "temperature": 0,
    "input": "What color is the sky?",
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "get_weather", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def model(served: Any) -> Model:
    return served.model  # type: ignore[no-any-return]


def events(client: Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = client.post("/v1/responses", {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    found = [json.loads(block.split("\ndata: ")[1]) for block in answer.text.split("\n\n") if block]
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


def test_an_answer_and_its_stream(client: Client, model: Model) -> None:
    answer = client.post("/v1/responses", ASK).json()
    messages = [{"role": "user", "content": ASK["input"]}]
    expected = model.chat(messages, temperature=0, max_tokens=20)
    (item,) = answer["output"]
    assert item["type"] == "message" and item["content"][0]["text"] == expected.text
    assert answer["status"] == "completed" and answer["usage"]["output_tokens"] == expected.n_generated
    found = events(client, ASK)
    assert [found[0]["type"], found[-1]["type"]] == ["response.created", "response.completed"]
    texts = [one["delta"] for one in found if one["type"] == "response.output_text.delta"]
    assert "".join(texts) == expected.text and len(texts) > 2
    assert found[-1]["response"]["output"][0]["content"] == item["content"]
    items = [{"role": "user", "content": [{"type": "input_text", "text": ASK["input"]}]}]
    again = client.post("/v1/responses", {**ASK, "input": items}).json()
    assert again["output"][0]["content"] == item["content"]


def test_a_cut_answer_is_incomplete(client: Client) -> None:
    answer = client.post("/v1/responses", {**ASK, "max_output_tokens": 1}).json()
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events(client, {**ASK, "max_output_tokens": 1})[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_tools(client: Client, choice: Any) -> None:
    pytest.importorskip("llguidance")
    body = {**ASK, "max_output_tokens": 80, "tools": [TOOL], "tool_choice": choice}
    (call,) = client.post("/v1/responses", body).json()["output"]
    assert call["type"] == "function_call" and call["name"] == "get_weather" and call["call_id"]
    assert json.loads(call["arguments"])["city"] in ("Oslo", "Rome")
    found = events(client, body)
    done = next(one for one in found if one["type"] == "response.function_call_arguments.done")
    assert done["arguments"] == call["arguments"]


def test_formats(client: Client) -> None:
    pytest.importorskip("llguidance")
    text = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    answer = client.post("/v1/responses", {**ASK, "max_output_tokens": 60, "text": text}).json()
    assert json.loads(answer["output"][0]["content"][0]["text"])["city"] in ("Oslo", "Rome")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"nothing": 1}, "nothing"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "response_format"),
    ],
)
def test_what_is_wrong_is_named(client: Client, changes: dict[str, Any], param: str) -> None:
    found = error_of(client.post("/v1/responses", {**ASK, **changes}))
    assert str(found["param"]).startswith(param)
