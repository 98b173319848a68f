"""`colibri serve` as a process: it is ready when it says so, clients that leave free their places,
one that stalls slows nobody, SIGTERM drains, logs are JSON, wrong options are errors."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

COMMAND = [sys.executable, "-m", "colibri", "serve"]


class Server:
    """A process that serves."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "demo", "--port", "0", "--context", "512", *options], stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        self.lines: list[str] = []
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"on http://(\S+):(\d+)", line):
                break
        else:
            raise AssertionError("".join(self.lines))
        self.host, self.port = found[1], int(found[2])
        self.url = f"http://{self.host}:{self.port}"
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += self.process.stderr

    def post(self, path: str, body: Any, **options: Any) -> Any:
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def gauge(self, name: str) -> float:
        text = httpx.get(self.url + "/metrics", timeout=30).text
        found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert found, text
        return float(found[1])

    def idle(self) -> bool:
        """Whether the engine has nothing to do, soon."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            if self.gauge("colibri_requests_running") + self.gauge("colibri_requests_waiting") == 0:
                return True
            time.sleep(0.02)
        return False

    def raw(self, body: Any) -> socket.socket:
        """A connection that has sent a request and reads nothing yet."""
        data = json.dumps(body).encode()
        found = socket.create_connection((self.host, self.port), timeout=30)
        head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        found.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + data)
        return found

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join(10)
        return code


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server("--max-batch", "2")
    yield found
    found.stop()


LONG: dict[str, Any] = {  # the demo may not end it
    "prompt": "Once upon a time",
    "temperature": 1,
    "seed": 1,
    "max_tokens": 480,
    "logit_bias": {"2044": -100, "2047": -100},
}


def test_it_is_ready_when_it_says_so(server: Server) -> None:
    assert httpx.get(server.url + "/health", timeout=30).status_code == 200
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 3}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_clients_that_leave_free_their_places(server: Server, stream: bool, pause: float) -> None:
    """Case 26: while waiting, during the prompt, after some tokens."""
    sockets = [server.raw({**LONG, "prompt": [5] * 200, "n": 2, "stream": stream}) for _ in range(6)]
    time.sleep(pause)
    for one in sockets:
        one.close()
    assert server.idle()
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 3}).status_code == 200


def test_a_client_that_does_not_read_slows_nobody(server: Server) -> None:
    stalled = server.raw({**LONG, "stream": True})
    began = time.monotonic()
    for _ in range(5):
        assert server.post("/v1/completions", {"prompt": "The dog", "max_tokens": 20}).status_code == 200
    assert time.monotonic() - began < 20
    stalled.close()
    assert server.idle()


def test_parallel_answers_do_not_mix(server: Server) -> None:
    """Case 30."""
    prompts = ["Once upon a time", "The dog", "A", "One day, a girl named Lily went to the park.", "It was"]
    bodies = [{"prompt": prompt, "temperature": 0, "max_tokens": 16} for prompt in prompts]
    alone = [server.post("/v1/completions", body).json()["choices"][0]["text"] for body in bodies]
    found: dict[int, str] = {}

    def ask(at: int) -> None:
        found[at] = server.post("/v1/completions", bodies[at % 5]).json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[at] for at in range(20)] == alone * 4


def test_a_full_queue_is_told() -> None:
    small = Server("--max-batch", "1", "--max-waiting", "31")
    try:
        sockets = [small.raw({**LONG, "n": 30})]
        while small.gauge("colibri_requests_waiting") < 20:
            time.sleep(0.005)
        answer = small.post("/v1/completions", {**LONG, "n": 30})
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
        for one in sockets:
            one.close()
    finally:
        small.stop()


def test_sigterm_drains_and_logs_are_json() -> None:
    found = Server("--log-format", "json", "--api-key", "secret")
    headers = {"Authorization": "Bearer secret"}
    got: list[Any] = []
    asked = threading.Thread(
        target=lambda: got.append(found.post("/v1/completions", {**LONG, "max_tokens": 300}, headers=headers))
    )
    asked.start()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with contextlib.suppress(AssertionError):
            page = httpx.get(found.url + "/metrics", headers=headers, timeout=30).text
            if re.search(r"^colibri_requests_running\{.*\} [1-9]", page, re.MULTILINE) or got:
                break
    found.stop()
    asked.join(30)
    assert got[0].status_code == 200 and got[0].json()["choices"][0]["finish_reason"]
    logged = [json.loads(line) for line in found.lines if line.startswith("{")]
    assert any(one.get("path") == "/v1/completions" and one["status"] == 200 for one in logged)
    assert "secret" not in "".join(found.lines)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-batch", "0"], "--max-batch"),
        (["--max-waiting", "0"], "--max-waiting"),
        (["--prefill-rows", "0"], "--prefill-rows"),
        (["--log-format", "xml"], "--log-format"),
        (["--max-body", "much"], "--max-body"),
        (["--served-model-name", "a", "--served-model-name", "b"], "--served-model-name"),
        (["--host", "256.0.0.1"], "--host"),
        (["demo"], "two models have the name"),
    ],
)
def test_wrong_options(options: list[str], says: str) -> None:
    done = subprocess.run(
        [*COMMAND, "demo", "--port", "0", *options], capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0 and says in done.stderr and "Traceback" not in done.stderr


def test_a_port_in_use_is_told_before_a_model_is_loaded(server: Server) -> None:
    done = subprocess.run(
        [*COMMAND, "demo", "--port", str(server.port)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and f"port {server.port}" in done.stderr


def test_two_models_by_name() -> None:
    found = Server("demo", "--served-model-name", "first", "--served-model-name", "second")
    try:
        names = [one["id"] for one in httpx.get(found.url + "/v1/models", timeout=30).json()["data"]]
        assert names == ["first", "second"]
        for name in names:
            body = {"model": name, "prompt": "a", "max_tokens": 3, "temperature": 0}
            assert found.post("/v1/completions", body).json()["model"] == name
    finally:
        found.stop()
