"""The slim image as far as it can be shown without Docker: its packages, on a read-only root.

Installed are the Dockerfile's own requirements and the package without dependencies; tritonserver
is the wheel's, in place of the one that the image copies. Needs the network, and root for mounts.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt.builder.pipeline import build
from dflash_trt.serving.client import Client
from tests.support.pycode import demo_config
from tests.support.servers import ROOT, WAIT, serve_ports, started

pytestmark = [pytest.mark.soak, pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")]
HOME = ROOT / "build" / "image"  # not in /tmp, which the server gets empty
# the root file system read-only, but for what the pod mounts
ISOLATED = """
set -e
mount --bind / / && mount -o remount,bind,ro /
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
! touch /etc/written "$0" 2>/dev/null
cd /
exec "$@"
"""
NOT_NEEDED = {
    *("accelerate", "cython", "gcc", "ninja", "pybind11", "torch", "transformers", "triton"),
    *("onnx", "onnx-ir", "sympy", "pytest", "datasets", "pandas", "scipy"),
}


@pytest.fixture(scope="module")
def built() -> Path:
    shutil.rmtree(HOME / "built", ignore_errors=True)
    build(demo_config(), HOME / "built", lambda *_: None)
    return HOME / "built"


@pytest.fixture(scope="module")
def image(built: Path) -> Path:
    requirements = built / "requirements.txt"
    home = HOME / "venv"
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    pip += ["--python", home / "bin" / "python", "install"]  # type: ignore[list-item]
    report = ["--report", home / "packages.json", "--requirement", requirements]
    subprocess.run([*pip, "--only-binary", ":all:", *report], check=True)
    installed = json.loads((home / "packages.json").read_text())["install"]
    assert all("sha256" in each["download_info"]["archive_info"]["hashes"] for each in installed)
    pins = {line.partition("==")[0] for line in requirements.read_text().splitlines()}
    assert {each["metadata"]["name"].lower().replace("_", "-") for each in installed} == pins
    subprocess.run([*pip, "--no-deps", ROOT, "nvidia-pytriton>=0.7,<0.8"], check=True)
    return home


def test_nothing_is_installed_that_is_not_needed(image: Path) -> None:
    packages = next((image / "lib").glob("python*")) / "site-packages"
    names = {
        file.name.split("-")[0].lower().replace("_", "-") for file in packages.glob("*.dist-info")
    }
    assert not names & NOT_NEEDED
    assert not names & {"pip", "wheel"}
    files = [file for file in packages.rglob("*") if file.is_file() and not file.is_symlink()]
    of_triton = [file for file in files if "pytriton" in str(file)]
    size = sum(file.stat().st_size for file in {*files} - {*of_triton}) / 1e6
    print(f"{len(names)} packages, {len(files) - len(of_triton)} files, {size:.0f} MB")
    assert size < 400


def test_it_serves_from_a_read_only_root(image: Path, built: Path) -> None:
    ports = serve_ports()
    options = [f"--http-port={ports.http}", f"--grpc-port={ports.grpc}"]
    log = ["--log-file", "/dev/stdout"]
    serve = [str(image / "bin" / "dflash-trt"), "serve", str(built), *options, *log]
    before = sorted(built.rglob("*"))
    command = ["unshare", "--mount", "bash", "-c", ISOLATED, "/etc/hostname", *serve]
    path = {"PATH": f"{image}/bin:/usr/bin:/bin", "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    with started(command, env=path, stderr=subprocess.STDOUT) as (process, _):
        with Client(f"127.0.0.1:{ports.grpc}") as client:
            texts = [client.generate("def main():", max_tokens=24).text for _ in range(2)]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT)
    assert texts[0] == texts[1] != ""
    assert process.returncode == 0
    assert sorted(built.rglob("*")) == before
