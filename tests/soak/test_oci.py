"""Packed builds, read by the tools of the OCI formats: skopeo and umoci (Debian packages)."""

import shutil
import subprocess
from pathlib import Path

import pytest
from builds import config_of, quiet
from pairs import make_pair

from dflash_trt.build.manifest import check_build
from dflash_trt.build.pack import pack
from dflash_trt.build.run import build

pytestmark = pytest.mark.soak


def run(*command: str | Path) -> str:
    assert shutil.which(str(command[0])), f"apt-get install {command[0]}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("oci")
    make_pair(directory)
    build(config_of(directory), directory / "built", quiet)
    return directory / "built"


@pytest.mark.parametrize("layout", ["modelpack", "modelcar"])
def test_skopeo_copies_it_and_finds_the_same_digest(
    built: Path, tmp_path: Path, layout: str
) -> None:
    digest = pack(built, tmp_path / "layout", layout, quiet)
    run("skopeo", "copy", f"oci:{tmp_path}/layout", f"dir:{tmp_path}/copy")
    raw = run("skopeo", "inspect", "--raw", f"dir:{tmp_path}/copy")
    (tmp_path / "raw").write_text(raw)
    assert run("skopeo", "manifest-digest", tmp_path / "raw").strip() == digest


def test_umoci_unpacks_the_image_to_the_same_build(built: Path, tmp_path: Path) -> None:
    pack(built, tmp_path / "layout", "modelcar", quiet)
    run("umoci", "unpack", "--rootless", "--image", f"{tmp_path}/layout:tiny", tmp_path / "bundle")
    unpacked = tmp_path / "bundle" / "rootfs" / "models"
    check_build(unpacked, "full")
    names = {file.name for file in built.iterdir()} - {"deploy"}
    assert {file.name for file in unpacked.iterdir()} == names
