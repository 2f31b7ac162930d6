"""New drafters, cancels and grammars that fail beside 32 streams: texts and memory stay.

SWAPS_MINUTES: how long, by default ten minutes. Every whole text is the target's alone, and a
cancelled one its beginning. No request ends in an error: `FeatureBuffer` asserts after each round
that no slot's features exceed their bound, which would end a round's texts.
"""

import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from dflash_trt.builder.pipeline import build
from dflash_trt.config.build import Speculation
from dflash_trt.decoding import check_lossless
from dflash_trt.engines import most_buffered, read_info
from dflash_trt.errors import ServerError
from dflash_trt.serving.ports import Ports
from dflash_trt.serving.supervisor import update_drafter
from tests.serving.test_update_drafter import build_changed
from tests.support.builds import quiet
from tests.support.processes import command_line, status_of, tree
from tests.support.pycode import demo_config, prompt_ids, prompt_texts
from tests.support.request_tools import WAIT
from tests.support.servers import serve_ports, serving
from tests.support.transports import Roads

pytestmark = pytest.mark.soak

SECONDS = 60 * float(os.environ.get("SWAPS_MINUTES", "10"))
WARM_UP = SECONDS / 5  # in which memory grows that is kept for later
# of a process's memory, from the first third of the time after that to the last
GROWTH = 1.1
GROWN = 32 * 2**20  # bytes: tritonserver's heap is small, and updates under load fragment it
STREAMS, SLOTS = 32, 36  # the rest is for grammars and updates
PROMPTS, LONGEST = 4, 640  # a text without drafts is longer than the bound of its features
PAUSE = 10.0  # seconds between two updates, and between two looks at memory
PATIENCE = 10 * WAIT  # seconds for a whole text
PADDING = "a" * 50_000  # of a grammar, to be seen in memory if it is kept
MODEL = re.compile(r"/(\w+)/1/model\.py")
SCHEMA = {"type": "integer", "minimum": 10, "maximum": 99}

Memory = dict[str, int]  # bytes by process


@dataclass
class Load:
    """What runs until `over` is set, and what came of it."""

    ports: Ports
    texts: dict[str, list[str]]  # of each prompt: the target's, of 0, 1, .. tokens
    over: threading.Event = field(default_factory=threading.Event)
    came: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def stream(self, number: int) -> None:
        dice, roads = random.Random(number), Roads(self.ports)
        streams = (roads.stream, roads.http_stream, roads.completion_stream)
        while not self.over.is_set():
            prompt, count = dice.choice([*self.texts]), dice.randrange(1, LONGEST + 1)
            if dice.random() < 0.25:
                self._cancel(roads, prompt, dice.randrange(1, 100))
                continue
            text, _ = dice.choice(streams)(prompt, count, PATIENCE)
            self._compare(prompt, count, text == self.texts[prompt][count], text)
            self.came["whole"] += 1
        roads.close()

    def _cancel(self, roads: Roads, prompt: str, chunks: int) -> None:
        stream = roads.client.stream(
            prompt, max_tokens=LONGEST, timeout=PATIENCE, ignore_eos=True, temperature=0.0
        )
        text = "".join(chunk.text for chunk, _ in zip(stream, range(chunks), strict=False))
        stream.close()
        self._compare(prompt, LONGEST, self.texts[prompt][LONGEST].startswith(text), text)
        self.came["cancelled"] += 1

    def _compare(self, prompt: str, count: int, is_right: bool, text: str) -> None:
        if not is_right:
            self.wrong.append(f"{prompt!r}, {count} tokens: {text!r}")

    def grammars(self) -> None:
        """Send grammars that are refused, each in its turn one that no other request had."""
        with httpx.Client(base_url=f"http://127.0.0.1:{self.ports.http}", timeout=WAIT) as http:
            for number in range(10**9):
                if self.over.is_set():
                    return
                for fields in _refused(number % 50):
                    answer = _complete(http, **fields)
                    if answer.status_code != 400:
                        self.wrong.append(f"{[*fields]}: {answer.status_code} {answer.text[:200]}")
                    self.came["refused"] += 1
                answer = _complete(http, guided_json=SCHEMA)
                if not re.fullmatch("[1-9][0-9]", answer.json()["choices"][0]["text"]):
                    self.wrong.append(answer.text[:200])
                self.over.wait(0.1)

    def updates(self, builds: list[Path], worse: Path) -> None:
        """Put the builds' drafters in turn; each fifth time one that is put back."""
        number = 0
        while not self.over.wait(PAUSE):
            number += 1
            if number % 5 == 0:
                with pytest.raises(ServerError, match="tokens a round"):
                    update_drafter(self.ports.http, worse, 0.8)
                self.came["put back"] += 1
            else:
                update_drafter(self.ports.http, builds[number % len(builds)], 0.2)
                self.came["updated"] += 1


def _refused(number: int) -> list[dict[str, Any]]:
    return [
        {"guided_regex": f"(a{number}"},
        {"guided_json": {"type": "x", "title": f"{number}{PADDING}"}},
        {"guided_json": {"not": {}, "title": f"{number}{PADDING}"}},
        {"guided_grammar": f"start: x{number} // {PADDING}"},
    ]


def _complete(http: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": "dflash", "prompt": "def main():", "max_tokens": 16, **fields}
    return http.post("/v1/completions", json=body)


def _memory(serve: int) -> Memory:
    """Return what each process of a `serve` holds, which an update has more of for a moment."""
    memory: Memory = {}
    for pid in tree(serve):
        words = command_line(pid)
        model = MODEL.search(" ".join(words))
        name = model[1] if model else " ".join([Path(words[0]).name, *words[1:3]])[:50]
        kilobytes = status_of(pid).get("VmRSS", "0 kB").split()[0]
        memory[name] = memory.get(name, 0) + 1024 * int(kilobytes)
    return memory


def _texts_of_target(built: Path) -> dict[str, list[str]]:
    tokenizer = Tokenizer.from_file(str(built / "tokenizer" / "tokenizer.json"))
    prompts = prompt_ids(PROMPTS)
    report = check_lossless(built / "engines", prompts, LONGEST, Speculation(), lambda _: None)
    assert report.identical == report.total
    return {
        prompt: [tokenizer.decode(tokens[:count]) for count in range(LONGEST + 1)]
        for prompt, tokens in zip(prompt_texts(PROMPTS), report.outputs, strict=True)
    }


@contextmanager
def _served(built: Path, ports: Ports) -> Iterator[int]:
    """Run `serve`; yield its process id, and see that it ends well and has restarted nothing."""
    with serving(built, ports) as (process, begun):
        try:
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=WAIT)
            print(begun, out)
        assert process.returncode == 0
        assert "starting another" not in out
        assert "restarting" not in out


def test_texts_memory_and_features_stay(tmp_path: Path) -> None:
    config = demo_config()
    serving_ = config.serving.model_copy(update={"slots": SLOTS})
    config = config.model_copy(update={"serving": serving_})
    first = tmp_path / "built"
    build(config, first, quiet)
    other = build_changed(tmp_path / "other", "drafter", 0.05, config)
    worse = build_changed(tmp_path / "worse", "drafter", 3.0, config)
    assert most_buffered(read_info(first / "engines" / "drafter").block_size) < LONGEST
    ports = serve_ports()
    load = Load(ports, _texts_of_target(first))
    noted: list[Memory] = []
    with _served(first, ports) as serve, ThreadPoolExecutor(STREAMS + 2) as pool:
        begun = time.monotonic()
        tasks = [partial(load.stream, number) for number in range(STREAMS)]
        tasks += [load.grammars, partial(load.updates, [first, other], worse)]
        running = [pool.submit(task) for task in tasks]
        while time.monotonic() < begun + SECONDS and not any(task.done() for task in running):
            time.sleep(PAUSE)
            if time.monotonic() > begun + WARM_UP:
                noted.append(_memory(serve))
        load.over.set()
        for task in running:
            task.result(PATIENCE)
    print(dict(load.came), *noted, sep="\n")
    assert not load.wrong, load.wrong[:3]
    assert min(load.came[what] for what in ("whole", "cancelled", "refused", "updated")) > 0
    _assert_flat(noted)


def _assert_flat(memories: list[Memory]) -> None:
    """Compare the first third with the last, each process with itself."""
    third = max(1, len(memories) // 3)
    for name in set.intersection(*map(set, memories)):
        before, after = (
            median(memory[name] for memory in part)
            for part in (memories[:third], memories[-third:])
        )
        limit = max(GROWTH * before, before + GROWN)
        assert after < limit, f"{name} grew from {before} to {after} bytes"
