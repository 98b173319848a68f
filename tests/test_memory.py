"""What may still be taken: the machine, containers, limits of addresses; and what refusals are told as."""

from pathlib import Path

import pytest

from colibri import memory
from colibri.analysis import bandwidth, machine
from colibri.errors import MemoryPlanError

MEMINFO = "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("", {}, 8_000_000 * 1024),
        ("0::/box\n", {"box/memory.max": "max", "box/memory.current": "5"}, 8_000_000 * 1024),
        ("0::/box\n", {"box/memory.max": "1000", "box/memory.current": "700",
                       "box/memory.stat": "anon 1\nfile 600\n"}, 900),
        ("0::/\n", {"memory.max": "1000", "memory.current": "700"}, 300),
        ("0::/gone\n", {"memory.max": "1000", "memory.current": "1700"}, 0),
        ("4:cpu:/\n3:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "5000",
                                         "memory/a/memory.usage_in_bytes": "1000"}, 4000),
        ("0::/box/in\n", {"box/memory.max": "1000", "box/memory.current": "100",
                          "box/in/memory.max": "max", "box/in/memory.current": "5"}, 900),
        ("0::/box/in\n", {"box/memory.max": "1000", "box/memory.current": "100",
                          "box/in/memory.max": "500", "box/in/memory.current": "5"}, 495),
        ("0::/a/b/c\n", {"memory.max": "100", "memory.current": "60", "a/b/c/memory.max": "500",
                         "a/b/c/memory.current": "5"}, 40),
        ("3:memory:/v/w\n", {"memory/v/memory.limit_in_bytes": "700", "memory/v/memory.usage_in_bytes": "0",
                             "memory/v/w/memory.limit_in_bytes": "5000",
                             "memory/v/w/memory.usage_in_bytes": "1000"}, 700),
        ("3:memory:/not/here\n", {"memory/memory.limit_in_bytes": "5000",
                                  "memory/memory.usage_in_bytes": "1000",
                                  "memory/memory.stat": "cache 500\n"}, 4500),
    ],
)  # fmt: skip
def test_limits_of_containers_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, files: dict[str, str], expected: int
) -> None:
    tree = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup}
    for name, text in (tree | {f"groups/{name}": text for name, text in files.items()}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "groups")
    assert memory.available_bytes() == expected
    assert machine.memory_bytes()["available"] == expected
    wanted = min(max(bandwidth.SMALLEST_BYTES, 2 * (machine.cache_bytes() or 0)), 1 << 30)
    assert bandwidth.buffer_bytes() == max(1 << 20, min(wanted, expected // 4))


def test_the_probe_and_refusals_know_limits_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "address_bytes", lambda: 64 << 20)
    assert bandwidth.buffer_bytes() <= 16 << 20
    assert isinstance(memory.refusal(MemoryError("9 GiB")), MemoryPlanError)
    assert "thread" in str(memory.refusal(RuntimeError("can't start new thread")))
    assert memory.refusal(RuntimeError("another")) is None and memory.refusal(ValueError()) is None
