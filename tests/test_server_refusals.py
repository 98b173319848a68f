"""What the server refuses, and how it says so: fields, bodies, paths, lengths, keys, hosts."""

import asyncio
from typing import Any

import pytest

from colibri import Model

pytest.importorskip("fastapi")

from colibri.server.app import create_app  # noqa: E402
from colibri.server.guard import Limits, hosts_of  # noqa: E402
from colibri.server.served import Served  # noqa: E402
from server_client import GREEDY, Client, error_of, prompt_for  # noqa: E402


@pytest.fixture(scope="module")
def model(served: Any) -> Model:
    return served.model  # type: ignore[no-any-return]


# --- what is wrong


BAD: list[tuple[str, Any, str | None]] = [
    ("/v1/completions", [], None),
    ("/v1/completions", None, None),
    ("/v1/completions", "str", None),
    ("/v1/completions", {}, "prompt"),
    ("/v1/completions", {"prompt": "a", "stream": "true"}, "stream"),
    ("/v1/completions", {"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature"),
    ("/v1/completions", {"prompt": "a", "temperature": "hot"}, "temperature"),
    ("/v1/completions", {"prompt": "a", "top_p": 0}, "top_p"),
    ("/v1/completions", {"prompt": "a", "top_p": 2}, "top_p"),
    ("/v1/completions", {"prompt": "a", "top_k": -2}, "top_k"),
    ("/v1/completions", {"prompt": "a", "min_p": 1.5}, "min_p"),
    ("/v1/completions", {"prompt": "a", "n": 0}, "n"),
    ("/v1/completions", {"prompt": "a", "n": 1000}, "n"),
    ("/v1/completions", {"prompt": "a", "seed": "x"}, "seed"),
    ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"999999": 1}}, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"1": 200}}, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "stop": [1]}, "stop"),
    ("/v1/completions", {"prompt": "a", "unknown": 1}, "unknown"),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": [99999999]}, None),
    ("/v1/completions", {"prompt": [-1]}, None),
    ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "((("}}, None),
    ("/v1/completions", {"prompt": "word " * 2000}, None),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": "hi"}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ("/v1/chat/completions", {"messages": [{"content": "a"}]}, "messages[0].role"),
    ("/v1/chat/completions", {**prompt_for("c"), "top_logprobs": 3}, "top_logprobs"),
    ("/v1/chat/completions", {**prompt_for("c"), "tool_choice": "required"}, "tool_choice"),
    ("/v1/chat/completions", {**prompt_for("c"), "response_format": {"type": "xml"}}, "response_format.type"),
    ("/v1/chat/completions", {**prompt_for("c"), "tools": [{"type": "function"}]}, "tools[0].function"),
    ("/tokenize", {}, "prompt"),
    ("/detokenize", {"tokens": [-5]}, "tokens[0]"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD, ids=[f"{i}" for i in range(len(BAD))])
def test_what_is_wrong_is_named(client: Client, path: str, body: Any, param: str | None) -> None:
    """Case 25."""
    found = error_of(client.post(path, body))
    assert found["type"] == "invalid_request_error"
    if param is not None:
        assert found["param"] == param, found
    assert client.post("/v1/completions", {"prompt": "a", **GREEDY}).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": NaN}',
        b"",
        b"nul",
    ],
)
def test_bodies_that_are_no_json(client: Client, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    error_of(client.ask("POST", "/v1/completions", content=content, headers=headers))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("POST", "/v1/nothing", 404), ("DELETE", "/v1/models", 405)],
)
def test_wrong_paths_and_methods(client: Client, method: str, path: str, status: int) -> None:
    error_of(client.ask(method, path), status)


def test_a_model_that_is_not_there(client: Client) -> None:
    found = error_of(client.post("/v1/completions", {"model": "gpt-9", "prompt": "a"}), 404)
    assert found["code"] == "model_not_found" and found["param"] == "model" and "'demo'" in found["message"]


@pytest.mark.parametrize("n", [254, 255, 256, 257])
def test_lengths(client: Client, model: Model, n: int) -> None:
    """Case 27."""
    answer = client.post("/v1/completions", {"prompt": [5] * n, "temperature": 0})
    if n > 256:
        message = error_of(answer)["message"]
        assert "257" in message and "256" in message
        return
    found = answer.json()
    assert found["choices"][0]["finish_reason"] in ("length", "stop")
    assert found["usage"]["completion_tokens"] <= 256 - n


def test_max_tokens(client: Client) -> None:
    for most, n in ((0, 0), (1, 1), (10**9, 252)):
        body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": most, "logit_bias": {}}
        found = client.post("/v1/completions", body).json()
        assert found["usage"]["completion_tokens"] <= n
        assert n > 1 or found["choices"][0]["finish_reason"] == "length"


# --- guards


def limited(served: Served, **limits: Any) -> Client:
    return Client(create_app([served], Limits(**limits)))


def test_keys(served: Served) -> None:
    client = limited(served, api_keys=("one", "two"))
    body = {"prompt": "a", **GREEDY}
    for headers in ({}, {"Authorization": "Bearer on"}, {"Authorization": "one"}, {"x-api-key": "onee"}):
        found = error_of(client.post("/v1/completions", body, headers=headers), 401)
        assert found["code"] == "invalid_api_key"
    for headers in ({"Authorization": "Bearer one"}, {"authorization": "bearer two"}, {"x-api-key": "two"}):
        assert client.post("/v1/completions", body, headers=headers).status_code == 200
    assert client.ask("GET", "/health").status_code == 200
    error_of(client.ask("GET", "/metrics"), 401)


def test_hosts(served: Served) -> None:
    client = limited(served, hosts=hosts_of("127.0.0.1", ["colibri.example"]))
    for host, status in (
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("colibri.example:1", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
    ):
        assert client.ask("GET", "/v1/models", headers={"Host": host}).status_code == status
    assert hosts_of("0.0.0.0", []) is None


def test_large_bodies(served: Served) -> None:
    client = limited(served, max_body_bytes=1000)
    error_of(client.post("/v1/completions", {"prompt": "a" * 2000}), 413)

    async def chunks() -> Any:
        for _ in range(50):
            yield b"a" * 100

    error_of(client.ask("POST", "/v1/completions", content=chunks()), 413)


def test_slow_bodies(served: Served) -> None:
    client = limited(served, body_seconds=0.1)

    async def slow() -> Any:
        yield b"{"
        await asyncio.sleep(5)
        yield b"}"

    error_of(client.ask("POST", "/v1/completions", content=slow()), 408)


def test_other_pages_may_not_ask(client: Client, served: Served) -> None:
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert (
        "access-control-allow-origin" not in client.ask("OPTIONS", "/v1/completions", headers=headers).headers
    )
    allowed = Client(create_app([served], allowed_origins=["https://evil.example"]))
    answer = allowed.ask("OPTIONS", "/v1/completions", headers=headers)
    assert answer.headers["access-control-allow-origin"] == "https://evil.example"
