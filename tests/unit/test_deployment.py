"""The deployment files against their own validators, and the probe against a real server.

hadolint, shellcheck, yamllint and kubernetes-validate (the schemas of Kubernetes) are what the dev
extra installs; custom resources have schemas trimmed from the published ones, in `schemas/`. No
image was built, and nothing was applied to a cluster.
"""

import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import replace
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from commands import program
from live import serving
from test_metrics import _check_query
from yamllint import linter
from yamllint.config import YamlLintConfig

from dflash_trt.build.deployment import resource_name, write_deployment
from dflash_trt.build.manifest import files_of, served_files
from dflash_trt.config import BuildConfig, TensorRTLLM
from dflash_trt.engines import read_info, write_info
from dflash_trt.engines.info import PlanInfo
from dflash_trt.planning import machine
from dflash_trt.serving.ports import free_ports

SCHEMAS = Path(__file__).parents[1] / "schemas"
KUBERNETES = "1.34"
LINT = YamlLintConfig(
    "{extends: default, rules: {line-length: {max: 110}, document-start: disable, "
    "braces: {max-spaces-inside: 0}}}"
)
CASES: dict[str, dict[str, Any]] = {
    "cpu": {"kind": "onnxruntime"},
    "plans": {"kind": "tensorrt", "library": "tensorrt_rtx"},
    "dgx-b300": {"hardware": "dgx-b300", "checkpoints": "hub"},
    "one-gpu": {"hardware": "hgx-h200", "gpus": 1},
}
OURS = ("cpu", "plans")  # whose rounds are ours, and whose image is slim


def made(name: str = "gpt-oss.120b_x", **engine: Any) -> BuildConfig:
    hub = {"hub": "org/name", "revision": "0" * 40}
    return BuildConfig.model_validate(
        {"name": name, "target": hub, "drafter": hub, "engine": {"kind": "tensorrt_llm"} | engine}
    )


def write(directory: Path, config: BuildConfig) -> None:
    engine, ranks = config.engine, 1
    if isinstance(engine, TensorRTLLM):
        ranks = engine.gpus or machine(engine.hardware).all_gpus
    write_deployment(directory, config, ranks)


def write_engines(directory: Path, original: Path, kind: str) -> None:
    """Write a tiny build's engines; for kind `tensorrt`, as if they were plans."""
    shutil.copytree(original / "built" / "engines", directory / "engines")
    if kind == "tensorrt":
        versions = {"library": "tensorrt_rtx", "version": "1.7.1", "graph": ""}
        described = {"dtype": "bfloat16", "prefill_chunk": 64, "profiles": ()}
        tensors: dict[str, Any] = {"inputs": {}, "outputs": {}, "aliases": {}}
        plan = PlanInfo(**versions, **described, **tensors, compute_capabilities=("8.9", "12.0"))
        for role in ("target", "drafter"):
            info = read_info(directory / "engines" / role)
            write_info(directory / "engines" / role, replace(info, kind=kind, plan=plan))


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def deploy(case: str, original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(case)
    if case in OURS:
        write_engines(directory, original, CASES[case]["kind"])
    write(directory, made(**CASES[case]))
    return directory / "deploy"


def resources(file: Path) -> dict[str, dict[str, Any]]:
    """Return what `kubectl apply -f` would send, by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(file.read_text())}


def base(deploy: Path) -> dict[str, dict[str, Any]]:
    return resources(deploy / "kubernetes" / "deployment.yaml")


def check(resource: dict[str, Any]) -> None:
    """Check against its published schema: a custom resource's is in `schemas/`."""
    file = SCHEMAS / f"{resource['kind'].lower()}.json"
    if file.exists():
        jsonschema.validate(resource, json.loads(file.read_text()))
    else:
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)


def ignored(file: Path, deploy: Path, patterns: list[str]) -> bool:
    name = file.relative_to(deploy.parent)
    return any(fnmatch(str(each), x) for each in (name, *name.parents) for x in patterns)


def test_the_dockerfile(deploy: Path, case: str) -> None:
    checked = program("hadolint", deploy / "Dockerfile")
    assert checked.returncode == 0, checked.stdout
    patterns = (deploy / "Dockerfile.dockerignore").read_text().splitlines()[1:]
    copied = [file for file in files_of(deploy.parent) if not ignored(file, deploy, patterns)]
    assert copied == served_files(deploy.parent)
    names = {file.name for file in copied if deploy in file.parents}
    assert names == {file.name for file in deploy.glob("*.sh")}
    assert (not names) == (case in OURS)
    text = (deploy / "Dockerfile").read_text()
    users = [line.split()[1] for line in text.splitlines() if line.startswith("USER")]
    assert users == (["10001:10001"] if case in OURS else ["10001"])
    assert case in OURS or "nvcr.io/nvidia/tensorrt-llm/release:1.4.0rc1\n" in text


@pytest.mark.models
def test_the_image_has_all_that_is_imported(tmp_path: Path) -> None:
    """It gets what a bundle needs: no ONNX Runtime, no graph builder."""
    write(tmp_path, made(hardware="dgx-b300", checkpoints="hub"))
    text = (tmp_path / "deploy" / "Dockerfile").read_text()
    line = text.split("--constraint /tmp/installed.txt")[1].split("&&")[0].replace("\\\n", " ")
    installed = {re.split(r"[\[>]", word)[0] for word in shlex.split(line)}
    markers = ("", "extra == 'server'")
    required = [x for x in metadata.requires("dflash-trt") or () if x.partition("; ")[2] in markers]
    declared = {re.match(r"[\w.-]+", each)[0] for each in required}  # type: ignore[index]
    assert installed <= declared
    modules = ("cli", "bench", "doctor", "serving.front", "serving.client", "serving.server")
    modules += ("serving.app.openai", "serving.app.guard", "serving.app.triton")
    code = f"""
import importlib, importlib.metadata, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {{"onnxruntime", "onnx_ir", "onnx", "pytriton", "transformers"}}:
            raise ImportError(name)
sys.meta_path.insert(0, Finder())
before = set(sys.modules)
for module in {modules}:
    importlib.import_module("dflash_trt." + module)
names = importlib.metadata.packages_distributions()
print(*{{d for m in set(sys.modules) - before for d in names.get(m.split(".")[0], [])}})
"""
    out = program(sys.executable, "-c", code)
    assert out.returncode == 0, out.stderr
    imported = {name.lower().replace("_", "-") for name in out.stdout.split()} & declared
    assert imported <= installed


def test_an_image_gets_what_the_application_needs(deploy: Path) -> None:
    extra = [x for x in metadata.requires("dflash-trt") or () if x.endswith("extra == 'server'")]
    names = {re.split(r"[^\w-]", each)[0] for each in extra} - {"nvidia-pytriton"}  # Triton's image
    words = re.split(r"[^\w-]+", (deploy / "Dockerfile").read_text())
    assert {"uvicorn"} < names <= {*words}


def test_the_scripts_are_sound_and_executable(deploy: Path, case: str) -> None:
    scripts = sorted(deploy.glob("*.sh"))
    names = {"probe.sh", "start.sh"}
    names |= {"fetch.sh"} if CASES[case].get("checkpoints") == "hub" else set()
    assert {script.name for script in scripts} == (set() if case in OURS else names)
    if case in OURS:
        return
    checked = program("shellcheck", *scripts)
    assert checked.returncode == 0, checked.stdout
    assert all(os.access(script, os.X_OK) for script in scripts)


def run_with_fake(script: Path, **env: str) -> list[str]:
    launch = script.parents[1] / "launch"
    launch.mkdir(exist_ok=True)
    (launch / "mpi.sh").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\" $TRITON_ARGS\n")
    (launch / "mpi.sh").chmod(0o755)
    done = program(script, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_start_closes_what_changes_the_server(tmp_path: Path) -> None:
    write(tmp_path, made())
    start = tmp_path / "deploy" / "start.sh"
    *_, http, grpc, verbose = run_with_fake(start, TRITON_ARGS="--log-verbose=1")
    rule = http.removeprefix("--http-restricted-api=")
    assert grpc == f"--grpc-restricted-protocol={rule}"
    assert verbose == "--log-verbose=1"
    closed, key = rule.split(":admin-key=")
    assert closed == "model-repository,shared-memory,trace,logging"
    assert len(key) == 64
    assert run_with_fake(start)[-1] != grpc  # another key each time


def test_the_yaml_has_no_fault(deploy: Path) -> None:
    for file in deploy.rglob("*.yaml"):
        assert [str(problem) for problem in linter.run(file.read_text(), LINT)] == []


def test_several_machines_have_no_manifests(tmp_path: Path) -> None:
    """They are started by Slurm or MPI."""
    write(tmp_path, made(hardware="gb300-nvl72-slice", checkpoints="hub"))
    assert (tmp_path / "deploy" / "Dockerfile").is_file()
    assert not list(tmp_path.rglob("*.yaml"))


def test_the_manifests_are_kubernetes_own(deploy: Path, case: str) -> None:
    kinds, core = base(deploy), {"Deployment", "Service"}
    assert kinds.keys() == core | (set() if case in OURS else {"PersistentVolumeClaim"})
    for resource in kinds.values():
        check(resource)
    check(pod_of(kinds["Deployment"]["spec"]["template"]["spec"]))


def pod_of(spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}


def test_what_scales_it(deploy: Path, case: str) -> None:
    (scaler,) = resources(deploy / "kubernetes" / "hpa.yaml").values()
    check(scaler)
    target = scaler["spec"]["scaleTargetRef"]
    workload = base(deploy)[target["kind"]]
    assert target["apiVersion"] == workload["apiVersion"]
    assert target["name"] == workload["metadata"]["name"]
    (metric,) = scaler["spec"]["metrics"]
    _check_query(metric["pods"]["metric"]["name"])


def test_kserves_runtime_and_service_fit_each_other(deploy: Path, case: str) -> None:
    kinds = resources(deploy / "kserve.yaml")
    for resource in kinds.values():
        check(resource)
    runtime, service = kinds["ServingRuntime"], kinds["InferenceService"]
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"] in runtime["spec"]["supportedModelFormats"]
    check(pod_of({key: runtime["spec"][key] for key in ("containers", "volumes")}))
    # as the comment in it says
    service["spec"]["predictor"]["canaryTrafficPercent"] = 10
    check(service)


def test_pods_get_what_the_build_needs(deploy: Path, case: str) -> None:
    spec = base(deploy)["Deployment"]["spec"]["template"]["spec"]
    if case in OURS:
        assert_writes_nothing_but_tmp(spec, {"cpu": 0, "plans": 1}[case])
        return
    engine = CASES[case]
    preset, (container,) = machine(engine["hardware"]), spec["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == min(engine.get("gpus", preset.all_gpus), preset.gpus)
    shm = next(volume for volume in spec["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}
    assert capabilities(spec) == [divmod(preset.gpu.sm, 10)]
    assert spec["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    env = {each["name"] for each in container["env"]}
    assert ("HF_TOKEN" in env) == (engine.get("checkpoints") == "hub")
    # the ranks find what was fetched before
    assert [each["command"] for each in spec.get("initContainers", [])] == (
        [["deploy/fetch.sh"]] if "HF_TOKEN" in env else []
    )


def capabilities(spec: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the compute capabilities of nodes that a pod may run on."""
    affinity = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    terms = [term["matchExpressions"] for term in affinity["nodeSelectorTerms"]]
    return [tuple(int(each["values"][0]) for each in term) for term in terms]  # type: ignore[misc]


def assert_writes_nothing_but_tmp(spec: dict[str, Any], gpus: int) -> None:
    (container,) = spec["containers"]
    secure = container["securityContext"]
    assert secure["readOnlyRootFilesystem"]
    assert not secure["allowPrivilegeEscalation"]
    assert secure["capabilities"] == {"drop": ["ALL"]}
    assert spec["securityContext"]["runAsNonRoot"]
    assert {each["mountPath"] for each in container["volumeMounts"]} == {"/tmp", "/dev/shm"}
    assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == gpus
    if gpus:
        assert capabilities(spec) == [(8, 9), (12, 0)]


def test_the_service_finds_the_pods(deploy: Path, case: str) -> None:
    kinds = base(deploy)
    template = kinds["Deployment"]["spec"]["template"]
    assert kinds["Service"]["spec"]["selector"] == template["metadata"]["labels"]
    (container,) = template["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"] for port in kinds["Service"]["spec"]["ports"]} <= ports.keys()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if case in OURS:
            assert container[probe]["httpGet"]["port"] == "http"
        else:
            assert container[probe]["exec"]["command"] == ["deploy/probe.sh"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-oss-120b", "gpt-oss-120b"),
        ("qwen3.5-4b_x", "qwen3-5-4b-x"),
        ("3.1", "dflash-3-1"),
        ("a" * 90, "a" * 45),
    ],
)
def test_a_name_becomes_one_that_kubernetes_takes(name: str, expected: str) -> None:
    assert resource_name(name) == expected


def test_the_probe_generates_unless_tokens_flow(tmp_path: Path) -> None:
    """A stand-in of curl reads files."""
    write(tmp_path, made())
    answer = 'case "$*" in */metrics) cat "$TMPDIR/tokens" ;; *) cat "$TMPDIR/works" ;; esac'
    (tmp_path / "curl").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "curl").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"

    def healthy(tokens: int) -> bool:
        (tmp_path / "tokens").write_text(f"trtllm_generation_tokens_total {tokens}\n")
        probe = tmp_path / "deploy" / "probe.sh"
        return program(probe, PATH=path, TMPDIR=str(tmp_path)).returncode == 0

    (tmp_path / "works").touch()
    assert healthy(0)
    (tmp_path / "works").unlink()
    assert not healthy(0)  # nothing has been generated since, and nothing is
    assert healthy(5)  # others are being served
    assert not healthy(5)


@pytest.mark.models
def test_the_probe_asks_a_real_server(built: Path, tmp_path: Path) -> None:
    write(tmp_path, made())
    ports = free_ports()
    probe = tmp_path / "deploy" / "probe.sh"
    env = {"HTTP_PORT": str(ports.http), "METRICS_PORT": str(ports.metrics)}
    with serving(built, ports):
        assert [program(probe, **env).returncode for _ in range(2)] == [0, 0]
    assert program(probe, **env).returncode != 0
