"""The example pipelines: their commands are ours, their files are what each system takes.

None was run on its system; kfp's compiler and actionlint are in
`tests/soak/test_pipeline_tools.py`, which also runs Argo's steps in a shell.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from pages import ROOT, unfinished
from test_deployment import KUBERNETES, SCHEMAS

PIPELINES = ROOT / "examples" / "pipelines"
RECIPES = ("github-actions.yaml", "argo-workflow.yaml", "kubeflow.py")
COMMANDS = {"build", "check", "bench engine", "bench compare", "sign", "pack"}


def argo() -> dict[str, Any]:
    return yaml.safe_load((PIPELINES / "argo-workflow.yaml").read_text())  # type: ignore[no-any-return]


def arguments(name: str) -> list[str]:
    """What Argo's tasks give for a parameter."""
    given = [task.get("arguments", {}) for task in argo()["spec"]["templates"][0]["dag"]["tasks"]]
    each = [parameter for found in given for parameter in found.get("parameters", [])]
    return [parameter["value"] for parameter in each if parameter["name"] == name]


def scripts(recipe: str) -> list[str]:
    """What a shell runs in it."""
    text = (PIPELINES / recipe).read_text()
    if recipe == "kubeflow.py":
        values = (x.value for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Constant))
        return [x for x in values if isinstance(x, str) and x.startswith("\n")]
    if recipe == "argo-workflow.yaml":
        templates = {each["name"]: each for each in argo()["spec"]["templates"]}
        found = [*arguments("script"), templates["traffic"]["container"]["args"][0]]
        return [re.sub(r"\{\{[\w.]+\}\}", "value", script) for script in found]
    jobs = yaml.safe_load(text)["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_commands_are_ours(recipe: str) -> None:
    lines = [line for script in scripts(recipe) for line in script.splitlines()]
    ours = [line.strip() for line in lines if line.strip().startswith("dflash-trt ")]
    for line in ours:
        words = shlex.split(line.split(" > ")[0])[1:]
        assert not unfinished(words), line
    used = {name for name in COMMANDS for line in ours if line.startswith(f"dflash-trt {name} ")}
    assert used == COMMANDS


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_shell_has_nothing_against_it(recipe: str, tmp_path: Path) -> None:
    assert scripts(recipe)
    for number, script in enumerate(scripts(recipe)):
        file = tmp_path / f"{number}.sh"
        file.write_text(script)
        shell = "bash" if recipe.startswith("github") else "sh"
        checked = subprocess.run(
            ["shellcheck", f"--shell={shell}", file], capture_output=True, text=True, timeout=30
        )
        assert checked.returncode == 0, checked.stdout


def test_a_worse_build_is_not_signed() -> None:
    """`bench compare` comes before `sign` in each, in a shell that ends with the first failure."""
    for recipe in RECIPES:
        text = "\n".join(scripts(recipe))
        assert text.index("bench compare") < text.index("dflash-trt sign") < text.index("skopeo")
    assert all(task.get("depends") for task in argo()["spec"]["templates"][0]["dag"]["tasks"][1:])
    assert "-euc" in (PIPELINES / "kubeflow.py").read_text()


def test_zizmor_finds_nothing() -> None:
    command = ["zizmor", "--offline", "--no-progress", "--persona=pedantic", "--color=never"]
    found = subprocess.run(
        [*command, PIPELINES / "github-actions.yaml"], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_argo_takes_it() -> None:
    workflow = argo()
    jsonschema.validate(workflow, json.loads((SCHEMAS / "workflowtemplate.json").read_text()))
    spec = workflow["spec"]
    templates = {each["name"]: each for each in spec["templates"]}
    tasks = templates[spec["entrypoint"]]["dag"]["tasks"]
    for number, task in enumerate(tasks):
        wanted = templates[task["template"]].get("inputs", {"parameters": []})["parameters"]
        given = task.get("arguments", {"parameters": []})["parameters"]
        assert [each["name"] for each in given] == [each["name"] for each in wanted]
        assert task.get("depends") in (None, *(each["name"] for each in tasks[:number]))
    parameters = {each["name"] for each in spec["arguments"]["parameters"]}
    text = (PIPELINES / "argo-workflow.yaml").read_text()
    assert set(re.findall(r"\{\{workflow\.parameters\.(\w+)\}\}", text)) <= parameters
    claims = [{"name": "work", "emptyDir": {}}]
    for template in templates.values():
        if "container" in template:
            container = {"name": "main", **template["container"]}
            pod = {"containers": [container], "volumes": [*spec["volumes"], *claims]}
            resource = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}
            kubernetes_validate.validate(resource, KUBERNETES, strict=True)


def test_kserve_takes_the_patches() -> None:
    schema = json.loads((SCHEMAS / "inferenceservice.json").read_text())["properties"]["spec"]
    patches = arguments("patch")
    for recipe in ("github-actions.yaml", "kubeflow.py"):
        for script in scripts(recipe):
            patches += re.findall(r"--patch '(.*)'", script)
            quoted = re.findall(r'--patch "((?:\\.|[^"\\])*)"', script)
            patches += [each.replace('\\"', '"') for each in quoted]
    assert len(patches) == 6
    for patch in patches:
        jsonschema.validate(json.loads(patch)["spec"], schema)
