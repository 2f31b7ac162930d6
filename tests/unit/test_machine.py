"""Memory and cores that are left: of the machine, or of the container that this runs in."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from built_pairs import BuildPair

from dflash_trt.engines import info
from dflash_trt.machine import free_memory, usable_cores

MEMINFO = "MemTotal:       64000000 kB\nMemAvailable:   10000000 kB\n"
KB = 1024


def group(place: Path, version: int, limit: str, used: int, cached: int) -> None:
    """A memory cgroup as the kernel shows it; `total_` counts those inside, too."""
    names = [("max", "current", ""), ("limit_in_bytes", "usage_in_bytes", "total_")][version == 1]
    place.mkdir(parents=True, exist_ok=True)
    (place / f"memory.{names[0]}").write_text(f"{limit}\n")
    (place / f"memory.{names[1]}").write_text(f"{used}\n")
    (place / "memory.stat").write_text(f"anon 7\n{names[2]}inactive_file {cached}\n")


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


@pytest.mark.parametrize(
    ("version", "listed", "mount"),
    [
        (2, "0::/pod/c1\n", "sys/fs/cgroup"),
        (1, "5:cpu,cpuacct:/pod\n4:memory:/pod/c1\n0::/\n", "sys/fs/cgroup/memory"),
    ],
)
def test_a_limit_counts_wherever_it_stands(
    root: Path, version: int, listed: str, mount: str
) -> None:
    (root / "proc/self/cgroup").write_text(listed)
    none = {2: "max", 1: "9223372036854771712"}[version]
    top, pod = root / mount, root / mount / "pod"
    group(top, version, none, 50_000_000 * KB, 0)
    group(pod, version, none, 9_000, 0)
    group(pod / "c1", version, none, 9_000, 0)
    assert free_memory(root) == 10_000_000 * KB
    group(pod / "c1", version, "8000", 5000, 1000)
    assert free_memory(root) == 4000
    group(pod, version, "6000", 5000, 1500)  # of the pod, less than the container's own
    assert free_memory(root) == 2500
    group(pod, version, "6000", 7000, 0)  # just lowered: reclaim is under way
    assert free_memory(root) == 0


@pytest.mark.parametrize(("version", "mount"), [(2, "sys/fs/cgroup"), (1, "sys/fs/cgroup/memory")])
def test_a_container_sees_its_own_group_at_the_mount(root: Path, version: int, mount: str) -> None:
    """Without a cgroup namespace its path is the host's, which is not there."""
    controllers = {2: "0:", 1: "4:memory"}[version]
    (root / "proc/self/cgroup").write_text(f"{controllers}:/docker/0123abcd\n")
    group(root / mount, version, "8000", 5000, 1000)
    assert free_memory(root) == 4000


@pytest.fixture
def eight_cpus(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    return root


def quota(place: Path, version: int, microseconds: int, period: int = 100_000) -> None:
    """A cpu cgroup as the kernel shows it; microseconds: below 0 without a limit."""
    place.mkdir(parents=True, exist_ok=True)
    if version == 2:
        most = "max" if microseconds < 0 else str(microseconds)
        (place / "cpu.max").write_text(f"{most} {period}\n")
    else:
        (place / "cpu.cfs_quota_us").write_text(f"{microseconds}\n")
        (place / "cpu.cfs_period_us").write_text(f"{period}\n")


@pytest.mark.parametrize(
    ("version", "listed", "mount"),
    [
        (2, "0::/pod/c1\n", "sys/fs/cgroup"),
        (1, "5:cpu,cpuacct:/pod/c1\n4:memory:/pod/c1\n0::/\n", "sys/fs/cgroup/cpu"),
    ],
)
def test_cores_are_those_of_the_container(
    eight_cpus: Path, version: int, listed: str, mount: str
) -> None:
    top, pod = eight_cpus / mount, eight_cpus / mount / "pod"
    assert usable_cores(eight_cpus) == 8  # where no cgroup is to be seen
    (eight_cpus / "proc/self/cgroup").write_text(listed)
    quota(top, version, -1)
    quota(pod / "c1", version, -1)
    assert usable_cores(eight_cpus) == 8
    quota(pod / "c1", version, 650_000)
    assert usable_cores(eight_cpus) == 6  # whole ones: a thread that is held up holds up the others
    quota(pod, version, 150_000, 50_000)  # of the pod, less than the container's own
    assert usable_cores(eight_cpus) == 3
    quota(pod, version, 20_000)
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
    """What is built is the same everywhere; the number is found where it runs."""
    monkeypatch.setattr(info, "usable_cores", lambda: 6)
    built = info.read_info(built_pair().target_engine, "onnxruntime")
    assert replace(built, threads=3).cpu_threads == 3
    assert replace(built, threads=None).cpu_threads == 6
