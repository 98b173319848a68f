"""Where weights are: mapped, read ahead, resident, streamed; which of these is chosen. The plan says it, bits
stay, nothing outlives close.

Owns: load(residency=, memory=, expert_slots=, prefetch=, pin=) and colibri_fetch through it. Refuses: the
bits and costs of streamed experts (test_streaming.py), the peak of memory (test_peak.py), speed
(benchmarks/)."""

from __future__ import annotations

import gc
import os
import queue
import re
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import colibri
from colibri import _native, cache, residency
from colibri.arguments import RESIDENCIES, physical_cores
from colibri.errors import ArgumentError, CancelledError, MemoryPlanError, ModelIOError
from colibri.format import read_container

IDS = list(range(5, 45))


def logits(**options: object) -> bytes:
    with colibri.load("demo", **options) as model:  # type: ignore[arg-type]
        return model.logits(IDS).tobytes()


def test_bits_do_not_depend_on_where_weights_are() -> None:
    alone = logits(prefetch=False)
    assert logits() == alone
    assert logits(residency="resident") == alone
    assert logits(pin=True) == alone
    assert logits(residency="resident", pin=True) == alone


def test_the_plan_tells_what_is_resident() -> None:
    with colibri.load("demo") as model:
        size = model.path.stat().st_size
        assert (model.residency, model.memory.weights_mapped, model.memory.weights_resident) == (
            "mapped",
            size,
            0,
        )
        total = model.memory.total_bytes - model.memory.process
    with colibri.load("demo", residency="resident") as model:
        assert (model.residency, model.memory.weights_mapped, model.memory.weights_resident) == (
            "resident",
            0,
            size,
        )
        assert model.memory.total_bytes - model.memory.process == total
    with colibri.load("demo", residency="streamed") as model:
        entries = read_container(model.path).entries
        dense = sum(entry.bytes for entry in entries if entry.kind not in ("expert", "blob"))
        memory, experts = model.memory, [entry.bytes for entry in entries if entry.kind == "expert"]
        assert (model.residency, memory.weights_mapped, memory.expert_slots) == ("streamed", 0, len(experts))
        assert dense <= memory.weights_resident < size - sum(experts) + 2 * 4096
        assert sum(experts) <= len(experts) * memory.slot_bytes <= memory.expert_cache


def test_without_a_limit_the_machines_memory_decides(
    larger: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of what is left, nine tenths: all of the file, or some experts in slots; where not even one fits, the
    system is left to read pages."""
    size, found = larger.stat().st_size, set()
    for room, kind, slots in (
        (size + (90 << 20), "mapped", range(1)),
        (size // 2, "streamed", range(24, 160)),
        (1 << 20, "mapped", range(1)),
    ):
        monkeypatch.setattr(residency, "available_bytes", lambda room=room: int(room / 0.9))
        with colibri.load(larger, prefetch=False, context=100) as model:
            assert (model.residency, model.memory.expert_slots in slots) == (kind, True), model.memory
            held = model.memory.total_bytes - model.memory.process
            assert kind == "mapped" or held <= room + (1 << 20)
            found.add(model.logits(IDS).tobytes())
    assert len(found) == 1 and "system reads pages as they are needed" in caplog.text


def test_a_limit_is_kept_and_below_the_least_the_number_is_named() -> None:
    """The number is enough; while it is asked for again the process may have grown a little."""
    needed = 1 << 20
    for _ in range(5):
        try:
            model = colibri.load("demo", memory=needed, residency="streamed")
            break
        except MemoryPlanError as error:
            found = re.match(r"memory: (\d+) bytes, needed are at least (\d+); raise it", str(error))
            assert found is not None and int(found[1]) == needed, error
            needed = int(found[2])
    with model:
        assert (model.residency, model.memory.expert_slots) == ("streamed", 1)
        assert model.memory.total_bytes < needed + (1 << 20)
        assert model.logits(IDS).tobytes() == logits(prefetch=False)
    for options in ({"residency": "mapped"}, {"residency": "resident"}, {"expert_slots": 40}, {}):
        with pytest.raises(MemoryPlanError, match=r"needs|needed are at least"):
            colibri.load("demo", memory="5MB", **options)


def test_a_limit_leaves_the_choice_of_slots() -> None:
    one = colibri.plan("demo", expert_slots=1, measure=False)
    limit = one.planned_bytes + (1 << 20) + 12 * one.slot_bytes
    with colibri.load("demo", memory=limit, residency="streamed") as model:
        assert 10 <= model.memory.expert_slots < 40 and model.memory.total_bytes <= limit + (1 << 19)
    with colibri.load("demo", memory="4GiB", residency="streamed") as model:
        assert model.memory.expert_slots == 40
    with colibri.load("demo", memory="4GiB") as model:
        assert (model.residency, model.memory.expert_slots) == ("mapped", 0)


def test_a_dense_model_is_never_streamed(make_model: Callable[..., Path]) -> None:
    path = make_model("llama")
    with colibri.load(path) as model:
        assert model.residency == "mapped" and model.stats.uses == 0
    for options in ({"residency": "streamed"}, {"expert_slots": 1}):
        with pytest.raises(ArgumentError, match="no routed experts"):
            colibri.load(path, **options)
    with pytest.raises(ArgumentError, match="lanes=2 has no effect"):
        colibri.load(path, lanes=2)
    with pytest.raises(MemoryPlanError, match="needed are at least"):
        colibri.load(path, memory="1MiB")


def private_kib(name: str) -> int:
    """Private memory of this process's mappings of a file, or of all mappings that are no file's."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            counts = len(fields) > 5 and fields[5].endswith(name)
        elif counts and fields[0] == "Rss:":
            total += int(fields[1])
    return total


def test_resident_weights_leave_the_file() -> None:
    with colibri.load("demo", prefetch=False) as model:
        model.logits(IDS)
        assert private_kib("demo.colibri") > 0
    with colibri.load("demo", residency="resident") as model:
        model.logits(IDS)
        assert private_kib("demo.colibri") == 0


def test_progress_reaches_the_end() -> None:
    seen: list[tuple[int, int]] = []
    with colibri.load("demo", residency="resident", progress=lambda done, all: seen.append((done, all))) as m:
        size = m.path.stat().st_size
    assert seen[-1] == (size, size)


def test_an_exception_in_progress_ends_the_work() -> None:
    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        colibri.load("demo", residency="resident", progress=stop)


def test_reading_ahead_ends_with_the_model() -> None:
    model = colibri.load("demo")
    model.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "colibri-prefetch"]


def mapped(name: str) -> bool:
    return name in Path("/proc/self/maps").read_text()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The demo under a name that no other mapping of this process has."""
    path = tmp_path / "a copy of its own.colibri"
    path.write_bytes(cache.resolve("demo").read_bytes())
    return path


def test_progress_may_close_the_model(copy: Path) -> None:
    """From the thread that reads ahead, while the caller closes it too, or has not got it yet."""
    got: queue.Queue[colibri.Model] = queue.Queue()
    closed = threading.Event()

    def close(_done: int, _total: int) -> None:
        got.get(timeout=30).close()
        closed.set()

    model = colibri.load(copy, progress=close)
    assert mapped(copy.name)
    got.put(model)
    model.close()
    assert closed.wait(30)
    for thread in threading.enumerate():
        if thread.name == "colibri-prefetch":
            thread.join(30)
    assert not mapped(copy.name), "the mapping ends"


def test_an_exception_while_reading_ahead_is_logged(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    called = threading.Event()

    def fail(_done: int, _total: int) -> None:
        called.set()
        raise ZeroDivisionError

    with colibri.load(copy, progress=fail) as model:
        assert called.wait(30)
        assert len(model.logits(IDS)) == len(IDS)
    assert "not read ahead further" in caplog.text and "ZeroDivisionError" in caplog.text
    assert not mapped(copy.name)


def test_without_a_thread_nothing_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with colibri.load("demo", threads=1) as model:
        assert len(model.logits(IDS)) == len(IDS)


def test_a_copy_is_begun_only_if_the_context_fits_too(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the weights, none for the context: told before a byte is copied, with what to do."""
    monkeypatch.setattr(residency, "available_bytes", lambda: copy.stat().st_size + 1000)
    monkeypatch.setattr(_native, "fetch", None)
    with pytest.raises(MemoryPlanError, match="Choose residency='mapped', or a smaller context") as caught:
        colibri.load(copy, residency="resident")
    assert f"{copy.stat().st_size:,} bytes for the weights" in str(caught.value)
    del caught  # its traceback holds the model
    gc.collect()
    assert not mapped(copy.name)


def test_while_evaluating_the_copy_takes_the_place_of_the_file() -> None:
    """The same address, other memory: an evaluation that runs meanwhile reads one or the other."""
    with colibri.load("demo", prefetch=False) as model:
        alone = model.logits(IDS)[-1:].tobytes()
        handle = _native.open_model(model.path)
        context = _native.init(handle, _native.default_params(handle))
        copying = threading.Thread(target=_native.fetch, args=(handle, 1, lambda done, total: None))
        copying.start()
        out = np.empty((1, model.n_vocab), np.float32)
        for _ in range(5):
            _native.rewind(context, 0, 0)
            ids = np.array(IDS, np.int32)
            _native.evaluate(context, [_native.Input(0, ids, out)], model.n_vocab)
            assert out.tobytes() == alone
        copying.join()
        _native.free(context)
        _native.close_model(handle)


def test_zeros_in_the_place_of_a_lost_page_are_never_taken_for_weights(copy: Path) -> None:
    """A page of the mapped file could not be read once; the file is as it was again, its time too: as after a
    read error of the disk, which changes neither."""
    data, status = copy.read_bytes(), copy.stat()

    def cut(_done: int, _total: int) -> None:
        os.truncate(copy, 1000)

    with colibri.load(copy, residency="mapped", prefetch=False) as model:
        with pytest.raises(ModelIOError, match="cut off"):
            model.generate(IDS, max_tokens=1, progress=cut)
        copy.write_bytes(data)
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(ModelIOError, match="open it again"):
            model.logits(IDS)
    with colibri.load(copy) as model:
        assert model.logits(IDS).tobytes() == logits()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"residency": "cloud"},
            "residency: expected one of auto, mapped, resident, streamed, found 'cloud'",
        ),
        ({"residency": ["mapped"]}, "residency: expected one of auto, mapped, resident, streamed"),
        ({"expert_slots": 0}, "expert_slots: expected an integer from 1"),
        ({"expert_slots": 41}, "expert_slots: expected 1 to 40, the experts of all layers, found 41"),
        ({"expert_policy": "fifo"}, "expert_policy: expected one of lfru, lru, found 'fifo'"),
        ({"lanes": 17}, "lanes: expected an integer from 1 to 16, found 17"),
        ({"lanes": True}, "lanes: expected an integer"),
        ({"memory": "much"}, "memory: expected a size such as 20GiB"),
        ({"memory": "99999999TiB"}, "memory: expected an integer from 1"),
        ({"memory": 0}, "memory: expected an integer from 1"),
        ({"residency": "mapped", "expert_slots": 3}, "expert_slots=3 has no effect"),
        ({"residency": "resident", "expert_policy": "lru"}, "expert_policy='lru' has no effect"),
        ({"residency": "mapped", "lanes": 2}, "lanes=2 has no effect"),
        ({"lanes": 2}, "lanes=2 has no effect: no expert is streamed"),
        ({"expert_policy": "lru"}, "expert_policy='lru' has no effect: no expert is streamed"),
        ({"residency": "resident", "prefetch": True}, "no effect"),
        ({"residency": "resident", "prefetch": False}, "no effect"),
        ({"prefetch": False, "progress": print}, "progress has no effect with prefetch=False"),
        ({"progress": 3}, "progress: expected a function"),
        ({"prefetch": "false"}, "prefetch: expected True or False, found 'false'"),
        ({"prefetch": 1}, "prefetch: expected True or False"),
        ({"pin": "no"}, "pin: expected True or False, found 'no'"),
        ({"pin": True, "threads": 1}, "pin=True has no effect with threads=1"),
        ({"pin": True, "threads": physical_cores() + 1}, "at most"),
    ],
)
def test_wrong_choices_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        colibri.load("demo", **options)  # type: ignore[arg-type]


def test_the_library_pins_no_more_threads_than_cores() -> None:
    handle = _native.open_model(cache.resolve("demo"))
    defaults = _native.default_params(handle)
    values = {name: getattr(defaults, name) for name in _native.Params.__slots__}
    threads = min(256, physical_cores() + 1)
    if threads > physical_cores():
        with pytest.raises(ArgumentError, match=rf"pin: at most {threads - 1} threads"):
            _native.init(handle, _native.Params(**values | {"pin": 1, "threads": threads}))
    _native.free(_native.init(handle, _native.Params(**values | {"pin": 0, "threads": threads})))
    _native.close_model(handle)


@pytest.mark.parametrize("give", ["demo", Path("demo"), None])
def test_a_model_is_made_by_load(give: object) -> None:
    with pytest.raises(ArgumentError, match="colibri.load"):
        colibri.Model(give)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="colibri.load"), colibri.measure(give):  # type: ignore[arg-type]
        pass


def test_more_than_memory_is_refused_and_reading_ahead_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_model: object, kind: int, _progress: object) -> None:
        raise MemoryPlanError("the weights take 9 bytes, available are 8")

    monkeypatch.setattr(_native, "fetch", refuse)
    with pytest.raises(MemoryPlanError):
        colibri.load("demo", residency="resident")
    with colibri.load("demo") as model:
        assert model.logits(IDS[:2]).shape[-1] == model.n_vocab


def test_the_library_checks_its_arguments() -> None:
    handle = _native.open_model(Path(colibri.load("demo").path))
    with pytest.raises(ArgumentError, match="residency: expected 0"):
        _native.fetch(handle, 7, lambda done, total: None)
    with pytest.raises(CancelledError):

        def cancel(_done: int, _total: int) -> None:
            raise CancelledError("enough")

        _native.fetch(handle, RESIDENCIES["mapped"], cancel)
    _native.close_model(handle)
