"""The server's interfaces, through its application without a socket: bodies and streams."""

import json
from typing import Any

import pytest

import colibri
from colibri import Model

pytest.importorskip("fastapi")

from server_client import GREEDY, Client, error_of, prompt_for  # noqa: E402


@pytest.fixture(scope="module")
def model(served: Any) -> Model:
    return served.model  # type: ignore[no-any-return]


# --- completions


def test_a_completion_is_what_the_model_writes(client: Client, model: Model) -> None:
    body = {"model": "demo", "prompt": "Once upon a time", **GREEDY}
    answer = client.post("/v1/completions", body).json()
    expected = model.generate("Once upon a time", **GREEDY)
    assert answer["choices"] == [
        {"index": 0, "text": expected.text, "logprobs": None, "finish_reason": "length"}
    ]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (expected.n_prompt, 12)
    assert answer["object"] == "text_completion" and answer["model"] == "demo"


def test_a_stream_gives_the_same(client: Client) -> None:
    body = {"prompt": "Once upon a time", **GREEDY}
    whole = client.post("/v1/completions", body).json()
    events = client.events("/v1/completions", body)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
    assert len(events) > 5 and all("usage" not in event for event in events)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_comes_where_it_was_asked_for(client: Client, path: str, options: Any) -> None:
    """Case 24."""
    body = {**prompt_for(path), **GREEDY, "stream_options": options}
    events = client.events(path, body)
    del body["stream_options"]
    usage = client.post(path, body).json()["usage"]
    if options == {"include_usage": True}:
        assert events[-1]["choices"] == []
        del events[-1]["usage"]["prompt_tokens_details"], usage["prompt_tokens_details"]
        assert events[-1]["usage"] == usage
        events.pop()
    assert all(event["choices"] and "usage" not in event for event in events)


def test_many_prompts_and_choices(client: Client, model: Model) -> None:
    """Case 30: n = 3 gives three, in order, the same whatever else runs."""
    body = {"prompt": ["Once", "The dog"], "n": 3, "temperature": 1, "seed": 7, "max_tokens": 8, "top_k": 40}
    answer = client.post("/v1/completions", body).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    options: dict[str, Any] = {"temperature": 1, "max_tokens": 8, "top_k": 40}
    expected = [
        model.generate(text, seed=seed, **options).text for text in ("Once", "The dog") for seed in (7, 8, 9)
    ]
    assert [choice["text"] for choice in answer["choices"]] == expected
    n = sum(len(model.tokenizer.encode_prompt(text)) for text in ("Once", "The dog"))
    assert answer["usage"]["prompt_tokens"] == n
    texts = dict.fromkeys(range(6), "")
    for event in client.events("/v1/completions", body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == expected


def test_ids_echo_and_log_probabilities(client: Client, model: Model) -> None:
    ids = model.tokenizer.encode_prompt("The dog")
    body = {"prompt": ids, "echo": True, "logprobs": 2, **GREEDY}
    choice = client.post("/v1/completions", body).json()["choices"][0]
    shown = choice["logprobs"]
    assert choice["text"].startswith("The dog")
    assert "".join(shown["tokens"]) == choice["text"]
    assert shown["token_logprobs"][0] is None and all(value <= 0 for value in shown["token_logprobs"][1:])
    assert len(shown["tokens"]) == len(ids) + 12 == len(shown["top_logprobs"])
    assert [
        choice["text"][at:].startswith(token)
        for at, token in zip(shown["text_offset"], shown["tokens"], strict=True)
    ]
    streamed: dict[str, list[Any]] = {}
    for event in client.events("/v1/completions", body):
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            streamed.setdefault(name, []).extend(values)
    assert streamed == shown


@pytest.mark.parametrize("stop", ["the", ["zz", "e "], None])
def test_stop_texts_do_not_leak(client: Client, model: Model, stop: Any) -> None:
    """Case 23."""
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 40, "stop": stop}
    whole = client.post("/v1/completions", body).json()["choices"][0]
    expected = model.generate("Once upon a time", temperature=0, max_tokens=40, stop=stop)
    assert (whole["text"], whole["finish_reason"]) == (expected.text, expected.finish_reason)
    assert (
        "".join(event["choices"][0]["text"] for event in client.events("/v1/completions", body))
        == expected.text
    )


# --- chat


def test_a_conversation(client: Client, model: Model) -> None:
    messages = [{"role": "user", "content": "What color is the sky?"}]
    body = {"messages": messages, "temperature": 0, "max_completion_tokens": 20}
    answer = client.post("/v1/chat/completions", body).json()
    expected = model.chat(messages, temperature=0, max_tokens=20)
    message = answer["choices"][0]["message"]
    assert message["role"] == "assistant" and message["content"] == expected.text
    assert answer["object"] == "chat.completion" and answer["usage"]["prompt_tokens"] == expected.n_prompt
    deltas = [event["choices"][0]["delta"] for event in client.events("/v1/chat/completions", body)]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == expected.text
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "What color "}, {"type": "text", "text": "is the sky?"}],
        }
    ]
    again = client.post("/v1/chat/completions", {**body, "messages": parts}).json()
    assert again["choices"][0]["message"]["content"] == expected.text


def test_chat_log_probabilities(client: Client, model: Model) -> None:
    """Case 22."""
    body = {**prompt_for("/v1/chat/completions"), **GREEDY, "logprobs": True, "top_logprobs": 5}
    choice = client.post("/v1/chat/completions", body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    joined = b"".join(bytes(one["bytes"]) for one in content)
    assert joined.decode() == choice["message"]["content"]
    for one in content:
        values = [top["logprob"] for top in one["top_logprobs"]]
        assert values == sorted(values, reverse=True) and len(values) == 5 and one["logprob"] <= 0
        assert one["logprob"] == values[0]
    events = client.events("/v1/chat/completions", body)
    told = [
        one
        for event in events
        if event["choices"][0]["logprobs"]
        for one in event["choices"][0]["logprobs"]["content"]
    ]
    assert told == content


SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather somewhere.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ],
)
def test_answers_that_match(client: Client, asked: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    body = {**prompt_for("/v1/chat/completions"), "max_tokens": 100, "seed": 1, **asked}
    content = client.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert isinstance(json.loads(content)["age"], int)


def test_choices_and_patterns(client: Client) -> None:
    pytest.importorskip("llguidance")
    for asked, right in (
        ({"choice": ["red", "dark blue"]}, {"red", "dark blue"}),
        ({"regex": "[ab]c"}, {"ac", "bc"}),
    ):
        body = {
            **prompt_for("/v1/chat/completions"),
            "max_tokens": 30,
            "seed": 1,
            "structured_outputs": asked,
        }
        assert client.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] in right


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_that_must_be_called_is_called(client: Client, choice: Any) -> None:
    pytest.importorskip("llguidance")
    body = {
        **prompt_for("/v1/chat/completions"),
        "max_tokens": 100,
        "seed": 3,
        "tools": [TOOL],
        "tool_choice": choice,
    }
    found = client.post("/v1/chat/completions", body).json()["choices"][0]
    call = found["message"]["tool_calls"][0]
    assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
    assert call["type"] == "function" and call["function"]["name"] == "get_weather" and call["id"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    deltas = [event["choices"][0] for event in client.events("/v1/chat/completions", body)]
    calls = [one for delta in deltas for one in delta["delta"].get("tool_calls", [])]
    assert "".join(one["function"]["arguments"] for one in calls) == call["function"]["arguments"]
    assert deltas[-1]["finish_reason"] == "tool_calls"


# --- the rest


def test_tokens(client: Client, model: Model) -> None:
    found = client.post("/tokenize", {"prompt": "The dog", "return_token_strs": True}).json()
    assert found["tokens"] == model.tokenizer.encode_prompt("The dog") and found["count"] == len(
        found["tokens"]
    )
    assert client.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"].endswith("The dog")
    messages = [{"role": "user", "content": "hi"}]
    assert client.post("/tokenize", {"messages": messages}).json()["tokens"] == model.chat_ids(messages)


def test_control_tokens_of_users_stay_text(client: Client, model: Model) -> None:
    """Case 20."""
    controls = model.tokenizer.control_ids
    for name, id in controls.items():
        messages = [{"role": "user", "content": f"hi{name}\nobey"}]
        plain = model.chat_ids([{"role": "user", "content": "hi\nobey"}])
        found = client.post("/tokenize", {"messages": messages}).json()["tokens"]
        assert found.count(id) == plain.count(id)


def test_what_a_server_says_of_itself(client: Client) -> None:
    models = client.ask("GET", "/v1/models").json()
    assert [one["id"] for one in models["data"]] == ["demo"]
    assert client.ask("GET", "/v1/models/demo").json()["max_model_len"] == 256
    error_of(client.ask("GET", "/v1/models/other"), 404)
    assert client.ask("GET", "/health").status_code == 200
    assert client.ask("GET", "/version").json()["version"] == colibri.__version__
    assert client.ask("GET", "/v1/experts").json()["residency"] == "mapped"
    assert "/v1/chat/completions" in client.ask("GET", "/openapi.json").json()["paths"]
    text = client.ask("GET", "/metrics").text
    for name in ("colibri_requests_total", "vllm:num_requests_running", "colibri_generation_tokens_total"):
        assert name in text
