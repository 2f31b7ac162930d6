"""The campaign of docs/proof.md: seeded cases of every part, until a share of the whole has run.

`python tests/lib/prove.py SHARE [PART ...]` (`make prove`). Every seed is a process of its own, one
a core at a time, and a line of `build/prove/results.jsonl`, so that a campaign that was killed goes
on where it was: seeds that have run on this very package are not run again. `--first` stops at the
first finding.
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
from contextlib import suppress
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


def smollm2(seed: int, directory: Path) -> Result:
    import losslessness  # noqa: PLC0415

    return losslessness.smollm2(seed, directory)


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


def guided(seed: int, directory: Path) -> Result:
    import guided  # noqa: PLC0415

    return guided.run(seed, directory)


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
    run: Callable[[int, Path], Result]
    cases: int  # of a seed
    whole: int


PARTS = {
    "lossless": Part(lossless, 512, 90_000),
    "smollm2": Part(smollm2, 128, 500),
    "served": Part(served, 1000, 10_000),
    "front": Part(front, 1000, 100_000),
    "files": Part(files, 1000, 10_000),
    "guided": Part(guided, 2000, 100_000),
    "tensors": Part(tensors, 1000, 20_000),
    "models": Part(models, 500, 20_000),
}


class AtWork(NamedTuple):
    """A seed in a process of its own: whatever it dies of is a finding."""

    part: str
    seed: int
    process: subprocess.Popen[bytes]
    directory: tempfile.TemporaryDirectory[str]  # where it runs, with what it says
    since: float

    @classmethod
    def begin(cls, part: str, seed: int) -> AtWork:
        directory = tempfile.TemporaryDirectory()
        home = Path(directory.name)
        with (home / "said").open("wb") as said, (home / "errors").open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, __file__, "--seed", str(seed), "0", part],
                cwd=home,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=said,
                stderr=errors,
                start_new_session=True,
            )
        return cls(part, seed, process, directory, time.monotonic())

    def result(self) -> Line | None:
        """None while it runs, in its time."""
        seconds = round(time.monotonic() - self.since, 1)
        if self.process.poll() is None and seconds < SECONDS:
            return None
        home = Path(self.directory.name)
        try:
            line = json.loads((home / "said").read_text().splitlines()[-1])
        except (IndexError, ValueError):
            errors = (home / "errors").read_text(errors="replace")[-SHOWN:]
            words = f"its process ended with {self.process.poll()} in {seconds} s: {errors}"
            line = {"cases": 0, "counts": {}, "wrong": [words]}
        # one that dies has no cases, and must not be tried for ever
        line["cases"] = line["cases"] or PARTS[self.part].cases
        self.end()
        where = {"part": self.part, "seed": self.seed, "package": package()}
        return {**where, "seconds": seconds, **line}

    def end(self) -> None:
        with suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.directory.cleanup()


def one_seed(part: str, seed: int) -> Line:
    """What the process of a seed says."""
    try:
        cases, wrong, counts = PARTS[part].run(seed, Path.cwd())
    except BaseException:
        cases, wrong, counts = 0, [traceback.format_exc()[-SHOWN:]], Counter()
    return {"cases": cases, "counts": counts, "wrong": [each[:SHOWN] for each in wrong]}


def git(*words: str) -> str:
    said = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return said.stdout.strip()


def commit() -> str:
    return git("describe", "--always", "--dirty", "--abbrev=12")


def package() -> str:
    """Git's name for what is in `dflash_trt`; empty if that is not what was committed."""
    changed = git("status", "--porcelain", "dflash_trt")
    return "" if changed else git("rev-parse", "--short=12", "HEAD:dflash_trt")


def read_results(results: Path) -> list[Line]:
    """Those of this very package; half a line of a campaign that was killed is none."""
    lines, here = list[Line](), package()
    for text in results.read_text().splitlines() if here and results.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line["package"] == here:
            lines.append(line)
    return lines


def campaign(share: float, parts: list[str], results: Path, *, first: bool = False) -> list[Line]:
    """Runs what is not there yet, whichever part is furthest behind; all results."""
    results.parent.mkdir(parents=True, exist_ok=True)
    lines, at_work = read_results(results), list[AtWork]()

    def behind() -> str | None:
        cases = Counter[str]()
        for line in lines:
            cases[line["part"]] += line["cases"]
        for each in at_work:
            cases[each.part] += PARTS[each.part].cases
        part = min(parts, key=lambda part: cases[part] / PARTS[part].whole)
        return part if cases[part] < share * PARTS[part].whole else None

    with results.open("a") as stream:
        stream.write("\n")  # the last line may be half a one
        try:
            while (part := behind()) or at_work:
                if first and any(line["wrong"] for line in lines):
                    break
                if part and len(at_work) < (os.cpu_count() or 1):
                    taken = {line["seed"] for line in lines if line["part"] == part}
                    taken |= {each.seed for each in at_work if each.part == part}
                    seed = next(seed for seed in range(len(taken) + 1) if seed not in taken)
                    at_work.append(AtWork.begin(part, seed))
                    continue
                time.sleep(0.2)
                for each in [*at_work]:
                    if (line := each.result()) is not None:
                        at_work.remove(each)
                        lines.append(line)
                        print(json.dumps(line), file=stream, flush=True)
                        words = f"{len(line['wrong'])} wrong, {line['seconds']} s"
                        print(f"{each.part} {each.seed}: {line['cases']} cases, {words}")
        finally:
            for each in at_work:
                each.end()
    return lines


def report(lines: list[Line]) -> str:
    from dflash_trt.machine import machine  # noqa: PLC0415

    here = machine()
    text = [
        f"Commit {commit()}, package {package()}, {here['cores']} cores {here['cpu']}",
        "",
        "| part | seeds | cases | of the whole | findings | seconds |",
        "|---|---|---|---|---|---|",
    ]
    details = []
    for part, (_, _, whole) in PARTS.items():
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
