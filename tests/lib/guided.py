"""Mutations that follow coverage: libFuzzer (`atheris`) over the files and readers of `fuzz_files`.

A seed mutates one kind of file. What reaches new lines of the package is kept in
`build/prove/corpus`, which begins as `tests/samples/corpus.tar.xz`; `guided.py pack`
writes that anew.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKED, CORPUS = ROOT / "tests/samples/corpus.tar.xz", ROOT / "build/prove/corpus"
RUNS = 2000  # of a seed
OWN = 0.6  # share of mutations that are `fuzz_files`' own, which know the format


def run(seed: int, directory: Path) -> tuple[int, list[str], Counter[str]]:
    home, report = directory / "home", directory / "report"
    home.mkdir()
    fuzz_files = Path(__file__).with_name("fuzz_files.py")
    command = [sys.executable, str(fuzz_files), "prepare", str(home)]
    subprocess.run(command, check=True, capture_output=True)
    line = [sys.executable, __file__, "work", str(home), str(seed), str(report)]
    done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    found = json.loads(report.read_text()) if report.exists() else {"wrong": [], "counts": {}}
    if done.returncode:
        said = done.stderr.decode(errors="replace")[-1000:]
        found["wrong"].append(f"the process ended with {done.returncode}: {said}")
    return RUNS, found["wrong"], Counter(found["counts"])


def folder_of(name: str) -> str:
    return name.replace("/", "_")


def unpacked(name: str) -> Path:
    """The directory with the kept files of a kind."""
    corpus = CORPUS / folder_of(name)
    if not corpus.is_dir():
        corpus.mkdir(parents=True)
        for unit, data in kept()[corpus.name]:
            (corpus / unit).write_bytes(data)
    return corpus


def kept() -> dict[str, list[tuple[str, bytes]]]:
    """Name and content of each kept file, by the folder of its kind."""
    found = defaultdict[str, list[tuple[str, bytes]]](list)
    with tarfile.open(PACKED) as packed:
        for each in packed:
            if file := packed.extractfile(each):
                where = Path(each.name)
                found[where.parent.name].append((where.name, file.read()))
    return found


def pack() -> None:
    """Without times and owners, so that the same files make the same archive."""
    with tarfile.open(PACKED, "w:xz", preset=9) as packed:
        for unit in sorted(each for each in CORPUS.rglob("*") if each.is_file()):
            where = tarfile.TarInfo(str(unit.relative_to(CORPUS)))
            where.size = unit.stat().st_size
            with unit.open("rb") as data:
                packed.addfile(where, data)


def work(home: Path, seed: int, report: Path) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris  # noqa: PLC0415

    with atheris.instrument_imports(include=["dflash_trt", "gguf"]):
        import fuzz_files  # noqa: PLC0415

    signal.signal(signal.SIGALRM, fuzz_files.hung)
    fuzzer = fuzz_files.Fuzzer(home)
    name = sorted(fuzzer.kinds)[seed % len(fuzzer.kinds)]
    spoil, corpus = fuzzer.kinds[name][0], unpacked(name)
    sound = (home / (name + ".kept" * (name in fuzzer.optional))).read_bytes()
    (corpus / unit_of(sound)).write_bytes(sound)
    before, runs = len([*corpus.iterdir()]), 0

    def mutated(data: bytes, longest: int, dice: int) -> bytes:
        chance = random.Random(dice)
        if chance.random() < OWN:
            with suppress(ValueError, RecursionError):  # it is no JSON any more
                return spoil(chance.choice([data or sound, sound]), chance)[:longest]
        return bytes(atheris.Mutate(data, longest))

    def one(data: bytes) -> None:
        nonlocal runs
        runs += 1
        faults = len(fuzzer.unexpected)
        put = lambda file, _: file.write_bytes(data)  # noqa: E731
        fuzzer.spoilt(f"{unit_of(data)} {name}", name, random.Random(0), put)
        if len(fuzzer.unexpected) > faults:
            (corpus / unit_of(data)).write_bytes(data)
        if runs % 50 == 0 or len(fuzzer.unexpected) > faults:
            counts = {f"{name} {how}": count for how, count in fuzzer.came[name].items()}
            counts[f"{name} kept"] = len([*corpus.iterdir()]) - before
            report.write_text(json.dumps({"wrong": fuzzer.unexpected, "counts": counts}))

    limits = [f"-runs={RUNS}", f"-seed={seed + 1}", f"-max_len={2 * len(sound) + 1000}"]
    options = [*limits, "-use_counters=0", "-rss_limit_mb=8192", "-timeout=60"]
    atheris.Setup([name, *options, str(corpus)], one, custom_mutator=mutated)
    atheris.Fuzz()


def replay(home: Path, report: Path) -> None:
    """Every kept file through its readers."""
    import fuzz_files  # noqa: PLC0415

    signal.signal(signal.SIGALRM, fuzz_files.hung)
    fuzzer, files = fuzz_files.Fuzzer(home), kept()
    for name in fuzzer.kinds:
        for unit, data in files[folder_of(name)]:
            put = lambda file, _, data=data: file.write_bytes(data)  # noqa: E731
            fuzzer.spoilt(f"{unit} {name}", name, random.Random(0), put)
    report.write_text(json.dumps({"wrong": fuzzer.unexpected, "came": fuzzer.came}))


def unit_of(data: bytes) -> str:
    """Its name in the corpus, libFuzzer's."""
    return hashlib.sha1(data).hexdigest()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    how, *words = sys.argv[1:]
    if how == "pack":
        pack()
    elif how == "replay":
        replay(*map(Path, words))
    else:
        home, seed, report = words
        work(Path(home), int(seed), Path(report))
