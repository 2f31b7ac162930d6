"""Lines to a reader that stands still, is gone, or comes back: who writes them goes on."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dflash_trt.serving import lines
from dflash_trt.serving.lines import LineWriter, open_for_lines, own_descriptor
from tests.support.request_tools import wait_until

LINE = b"x" * 99 + b"\n"


def notice(count: int) -> bytes:
    return f"lost {count}\n".encode()


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(reading)


def fill(writing: int) -> int:
    """Write as much as the pipe holds; return how much."""
    os.set_blocking(writing, False)
    size = 0
    try:
        while True:
            size += os.write(writing, bytes(2**12))
    except BlockingIOError:
        os.set_blocking(writing, True)
    return size


def drop(reading: int, size: int) -> None:
    while size:
        size -= len(os.read(reading, size))


def read_lines(reading: int, last: bytes) -> list[bytes]:
    """Return the lines that come, to one that begins with `last`."""
    with open(os.dup(reading), "rb") as stream:
        received = [stream.readline()]
        while not received[-1].startswith(last):
            received.append(stream.readline())
    return received


def test_a_reader_that_stands_still_loses_lines_and_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lines, "WAITING", 10_000)
    with pipe() as (reading, writing):
        size = fill(writing)
        writer = LineWriter(writing, notice)
        count = 2000
        for number in range(count):
            writer.write(b"%d " % number + LINE, may_wait=True)
        assert 0 < writer.lost < count
        assert not writer.flush(0.01)
        drop(reading, size)
        assert writer.flush(30)
        writer.write(b"again\n")
        *received, last = read_lines(reading, b"again")
        assert last == b"again\n"
        told = [int(line.split()[1]) for line in received if line.startswith(b"lost")]
        numbers = [int(line.split()[0]) for line in received if not line.startswith(b"lost")]
        assert numbers == sorted(numbers)
        assert len(numbers) == count - writer.lost
        assert sum(told) == writer.lost
        writer.close()


def test_lines_after_lost_ones_come_after_the_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "WAITING", 10_000)
    with pipe() as (reading, writing):
        size = fill(writing)
        writer = LineWriter(writing, notice)
        while not writer.lost:
            writer.write(LINE)
        drop(reading, size)
        assert writer.flush(30)
        writer.write(b"next\n")
        *_, before, last = read_lines(reading, b"next")
        assert (before, last) == (b"lost %d\n" % writer.lost, b"next\n")
        writer.close()


def test_a_reader_that_is_gone_loses_lines_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with pipe() as (_, writing):
        writer = LineWriter(writing, notice)
    for _ in range(3):
        writer.write(LINE)
    wait_until(lambda: writer.lost == 3)
    writer.close()
    assert capfd.readouterr().err == ""


def test_a_slow_disk_gets_all_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "log", os.write

    def write_slowly(descriptor: int, content: bytes) -> int:
        time.sleep(0.1)  # all lines take longer than a flush waits
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", write_slowly)
    writer = LineWriter(os.open(path, os.O_WRONLY | os.O_CREAT), notice)
    for number in range(15):
        writer.write(b"%d\n" % number)
    writer.close()
    assert path.read_text().split() == [*map(str, range(15))]


def test_a_full_disk_is_said_when_it_has_room(tmp_path: Path) -> None:
    """/dev/full stands for the disk, and the file for the disk with room."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    writer = LineWriter(descriptor, notice)
    writer.write(LINE)
    wait_until(lambda: writer.lost == 1)
    file = tmp_path / "log"
    room = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(room, descriptor)
    os.close(room)
    writer.write(b"next\n")
    wait_until(lambda: file.read_bytes().endswith(b"next\n"))
    assert file.read_bytes() == b"lost 1\nnext\n"
    writer.close()


def test_half_a_line_is_not_joined_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    answers: list[int | None] = [3, None]  # bytes that the disk takes, None: it is full

    def fill_up(descriptor: int, content: bytes) -> int:
        if not answers:
            return write(descriptor, content)
        size = answers.pop(0)
        if size is None:
            raise OSError(28, "No space left on device")
        return write(descriptor, content[:size])

    with pipe() as (reading, writing):
        monkeypatch.setattr(os, "write", fill_up)
        writer = LineWriter(writing, notice)
        writer.write(b"abcdef\n")
        wait_until(lambda: writer.lost == 1)
        writer.write(b"next\n")
        assert read_lines(reading, b"next") == [b"abc\n", b"lost 1\n", b"next\n"]
        writer.close()


def test_a_descriptor_that_another_program_made_non_blocking() -> None:
    with pipe() as (reading, writing):
        os.set_blocking(writing, False)
        writer = LineWriter(writing, notice)
        for _ in range(1000):
            writer.write(LINE)
        writer.write(b"last\n")
        assert len(read_lines(reading, b"last")) == 1001
        assert writer.lost == 0
        writer.close()


def test_a_named_pipe_is_opened_without_a_reader(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    opened: list[int] = []
    opening = threading.Thread(target=lambda: opened.append(open_for_lines(fifo)), daemon=True)
    opening.start()
    opening.join(30)
    assert opened
    os.close(opened[0])


def test_a_path_to_a_descriptor_of_this_process(tmp_path: Path) -> None:
    """A socket, as of systemd, cannot be opened by such a path."""
    with pipe() as (_, writing):
        (tmp_path / "link").symlink_to(f"/dev/fd/{writing}")
        for path in (f"/dev/fd/{writing}", f"/proc/self/fd/{writing}", tmp_path / "link"):
            assert own_descriptor(Path(path)) == writing
        os.close(writing)
    assert own_descriptor(Path("/dev/stdout")) == 1
    for path in ("/dev/null", tmp_path / "none", "/proc/1/fd/1", "/dev/fd"):
        assert own_descriptor(Path(path)) is None
