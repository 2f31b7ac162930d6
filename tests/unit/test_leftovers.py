"""What a killed `serve` leaves goes with the next start; nothing of a living one does."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dflash_trt.serving.channel import RUNTIME, RUNTIME_PREFIX
from dflash_trt.serving.supervisor import leftovers
from dflash_trt.serving.supervisor.children import STUB
from tests.support.servers import ROOT

PREFIX = "dflash_trt_0123456789ab_"
CLAIM = """
import sys
from pathlib import Path
from dflash_trt.serving.supervisor.leftovers import claim
claim(Path(sys.argv[1]), sys.argv[2])
print("claimed", flush=True)
sys.stdin.read()
"""
WAIT = 60.0


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return folders in the place of /tmp and /dev/shm."""
    temporary, memory = tmp_path / "tmp", tmp_path / "shm"
    temporary.mkdir()
    memory.mkdir()
    monkeypatch.setattr(leftovers, "TEMPORARY", temporary)
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", memory)
    return temporary, memory


@contextmanager
def serving(places: tuple[Path, Path], name: str, prefix: str = PREFIX) -> Iterator[Path]:
    """Yield the runtime directory of a `serve` that lives; it is killed at the end."""
    temporary, memory = places
    runtime = temporary / f"{RUNTIME_PREFIX}{name}"
    (runtime / "backends" / "python").mkdir(parents=True)
    (runtime / "dflash.sock").touch()
    (runtime / "server.log").write_text("why it died\n")
    if prefix.startswith("dflash"):
        (memory / f"{prefix}region").touch()
    command = [sys.executable, "-c", CLAIM, str(runtime), prefix]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        yield runtime
    finally:
        process.kill()
        process.communicate()


@contextmanager
def stub(runtime: Path, program: str = STUB) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process as Triton runs a model's."""
    process = subprocess.Popen(
        [f"/any/{program}", "1000"], executable="/bin/sleep", env={RUNTIME: str(runtime)}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_killed_server_leaves_its_log_alone(places: tuple[Path, Path]) -> None:
    temporary, memory = places
    with serving(places, "a") as runtime:
        (temporary / "python_env_AbCdEf").mkdir()
        leftovers.note_environments(runtime, {"python_env_AbCdEf"})
        with stub(runtime) as left_behind:
            leftovers.remove_leftovers()  # it lives
            assert left_behind.poll() is None
            assert (memory / f"{PREFIX}region").exists()
            assert (runtime / "dflash.sock").exists()
            assert (temporary / "python_env_AbCdEf").exists()
    with stub(runtime) as left_behind, stub(runtime, "tail") as another:
        leftovers.remove_leftovers()
        assert left_behind.wait(WAIT) == -9
        assert another.poll() is None
    assert [*memory.iterdir()] == []
    assert [*temporary.rglob("*")] == [runtime, runtime / "server.log"]
    leftovers.remove_leftovers()
    assert (runtime / "server.log").exists()


def test_what_belongs_to_others_stays(places: tuple[Path, Path]) -> None:
    temporary, memory = places
    with serving(places, "a") as runtime:
        pass
    with serving(places, "b", "dflash_trt_ba9876543210_") as living:
        for folder in ("python_env_AbCdEf", "python_env_GhIjKl", "python_env_MnOpQr"):
            (temporary / folder).mkdir()
        (temporary / "python_env_AbCdEf" / "file").touch()
        # both were there while these two started
        leftovers.note_environments(runtime, {"python_env_AbCdEf", "python_env_GhIjKl"})
        leftovers.note_environments(living, {"python_env_GhIjKl"})
        unclaimed = temporary / f"{RUNTIME_PREFIX}by-hand"
        unclaimed.mkdir()
        (unclaimed / "dflash.sock").touch()
        (temporary / f"{RUNTIME_PREFIX}link").symlink_to(living)
        with stub(living) as of_living, stub(unclaimed) as of_unclaimed:
            leftovers.remove_leftovers()
            assert of_living.poll() is None
            assert of_unclaimed.poll() is None
        assert [path.name for path in memory.iterdir()] == ["dflash_trt_ba9876543210_region"]
        assert {path.name for path in temporary.glob("python_env_*")} == {
            *("python_env_AbCdEf", "python_env_GhIjKl", "python_env_MnOpQr")
        }
        assert (living / "dflash.sock").exists()
        assert (unclaimed / "dflash.sock").exists()
        assert not (runtime / "dflash.sock").exists()


def test_no_other_memory_goes_by_what_a_file_says(places: tuple[Path, Path]) -> None:
    _, memory = places
    (memory / "another").touch()
    for name, prefix in (("a", ""), ("b", "*"), ("c", "another")):
        with serving(places, name, prefix):
            pass
    leftovers.remove_leftovers()
    assert (memory / "another").exists()
