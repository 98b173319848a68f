"""What ends a command from outside leaves nothing behind: SIGTERM and SIGHUP clean up, and files of processes
that were killed are removed by the next that writes."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import checkpoints
from colibri import cache
from colibri.convert import convert
from colibri.errors import ModelIOError
from test_cli import Result, started
from test_cli import call as call
from test_cli import endless as endless


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_while_converting_leaves_nothing(
    call: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    source = checkpoints.olmoe(tmp_path / "source")
    before = signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup

    @contextmanager
    def signalled(_what: str) -> Iterator[Callable[[int, int, str], None]]:
        def progress(_done: int, _total: int, _name: str) -> None:
            assert list(tmp_path.glob(".colibri-*.part"))
            os.kill(os.getpid(), number)

        yield progress

    monkeypatch.setattr("colibri.cli.convert.progress_bar", signalled)
    try:
        assert call("convert", source, tmp_path / "o.colibri").status == status
        assert os.listdir(tmp_path) == ["source"] and signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_signal_ends_a_running_text(endless: Path) -> None:
    with started("run", endless, "Once", "--context", 1_000_000) as process:
        assert process.stdout is not None and process.stdout.read(20)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (143, b"")


def test_what_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    code = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); import colibri.cli as cli\n"
        "with cli._signals_end_politely(): os.kill(os.getpid(), signal.SIGHUP)\n"
        "print('still here')"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "still here\n"
    )


def test_ctrl_c_while_the_command_is_imported_is_quiet() -> None:
    code = (
        "import sys, colibri.__main__ as command\n"
        "class Stop:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop()); command.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_files_of_dead_processes_are_removed_and_of_living_ones_kept(tmp_path: Path) -> None:
    source = checkpoints.llama(tmp_path / "hf")
    dead, living, other = (tmp_path / name for name in (".colibri-1.part", ".colibri-2.part", ".other.part"))
    for path in (dead, living, other):
        path.write_bytes(b"begun")
    with living.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as a Writer in another process does
        convert(source, tmp_path / "o.colibri")
    assert sorted(os.listdir(tmp_path)) == sorted(["hf", "o.colibri", living.name, other.name])
    convert(source, tmp_path / "o.colibri")
    assert not living.exists() and other.exists()


def test_a_file_under_way_is_known_as_living(tmp_path: Path) -> None:
    """A second conversion into the directory begins in the middle of the first."""
    source = checkpoints.llama(tmp_path / "hf")
    inner: list[Path] = []

    def begin_another(_done: int, _total: int, _name: str) -> None:
        if not inner:
            inner.append(convert(source, tmp_path / "second.colibri").path)

    first = convert(source, tmp_path / "first.colibri", progress=begin_another).path
    assert first.read_bytes() == inner[0].read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["first.colibri", "hf", "second.colibri"]


def test_a_cache_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    source = checkpoints.llama(tmp_path / "hf")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": 5}))
    with pytest.raises(ModelIOError, match=r"only 5 are free there.*Set COLIBRI_CACHE"):
        cache.resolve(source)
