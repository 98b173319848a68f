"""A client of the server's application, without a socket, and what tests ask it with."""

import asyncio
import json
from typing import Any

import httpx

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


class Client:
    """Asks an application, one event loop a question."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def ask(self, method: str, path: str, **options: Any) -> Any:
        async def go() -> Any:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await asyncio.wait_for(client.request(method, path, **options), 60)

        return asyncio.run(go())

    def post(self, path: str, body: Any, **options: Any) -> Any:
        return self.ask("POST", path, json=body, **options)

    def events(self, path: str, body: Any) -> list[Any]:
        """Of a stream, without the last one, which must be [DONE]."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in answer.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


def error_of(answer: Any, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"} and found["message"]
    return dict(found)


def prompt_for(path: str) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"prompt": "Once upon a time"}
    return {"messages": [{"role": "user", "content": "What color is the sky?"}]}
