"""Memory and cores that are left: of the machine, or of the container that this runs in."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_trt.engines import info
from dflash_trt.machine import container_cpus, free_memory, usable_cores
from tests.support.built_pairs import BuildPair

MEMINFO = "MemTotal:       64000000 kB\nMemAvailable:   10000000 kB\n"
KB = 1024


def group(place: Path, limit: str, used: int, cached: int) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.max").write_text(f"{limit}\n")
    (place / "memory.current").write_text(f"{used}\n")
    (place / "memory.stat").write_text(f"anon 7\ninactive_file {cached}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    return tmp_path


def test_without_cgroups_it_is_the_machines(root: Path) -> None:
    assert free_memory(root) == 10_000_000 * KB
    (root / "proc/self/cgroup").write_text("0::/user.slice\n")  # and nothing under /sys
    assert free_memory(root) == 10_000_000 * KB
    assert free_memory(root / "none") > 0  # where there is no /proc
    assert free_memory() > 0


def test_a_limit_counts_wherever_it_stands(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/pod/c1\n")
    top = root / "sys/fs/cgroup"
    pod = top / "pod"
    group(top, "max", 50_000_000 * KB, 0)
    group(pod, "max", 9_000, 0)
    group(pod / "c1", "max", 9_000, 0)
    assert free_memory(root) == 10_000_000 * KB
    group(pod / "c1", "8000", 5000, 1000)
    assert free_memory(root) == 4000
    group(pod, "6000", 5000, 1500)  # of the pod, less than the container's own
    assert free_memory(root) == 2500
    group(pod, "6000", 7000, 0)  # just lowered: reclaim is under way
    assert free_memory(root) == 0


def test_a_container_sees_its_own_group_at_the_mount(root: Path) -> None:
    """Without a cgroup namespace its path is the host's, which does not exist inside."""
    (root / "proc/self/cgroup").write_text("0::/docker/0123abcd\n")
    group(root / "sys/fs/cgroup", "8000", 5000, 1000)
    assert free_memory(root) == 4000


@pytest.fixture
def eight_cpus(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    return root


def test_cores_are_those_of_the_container(eight_cpus: Path) -> None:
    top = eight_cpus / "sys/fs/cgroup"
    pod = top / "pod"
    (pod / "c1").mkdir(parents=True)
    assert usable_cores(eight_cpus) == 8  # where no cgroup is to be seen
    (eight_cpus / "proc/self/cgroup").write_text("0::/pod/c1\n")
    (top / "cpu.max").write_text("max 100000\n")
    (pod / "c1" / "cpu.max").write_text("max 100000\n")
    assert usable_cores(eight_cpus) == 8
    (pod / "c1" / "cpu.max").write_text("650000 100000\n")
    assert usable_cores(eight_cpus) == 6  # whole ones: a thread that is held up holds up the others
    (pod / "cpu.max").write_text("150000 50000\n")  # of the pod, less than the container's own
    assert usable_cores(eight_cpus) == 3
    (pod / "cpu.max").write_text("20000 100000\n")
    assert usable_cores(eight_cpus) == 1


def test_hyperthreads_of_a_core_are_one(eight_cpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in range(8):
        topology = eight_cpus / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert usable_cores(eight_cpus) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5})  # as by `taskset`
    assert usable_cores(eight_cpus) == 2


def test_engines_take_the_cores_unless_told(
    built_pair: BuildPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds are the same everywhere; the number is found where they run."""
    monkeypatch.setattr(info, "usable_cores", lambda: 6)
    built = info.read_info(built_pair().target_engine)
    assert replace(built, threads=3).cpu_threads == 3
    assert replace(built, threads=None).cpu_threads == 6


@pytest.mark.parametrize(("cpus", "count"), [("0-3", 4), ("0,2-3,8", 4), ("5", 1)])
def test_a_containers_cpus_are_those_of_its_group(root: Path, cpus: str, count: int) -> None:
    (root / "proc/self/cgroup").write_text("0::/pod/c1\n")
    group = root / "sys/fs/cgroup/pod"
    group.mkdir(parents=True)
    assert container_cpus(root) == os.cpu_count()
    (group / "cpuset.cpus.effective").write_text(f"{cpus}\n")
    assert container_cpus(root) == count
