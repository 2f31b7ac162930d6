"""The campaign of docs/proof.md: seeded cases of every part, until a share of the whole has run.

`python tests/lib/prove.py SHARE [PART ...]` (`make prove`). Every seed is a process of its own and
a line of `build/prove/results.jsonl`, so that a campaign that was killed goes on where it was:
seeds that have run on this commit are not run again. `--first` stops at the first finding.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS, REPORT = ROOT / "build/prove/results.jsonl", ROOT / "build/prove/report.md"
SECONDS = 1800.0  # of a seed; none takes a tenth of it
SHOWN = 2000  # characters of a finding
Result = tuple[int, list[str], Counter[str]]  # cases, what is wrong, what was met how often
Line = dict[str, Any]


# each imports what it needs: a seed's process has one part


def lossless(seed: int, directory: Path) -> Result:
    import losslessness  # noqa: PLC0415

    return losslessness.run(seed, directory / f"pair{seed}")


def served(seed: int, directory: Path) -> Result:
    import served_traffic  # noqa: PLC0415

    return served_traffic.run(seed, directory)


def front(seed: int, directory: Path) -> Result:
    import front_traffic  # noqa: PLC0415

    return front_traffic.run(seed, 1000)


def files(seed: int, directory: Path) -> Result:
    import fuzz_files  # noqa: PLC0415

    found = fuzz_files.main(1000, seed)
    return 1000, found["unexpected"], Counter(found["came"])


def tensors(seed: int, directory: Path) -> Result:
    from builds import build_engines  # noqa: PLC0415
    from crafted import send  # noqa: PLC0415
    from pairs import make_pair  # noqa: PLC0415

    pair, engines = make_pair(directory), directory / "engines"
    build_engines(pair.target_dir, pair.drafter_dir, engines, slots=4, max_seq_len=160)
    counts = send(engines / "target", engines / "drafter", seed, 500)
    return counts.total(), [], counts


def models(seed: int, directory: Path) -> Result:
    """Examples of up to 60 events each."""
    import hypothesis  # noqa: PLC0415
    from cache_model import CacheModel  # noqa: PLC0415
    from hypothesis.stateful import run_state_machine_as_test  # noqa: PLC0415
    from scheduler_model import SchedulerModel  # noqa: PLC0415

    counts = Counter[str]()
    for model in (CacheModel, SchedulerModel):
        options = hypothesis.settings(
            max_examples=250,
            stateful_step_count=60,
            deadline=None,
            database=None,
            phases=[hypothesis.Phase.generate],  # `make test` makes small what it finds
        )
        run_state_machine_as_test(hypothesis.seed(seed)(model), settings=options)
        counts[model.__name__] += 250
    return 500, [], counts


class Part(NamedTuple):
    """What is run, and how many cases are the whole of it."""

    run: Callable[[int, Path], Result]
    whole: int


PARTS = {
    "lossless": Part(lossless, 90_000),
    "served": Part(served, 10_000),
    "front": Part(front, 100_000),
    "files": Part(files, 100_000),
    "tensors": Part(tensors, 20_000),
    "models": Part(models, 20_000),
}


def run_seed(part: str, seed: int) -> Line:
    """In a process of its own: whatever it dies of is a finding."""
    start, environment = time.monotonic(), os.environ | {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            [sys.executable, __file__, "--seed", str(seed), "0", part],
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            said, errors = process.communicate(timeout=SECONDS)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            said, errors = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
    try:
        line = json.loads(said.splitlines()[-1])
    except (IndexError, ValueError):
        words = f"its process ended with {process.returncode}: {errors[-SHOWN:]}"
        line = {"cases": 0, "counts": {}, "wrong": [words]}
    seconds = round(time.monotonic() - start, 1)
    return {"part": part, "seed": seed, "commit": commit(), "seconds": seconds, **line}


def one_seed(part: str, seed: int) -> Line:
    """What the process of a seed says."""
    try:
        cases, wrong, counts = PARTS[part].run(seed, Path.cwd())
    except BaseException:
        cases, wrong, counts = 0, [traceback.format_exc()[-SHOWN:]], Counter()
    return {"cases": cases, "counts": counts, "wrong": [each[:SHOWN] for each in wrong]}


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def read_results(results: Path) -> list[Line]:
    """Those of this very tree; half a line of a campaign that was killed is none."""
    lines, here = list[Line](), commit()
    if not here or here.endswith("-dirty"):
        return lines
    for text in results.read_text().splitlines() if results.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line["commit"] == here:
            lines.append(line)
    return lines


def campaign(share: float, parts: list[str], results: Path, *, first: bool = False) -> list[Line]:
    """Runs what is not there yet, whichever part is furthest behind; all results."""
    results.parent.mkdir(parents=True, exist_ok=True)
    lines = read_results(results)
    with results.open("a") as stream:
        stream.write("\n")  # the last line may be half a one
        while not (first and any(line["wrong"] for line in lines)):
            done = {
                part: sum(line["cases"] for line in lines if line["part"] == part)
                / PARTS[part].whole
                for part in parts
            }
            part = min(parts, key=done.__getitem__)
            if done[part] >= share:
                break
            seeds = {line["seed"] for line in lines if line["part"] == part}
            seed = next(seed for seed in range(len(seeds) + 1) if seed not in seeds)
            line = run_seed(part, seed)
            # one that dies has no cases, and must not be tried for ever
            line["cases"] = line["cases"] or PARTS[part].whole // 100
            lines.append(line)
            print(json.dumps(line), file=stream, flush=True)
            words = f"{len(line['wrong'])} wrong, {line['seconds']} s"
            print(f"{part} {seed}: {line['cases']} cases, {words}", flush=True)
    return lines


def report(lines: list[Line]) -> str:
    from dflash_trt.machine import machine  # noqa: PLC0415

    here = machine()
    text = [
        f"Commit {commit()}, {here['cores']} cores {here['cpu']}",
        "",
        "| part | seeds | cases | of the whole | findings | seconds |",
        "|---|---|---|---|---|---|",
    ]
    details = []
    for part, (_, whole) in PARTS.items():
        mine = [line for line in lines if line["part"] == part]
        cases, wrong = sum(line["cases"] for line in mine), sum(len(line["wrong"]) for line in mine)
        seconds = sum(line["seconds"] for line in mine)
        text.append(
            f"| {part} | {len(mine)} | {cases} | {cases / whole:.1%} | {wrong} | {seconds:.0f} |"
        )
        counts = Counter[str]()
        for line in mine:
            counts.update(line["counts"])
        words = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        details += ["", f"{part}: {words}"]
    text += details
    found = [(line, wrong) for line in lines for wrong in line["wrong"]]
    text += [f"\n{line['part']} {line['seed']}: {wrong}" for line, wrong in found]
    return "\n".join(text) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("share", type=float, help="of the whole, 1 is all of it")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--first", action="store_true", help="stop at the first finding")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)  # a process of `run_seed`
    asked = parser.parse_args()
    parts = asked.parts or [*PARTS]
    if wrong := {*parts} - PARTS.keys():
        parser.error(f"no part is called {', '.join(wrong)}")
    if asked.seed is not None:
        print(json.dumps(one_seed(parts[0], asked.seed)))
        return 0
    lines = campaign(asked.share, parts, RESULTS, first=asked.first)
    text = report(lines)
    REPORT.write_text(text)
    print(text)
    return int(any(line["wrong"] for line in lines))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
