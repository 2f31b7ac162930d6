"""Everything that can go wrong at once, on `dflash-trt serve`: then it answers as before.

Clients over every road; some cancel, some have no time, some are hostile; a model's process is
killed. Who gets a whole answer gets the target's own text.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import httpx
import pytest
from hypothesis import given, seed, settings
from tokenizers import Tokenizer
from tritonclient.grpc import service_pb2_grpc

from dflash_trt.builder.pipeline import build
from dflash_trt.config.build import Speculation
from dflash_trt.decoding import check_lossless
from dflash_trt.errors import DflashError
from dflash_trt.serving.ports import Ports
from tests.support import malformed_http, strategies
from tests.support.processes import processes_naming
from tests.support.pycode import demo_config, prompt_ids, prompt_texts
from tests.support.request_tools import WAIT, metric
from tests.support.servers import serve_ports, serving
from tests.support.transports import RefusedError, Roads

pytestmark = pytest.mark.soak

SLOTS, MAX_QUEUE, CLIENTS, LONGEST, HOSTILE = 8, 16, 24, 60, 400
ENOUGH = {"right": 400, "cancelled": 100, "late": 30, "refused": 20}
LASTS = 900.0  # seconds in which all of that must have happened
IDLE = ("trtllm_num_requests_running", "trtllm_num_requests_waiting", "dflash_kv_rows_used")


class Soak:
    """Concurrent load that lasts until all of it has happened."""

    def __init__(self, built: Path, ports: Ports, said: list[str]) -> None:
        self.built, self.ports, self.said = built, ports, said
        tokenizer = Tokenizer.from_file(str(built / "tokenizer" / "tokenizer.json"))
        prompts = prompt_ids(24)
        report = check_lossless(built / "engines", prompts, LONGEST, Speculation(), lambda _: None)
        assert report.identical == report.total
        self.texts = {
            prompt: [tokenizer.decode(tokens[:count]) for count in range(LONGEST + 1)]
            for prompt, tokens in zip(prompt_texts(24), report.outputs, strict=True)
        }
        self.came, self.wrong = Counter[str](), list[str]()
        self.outage = threading.Event()  # from when a process is killed until all is well again
        self.over = threading.Event()

    def run(self, *, kill: str = "") -> None:
        """Run the load; kill: the model whose process is killed during hostile requests."""
        tasks = [lambda i=i: self.client(i) for i in range(CLIENTS)]
        tasks += [self.hostile, self.http] if kill else []
        enough = ENOUGH | ({"hostile": HOSTILE} if kill else {})
        with ThreadPoolExecutor(len(tasks)) as pool:
            running = [pool.submit(each) for each in tasks]
            try:
                if kill:
                    self.wait(lambda: self.came["right"] > ENOUGH["right"] / 4)
                    self.kill(kill)
                self.wait(lambda: all(self.came[what] >= n for what, n in enough.items()))
            finally:
                self.over.set()
            for each in running:
                each.result(2 * WAIT)
        assert not self.wrong, self.wrong[:3]

    def wait(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LASTS
        while not done():
            assert not self.wrong, self.wrong[:3]
            assert time.monotonic() < deadline, self.came
            time.sleep(0.1)

    def kill(self, model: str) -> None:
        script = self.built / "model_repository" / model / "1" / "model.py"
        found = [pid for pid in processes_naming(str(script)) if pid != os.getpid()]
        self.outage.set()
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait(lambda: any("ready again" in line for line in self.said))
        time.sleep(5)  # in which every client has connected again
        before = self.came["right"]
        self.wait(lambda: self.came["right"] > before + 2 * CLIENTS)
        self.outage.clear()

    def client(self, number: int) -> None:
        """Ask, sometimes with too little time; complete texts must be right."""
        dice, roads = random.Random(number), Roads(self.ports)
        while not self.over.is_set():
            prompt, count = dice.choice([*self.texts]), dice.randrange(1, LONGEST + 1)
            late = dice.choice([0.001, 0.02, 0.2]) if dice.random() < 0.15 else None
            begun_in_outage = self.outage.is_set()
            try:
                if dice.random() < 0.25:
                    self.leave(roads, prompt)
                    continue
                text, reason = dice.choice(roads.all)(prompt, count, late)
            except (DflashError, RefusedError, httpx.TransportError, Exception) as error:
                self.excuse(error, late, begun_in_outage)
                continue
            cut = late is not None and reason == "cancelled"
            right = any(text == each for each in self.texts[prompt][: count + 1])
            if not (right if cut else text == self.texts[prompt][count]):
                self.wrong.append(f"{prompt!r}, {count} tokens: {text!r} ({reason})")
            self.came["late" if cut else "right"] += 1
        roads.close()

    def leave(self, roads: Roads, prompt: str) -> None:
        stream = roads.client.stream(prompt, max_tokens=LONGEST, ignore_eos=True)
        next(stream)
        stream.close()
        self.came["cancelled"] += 1

    def excuse(self, error: Exception, late: float | None, in_outage: bool) -> None:
        """Accept any error while a process is replaced, else only a full queue or lateness."""
        words = str(error)
        if "queue is full" in words or "it is full" in words:
            self.came["refused"] += 1
            time.sleep(0.1)
        elif late is not None and ("deadline" in words.lower() or "time" in words.lower()):
            self.came["late"] += 1
        elif in_outage or self.outage.is_set():
            self.came["outage"] += 1
            time.sleep(0.2)
        else:
            self.wrong.append(f"{type(error).__name__}: {words}")
        if "Traceback" in words or str(self.built) in words:
            self.wrong.append(f"tells of its inside: {words}")

    def hostile(self) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{self.ports.grpc}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

            @seed(0)
            @settings(strategies.EACH_ONCE, max_examples=HOSTILE)
            @given(strategies.hostile_over_grpc)
            def one(request: strategies.Request) -> None:
                answer = strategies.send(request, stub)
                self.came["hostile"] += 1
                if "Traceback" in answer.message or ".py" in answer.message:
                    self.wrong.append(answer.message)

            one()

    def http(self) -> None:
        for number in range(HOSTILE):
            if self.over.is_set():
                break
            wrong = malformed_http.request(1, number)
            outcome = malformed_http.send(wrong, self.ports.http)
            if fault := malformed_http.fault(wrong, outcome, WAIT):
                self.wrong.append(f"{number}: {fault}")


def goes_idle(ports: Ports) -> None:
    deadline = time.monotonic() + WAIT
    while state := {name: n for name in IDLE if (n := sum(metric(ports.metrics, name).values()))}:
        assert time.monotonic() < deadline, state
        time.sleep(0.2)


def resident(built: Path) -> int:
    pages = 0
    for pid in processes_naming(str(built / "model_repository")):
        with suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


@contextmanager
def soaked(directory: Path, mode: str) -> Iterator[tuple[Path, Ports, list[str]]]:
    config = demo_config()
    options = {"mode": mode, "slots": SLOTS, "max_queue": MAX_QUEUE}
    serving_ = config.serving.model_copy(update=options)
    built = directory / "built"
    build(config.model_copy(update={"serving": serving_}), built, lambda *_: None)
    ports = serve_ports()
    with serving(built, ports) as (process, _):
        threading.Thread(target=process.stderr.read, daemon=True).start()  # type: ignore[union-attr]
        said = list[str]()
        reader = threading.Thread(target=lambda: said.extend(process.stdout or ()), daemon=True)
        reader.start()
        try:
            yield built, ports, said
        except BaseException:
            print(*said, sep="")
            raise
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT) == 0, said
        reader.join(WAIT)
        assert sum("restarting" in line for line in said) <= 1, said


@pytest.mark.parametrize("mode", ["ensemble", "in_process"])
def test_it_answers_as_before(mode: str, tmp_path: Path) -> None:
    with soaked(tmp_path, mode) as (built, ports, said):
        Soak(built, ports, said).run(kill="draft" if mode == "ensemble" else "dflash")
        goes_idle(ports)
        held = []
        for _ in range(3):
            soak = Soak(built, ports, said)
            soak.run()
            goes_idle(ports)
            held.append(resident(built))
        print(dict(soak.came), held)
        assert held[-1] < 1.1 * held[0]  # what was bound and kept is there after the first
