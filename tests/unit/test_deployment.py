"""The deployment files against their own validators, and against what they promise.

hadolint, shellcheck, yamllint and kubernetes-validate (the schemas of Kubernetes) are what the dev
extra installs; custom resources have schemas trimmed from the published ones, in `schemas/`. No
image was built, and nothing was applied to a cluster.
"""

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from dflash_trt.builder.deployment import KEY_FOLDER, resource_name, write_deployment
from dflash_trt.builder.manifest import NO_DIGEST, build_digest, files_of, served_files
from dflash_trt.config import BuildConfig, TensorRTLLM
from dflash_trt.engines import read_info, write_info
from dflash_trt.engines.info import PlanInfo
from dflash_trt.hardware import find_machine
from tests.serving.test_metrics import _check_query
from tests.support.commands import program
from tests.support.pages import ROOT, read

SCHEMAS = Path(__file__).parents[1] / "schemas"
KUBERNETES = "1.34"
KEY = f"{KEY_FOLDER}/key"
SERVE = ["dflash-trt", "serve", "/mnt/models", "--host", "0.0.0.0", "--key-file", KEY]
SERVE += ["--log-file", "/dev/stdout"]
LINT = YamlLintConfig(
    "{extends: default, rules: {line-length: {max: 110}, document-start: disable, "
    "braces: {max-spaces-inside: 0}}}"
)
CASES: dict[str, dict[str, Any]] = {
    "cpu": {"kind": "onnxruntime"},
    "pytorch": {"kind": "pytorch"},
    "plans": {"kind": "tensorrt", "library": "tensorrt_rtx"},
    "dgx-b300": {"hardware": "dgx-b300", "checkpoints": "hub"},
    "one-gpu": {"hardware": "hgx-h200", "gpus": 1},
}
OURS = ("cpu", "pytorch", "plans")  # whose rounds are ours, and whose image is slim


def made(name: str = "gpt-oss.120b_x", **engine: Any) -> BuildConfig:
    hub = {"hub": "org/name", "revision": "0" * 40}
    return BuildConfig.model_validate(
        {"name": name, "target": hub, "drafter": hub, "engine": {"kind": "tensorrt_llm"} | engine}
    )


def write(directory: Path, config: BuildConfig) -> None:
    engine, ranks = config.engine, 1
    if isinstance(engine, TensorRTLLM):
        ranks = engine.gpus or find_machine(engine.hardware).all_gpus
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
    """Return what `kubectl apply -f deploy/kubernetes` sends: no folder below it."""
    found: dict[str, dict[str, Any]] = {}
    for file in (deploy / "kubernetes").glob("*.yaml"):
        found |= resources(file)
    return found


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
    text = (deploy / "Dockerfile").read_text()
    users = [line.split()[1] for line in text.splitlines() if line.startswith("USER")]
    assert users == (["10001:10001"] if case in OURS else ["10001"])
    assert case in OURS or "nvcr.io/nvidia/tensorrt-llm/release:1.4.0rc1\n" in text
    # what is run, watched and found again
    commands = [json.loads(line[4:]) for line in text.splitlines() if line.startswith("CMD [")]
    assert commands == [SERVE]
    assert "ENTRYPOINT" not in text
    assert text.count("HEALTHCHECK") == 1
    assert "http://127.0.0.1:8000/health" in text
    assert text.count("COPY --chmod=go=rX . /mnt/models") == 1
    assert f'dflash-trt.build="sha256:{NO_DIGEST}"' in text
    assert "ARG PIP_INDEX_URL\n" in text
    assert not re.search(r"python3\.\d", text)  # its version stands in one argument
    assert "--insecure-old-server" not in text
    run = text.partition("docker run")[2].partition("ARG")[0]
    assert {"--init", "--shm-size", "--stop-timeout"} <= {*run.split()}
    assert ("--ulimit stack=67108864" in run) == (case not in OURS)
    assert ("&& type mpirun trtllm-llmapi-launch " in text) == (case not in OURS)
    assert ("TRTLLM_CACHE_DIR=/home/dflash/.cache/" in text) == (case not in OURS)


@pytest.mark.models
def test_the_image_has_all_that_is_imported(tmp_path: Path) -> None:
    """It gets what a bundle needs: no ONNX Runtime, no graph builder."""
    write(tmp_path, made(hardware="dgx-b300", checkpoints="hub"))
    text = (tmp_path / "deploy" / "Dockerfile").read_text()
    line = text.split("--report /opt/packages.json")[1].split("&&")[0].replace("\\\n", " ")
    installed = {re.split(r"[\[>]", word)[0] for word in shlex.split(line)}
    markers = ("", "extra == 'server'")
    required = [x for x in metadata.requires("dflash-trt") or () if x.partition("; ")[2] in markers]
    declared = {re.match(r"[\w.-]+", each)[0] for each in required}  # type: ignore[index]
    assert installed <= declared
    modules = ("cli", "bench", "doctor", "serving.client", "serving.model.llm")
    modules += ("serving.supervisor", "serving.http.openai", "serving.http.guard")
    modules += ("serving.http.triton",)
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
    words = re.split(r"[^\w-]+", (deploy.parent / "requirements.txt").read_text())
    assert {"uvicorn"} < names <= {*words}


def test_the_script_is_sound_and_executable(deploy: Path, case: str) -> None:
    scripts = sorted(deploy.glob("*.sh"))
    fetches = CASES[case].get("checkpoints") == "hub"
    assert [script.name for script in scripts] == (["fetch.sh"] if fetches else [])
    if fetches:
        checked = program("shellcheck", *scripts)
        assert checked.returncode == 0, checked.stdout
        assert all(os.access(script, os.X_OK) for script in scripts)


def test_the_packages_are_pinned(deploy: Path, case: str) -> None:
    lines = (deploy.parent / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert {"uvicorn", "fastapi", "tritonclient", "grpcio", "pydantic-core"} <= pins.keys()
    assert pins.pop("numpy") == "1.26.4"
    assert {name: metadata.version(name).partition("+")[0] for name in pins} == pins
    # this machine lacks what only a GPU's server needs
    left = [line for line in lines if "==" not in line]
    assert all(line.startswith("tensorrt-rtx") for line in left)
    assert not left or case == "plans"
    assert ("torch" in pins) == (case == "pytorch")
    assert ("onnxruntime" in pins) == (case in ("cpu", "plans"))


def test_the_yaml_has_no_fault(deploy: Path) -> None:
    for file in deploy.rglob("*.yaml"):
        assert [str(problem) for problem in linter.run(file.read_text(), LINT)] == []


def test_several_machines_have_no_manifests(tmp_path: Path) -> None:
    """They are started by Slurm or MPI."""
    write(tmp_path, made(hardware="gb300-nvl72-slice", checkpoints="hub"))
    assert (tmp_path / "deploy" / "Dockerfile").is_file()
    assert not list(tmp_path.rglob("*.yaml"))


def test_the_manifests_are_kubernetes_own(deploy: Path, case: str) -> None:
    kinds, core = base(deploy), {"Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget"}
    assert kinds.keys() == core | (set() if case in OURS else {"PersistentVolumeClaim"})
    for resource in kinds.values():
        check(resource)
    check(pod_of(kinds["Deployment"]["spec"]["template"]["spec"]))


def pod_of(spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}


def test_what_scales_it(deploy: Path, case: str) -> None:
    scaling = deploy / "kubernetes" / "scaling"
    (scaler,) = resources(scaling / "hpa.yaml").values()
    (monitor,) = resources(scaling / "podmonitor.yaml").values()
    check(scaler)
    check(monitor)
    assert_scales(base(deploy) | {"HorizontalPodAutoscaler": scaler, "PodMonitor": monitor})
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
    spec = {key: runtime["spec"][key] for key in ("containers", "volumes")}
    check(pod_of(spec))
    assert_closed(spec, [8000], kinds)
    assert_probed(spec)
    assert_fetches_with_a_secret(spec, CASES[case])
    assert_one_claim(kinds, service["spec"]["predictor"]["maxReplicas"])
    assert runtime["spec"]["annotations"]["dflash-trt/build"] == f"sha256:{NO_DIGEST}"
    gpus = spec["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", 0)
    assert bool(gpus) == bool(runtime["spec"].get("tolerations"))
    # as the comment in it says
    service["spec"]["predictor"]["canaryTrafficPercent"] = 10
    check(service)


def test_pods_get_what_the_build_needs(deploy: Path, case: str) -> None:
    spec = base(deploy)["Deployment"]["spec"]["template"]["spec"]
    if case in OURS:
        assert_writes_nothing_but_tmp(spec, 0 if case == "cpu" else 1, case)
        return
    engine = CASES[case]
    preset, (container,) = find_machine(engine["hardware"]), spec["containers"]
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


def assert_writes_nothing_but_tmp(spec: dict[str, Any], gpus: int, case: str) -> None:
    (container,) = spec["containers"]
    secure = container["securityContext"]
    assert secure["readOnlyRootFilesystem"]
    assert not secure["allowPrivilegeEscalation"]
    assert secure["capabilities"] == {"drop": ["ALL"]}
    assert spec["securityContext"]["runAsNonRoot"]
    mounts = {each["mountPath"] for each in container["volumeMounts"] if "readOnly" not in each}
    assert mounts == {"/tmp", "/dev/shm"}
    assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == gpus
    if case == "plans":
        assert capabilities(spec) == [(8, 9), (12, 0)]


def assert_closed(spec: dict[str, Any], ports: list[int], kinds: dict[str, Any]) -> None:
    """Assert that the key that the command reads comes from a Secret, and must be there."""
    (container,) = spec["containers"]
    (mount,) = (each for each in container["volumeMounts"] if each["mountPath"] == KEY_FOLDER)
    assert mount["readOnly"]
    (volume,) = (each for each in spec["volumes"] if each["name"] == mount["name"])
    assert not volume["secret"].get("optional")
    assert volume["secret"]["secretName"].endswith("-key")
    assert [port["containerPort"] for port in container["ports"]] == ports
    assert "command" not in container  # the image's own
    assert "args" not in container


def assert_probed(spec: dict[str, Any]) -> None:
    (container,) = spec["containers"]
    assert container["lifecycle"]["preStop"]["sleep"]["seconds"] >= 5
    start, ready, live = (
        container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")
    )
    assert [probe["httpGet"]["port"] for probe in (start, ready, live)] == [8000] * 3
    assert ready["httpGet"]["path"] == start["httpGet"]["path"] == "/health"
    assert live["httpGet"]["path"] == "/v2/health/live"  # which stays while it drains
    assert start["periodSeconds"] * start["failureThreshold"] >= 3600


def assert_fetches_with_a_secret(spec: dict[str, Any], engine: dict[str, Any]) -> None:
    for container in (*spec.get("initContainers", []), *spec["containers"]):
        tokens = [each for each in container.get("env", []) if each["name"] == "HF_TOKEN"]
        assert bool(tokens) == (engine.get("checkpoints") == "hub")
        assert all("secretKeyRef" in each["valueFrom"] for each in tokens)


def assert_one_claim(kinds: dict[str, Any], replicas: int) -> None:
    """Assert that pods on several nodes can mount what they share."""
    claim = kinds.get("PersistentVolumeClaim")
    if claim is not None and replicas > 1:
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def assert_scales(kinds: dict[str, Any]) -> None:
    """Assert that the metric arrives, and that the claim serves as many pods."""
    scaler, monitor = kinds["HorizontalPodAutoscaler"]["spec"], kinds["PodMonitor"]["spec"]
    pod = kinds["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    assert (ports[endpoint["port"]], endpoint["path"]) == (8000, "/metrics")
    assert_one_claim(kinds, scaler["maxReplicas"])


def assert_policies(kinds: dict[str, Any]) -> None:
    pod = kinds["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    network, budget = kinds["NetworkPolicy"]["spec"], kinds["PodDisruptionBudget"]["spec"]
    for selector in (network["podSelector"], budget["selector"]):
        assert selector["matchLabels"].items() <= labels.items()
    assert network["policyTypes"] == ["Ingress", "Egress"]
    assert all(rule["from"] for rule in network["ingress"])  # an empty one lets all in
    monitored = [r for r in network["ingress"] if "namespaceSelector" in r["from"][0]]
    assert [port["port"] for rule in monitored for port in rule["ports"]] == [8000]
    fetches = "initContainers" in pod["spec"]
    assert (
        443 in [port["port"] for rule in network["egress"] for port in rule["ports"]]
    ) == fetches
    assert budget["maxUnavailable"] == 1  # a node can be drained with one instance, too


def assert_rolls_out(kinds: dict[str, Any]) -> None:
    spec = kinds["Deployment"]["spec"]["template"]
    assert spec["metadata"]["annotations"] == {"dflash-trt/build": f"sha256:{NO_DIGEST}"}
    containers = (*spec["spec"].get("initContainers", []), *spec["spec"]["containers"])
    assert {each["image"].partition(":")[2] for each in containers} == {NO_DIGEST[:12]}
    prestop = containers[-1]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["spec"]["terminationGracePeriodSeconds"] >= prestop + 28  # see docs/serving.md
    assert spec["spec"]["shareProcessNamespace"]
    assert spec["spec"]["imagePullSecrets"]
    (spread,) = spec["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["labelSelector"]["matchLabels"] == spec["metadata"]["labels"]
    gpus = containers[-1]["resources"]["limits"].get("nvidia.com/gpu")
    keys = [each["key"] for each in spec["spec"].get("tolerations", [])]
    assert keys == (["nvidia.com/gpu"] if gpus else [])


def assert_deployment(kinds: dict[str, Any], case: str) -> None:
    spec = kinds["Deployment"]["spec"]["template"]["spec"]
    assert_closed(spec, [8000, 8001], kinds)
    assert_probed(spec)
    assert_fetches_with_a_secret(spec, CASES[case])
    assert_policies(kinds)
    assert_rolls_out(kinds)


def test_the_deployment_keeps_its_promises(deploy: Path, case: str) -> None:
    assert_deployment(base(deploy), case)


def _drop(value: Any, *path: Any) -> None:
    for name in path[:-1]:
        value = value[name]
    del value[path[-1]]


def _set(value: Any, new: Any, *path: Any) -> None:
    for name in path[:-1]:
        value = value[name]
    value[path[-1]] = new


POD = ("Deployment", "spec", "template", "spec")
SERVER = (*POD, "containers", 0)
# each breaks one rule
BROKEN: dict[str, Callable[[dict[str, Any]], None]] = {
    "no key": lambda kinds: _drop(kinds, *SERVER, "volumeMounts", 0),
    "a key that may be missing": lambda kinds: _set(
        kinds, True, *POD, "volumes", 0, "secret", "optional"
    ),
    "a command of its own": lambda kinds: _set(kinds, ["tritonserver"], *SERVER, "command"),
    "no preStop": lambda kinds: _drop(kinds, *SERVER, "lifecycle"),
    "no startup probe": lambda kinds: _drop(kinds, *SERVER, "startupProbe"),
    "an impatient start": lambda kinds: _set(kinds, 3, *SERVER, "startupProbe", "failureThreshold"),
    "liveness that drains": lambda kinds: _set(
        kinds, "/health", *SERVER, "livenessProbe", "httpGet", "path"
    ),
    "a token in the file": lambda kinds: _set(
        kinds, {"value": "hf_x"}, *SERVER, "env", 1, "valueFrom"
    ),
    "no token for the fetch": lambda kinds: _drop(kinds, *POD, "initContainers", 0, "env"),
    "a policy of other pods": lambda kinds: _set(
        kinds, {"matchLabels": {"app": "x"}}, "NetworkPolicy", "spec", "podSelector"
    ),
    "anyone may call": lambda kinds: _set(kinds, [], "NetworkPolicy", "spec", "ingress", 0, "from"),
    "no way to the Hub": lambda kinds: _set(kinds, [], "NetworkPolicy", "spec", "egress"),
    "a drain that waits": lambda kinds: _set(
        kinds, 0, "PodDisruptionBudget", "spec", "maxUnavailable"
    ),
    "no annotation": lambda kinds: _drop(kinds, *POD[:3], "metadata", "annotations"),
    "a fixed tag": lambda kinds: _set(kinds, "x:latest", *SERVER, "image"),
    "killed while it drains": lambda kinds: _set(kinds, 30, *POD, "terminationGracePeriodSeconds"),
    "no pull secret": lambda kinds: _drop(kinds, *POD, "imagePullSecrets"),
    "no spread": lambda kinds: _drop(kinds, *POD, "topologySpreadConstraints"),
    "no toleration": lambda kinds: _drop(kinds, *POD, "tolerations"),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_noticed(rule: str, tmp_path: Path) -> None:
    case = "dgx-b300"  # has all that the others have
    write(tmp_path, made(**CASES[case]))
    kinds = copy.deepcopy(base(tmp_path / "deploy"))
    assert_deployment(kinds, case)
    kinds = copy.deepcopy(kinds)
    BROKEN[rule](kinds)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        assert_deployment(kinds, case)


SCALING: dict[str, Callable[[dict[str, Any]], None]] = {
    "a claim for one": lambda kinds: _set(
        kinds, ["ReadWriteOnce"], "PersistentVolumeClaim", "spec", "accessModes"
    ),
    "a metric of no port": lambda kinds: _set(
        kinds, "metrics", "PodMonitor", "spec", "podMetricsEndpoints", 0, "port"
    ),
    "a monitor of other pods": lambda kinds: _set(
        kinds, {"app": "x"}, "PodMonitor", "spec", "selector", "matchLabels"
    ),
}


@pytest.mark.parametrize("rule", SCALING)
def test_broken_scaling_is_noticed(rule: str, tmp_path: Path) -> None:
    write(tmp_path, made(**CASES["dgx-b300"]))
    kinds = base(tmp_path / "deploy")
    for file in (tmp_path / "deploy" / "kubernetes" / "scaling").iterdir():
        kinds |= resources(file)
    assert_scales(kinds)
    kinds = copy.deepcopy(kinds)
    SCALING[rule](kinds)
    with pytest.raises((AssertionError, KeyError)):
        assert_scales(kinds)


def test_the_service_finds_the_pods(deploy: Path, case: str) -> None:
    kinds = base(deploy)
    template = kinds["Deployment"]["spec"]["template"]
    assert kinds["Service"]["spec"]["selector"] == template["metadata"]["labels"]
    (container,) = template["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"] for port in kinds["Service"]["spec"]["ports"]} <= ports.keys()


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


def test_the_commands_of_the_page(original: Path, tmp_path: Path) -> None:
    """As docs/release.md has them, over a stand-in of kubectl (`tests/standins/kubectl`)."""
    shutil.copytree(original / "built", tmp_path / "BUILD")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kubectl").symlink_to(ROOT / "tests" / "standins" / "kubectl")
    blocks = [
        block.text
        for block in read("docs/release.md")
        if block.language == "sh" and "kubectl" in block.text
    ]
    assert len(blocks) == 2
    (tagging,) = (
        line
        for block in read("docs/release.md")
        for line in block.text.splitlines()
        if block.language == "sh" and line.startswith("TAG=")
    )
    text = "\n".join([*blocks, tagging, 'echo "$TAG"']).replace("NAME", "tiny")
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "CLUSTER": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    kinds = resources(tmp_path / "applied.yaml")
    assert kinds.keys() == {"Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget"}
    for resource in kinds.values():
        check(resource)
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    tag = build_digest(original / "built")[:12]
    assert done.stdout.split()[-1] == tag
    assert pod["containers"][0]["image"] == f"registry.example.com/tiny:{tag}"
    secret = (tmp_path / f"secret-{pod['volumes'][0]['secret']['secretName']}").read_text()
    assert re.fullmatch(r"--from-literal=key=[0-9a-f]{64}\n", secret)
    rollouts = (tmp_path / "rollouts").read_text().split("\n")
    assert rollouts == ["status tiny", "history tiny", "undo tiny", "status tiny", ""]
