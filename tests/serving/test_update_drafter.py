"""`dflash-trt update-drafter` on the real server, under load: no request lost, no text changed."""

import re
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from dflash_trt.builder.manifest import build_digest
from dflash_trt.builder.opened import OpenedBuild
from dflash_trt.builder.pipeline import build
from dflash_trt.config import BuildConfig
from dflash_trt.decoding import Request
from dflash_trt.errors import ServerError
from dflash_trt.serving.model.engine_loop import RoundsInProcess
from dflash_trt.serving.ports import Ports
from dflash_trt.serving.supervisor import update_drafter
from dflash_trt.speculation import Fixed
from tests.support.builds import edit_weights, quiet
from tests.support.commands import run
from tests.support.equality import scheduler_of
from tests.support.pycode import PYCODE, demo_config, prompt_ids
from tests.support.request_tools import wait_until
from tests.support.servers import serve_ports, serving
from tests.support.transports import Roads

PROMPT, TOKENS = "def main():", 48
MODULE: Any = sys.modules["dflash_trt.serving.supervisor.update_drafter"]  # the function hides it
WAIT = 120.0  # seconds; nothing here should take so long


def build_changed(
    directory: Path, role: str, scale: float, config: BuildConfig | None = None
) -> Path:
    """Build a pair, by default the demo's, with that share of noise in one model's matrices."""
    import torch  # noqa: PLC0415

    changed = shutil.copytree(PYCODE / role, directory / role)

    def change(tensors: dict[str, Any]) -> None:
        torch.manual_seed(0)
        for name, each in tensors.items():
            if each.ndim == 2:
                noise = torch.randn(each.shape) * each.float().std() * scale
                tensors[name] = each + noise.to(each.dtype)

    edit_weights(changed, change)
    config = config or demo_config()
    source = getattr(config, role).model_copy(update={"path": changed})
    build(config.model_copy(update={role: source}), directory / "built", quiet)
    return directory / "built"


@contextmanager
def asking(ports: Ports, count: int) -> Iterator[list[str]]:
    """Collect texts of several clients over every API until the block ends; errors fail."""
    texts, stop = list[str](), threading.Event()

    def client(number: int) -> None:
        roads = Roads(ports)
        ask = roads.all[number % len(roads.all)]
        while not stop.is_set():
            texts.append(ask(PROMPT, TOKENS, None)[0])
        roads.close()

    with ThreadPoolExecutor(count) as pool:
        clients = [pool.submit(client, number) for number in range(count)]
        try:
            yield texts
        finally:
            stop.set()
        for each in clients:
            each.result(WAIT)
    assert len(texts) > count
    assert len({*texts}) == 1


@dataclass
class Served:
    ports: Ports
    builds: dict[str, Path]

    def update(self, build: str, least: float = 0.2) -> str:
        return str(update_drafter(self.ports.http, self.builds[build], least))


@pytest.fixture(
    scope="module", params=["ensemble", pytest.param("in_process", marks=pytest.mark.models)]
)
def served(
    request: pytest.FixtureRequest, built: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    directory, config = tmp_path_factory.mktemp("updates"), demo_config()
    serving_here = config.serving.model_copy(update={"mode": request.param})
    config = config.model_copy(update={"serving": serving_here})
    builds = {
        "a": built,
        "target": build_changed(directory / "target", "target", 0.1, config),
        "drafter": build_changed(directory / "drafter", "drafter", 0.05, config),
        "bad": build_changed(directory / "bad", "drafter", 3.0, config),
    }
    if request.param != "ensemble":
        builds["a"] = build_changed(directory / "a", "drafter", 0.0, config)
    ports = serve_ports()
    with serving(builds["a"], ports) as (process, _):
        yield Served(ports, builds)
        process.terminate()
        process.wait(WAIT)


@pytest.mark.models
def test_a_drafter_is_replaced_under_load_and_a_worse_one_put_back(served: Served) -> None:
    with asking(served.ports, 8) as texts:
        said = served.update("drafter")
        assert re.search(r"built serves: [\d.]+ tokens a round, [\d.]+ before", said)
        with pytest.raises(ServerError, match="tokens a round") as failed:
            served.update("bad", least=0.8)
        found, last = map(float, re.findall(r"[0-9]\.[0-9]+", str(failed.value))[:2])
        assert found < 1.3 < 2 < last
        # the old one is back: the next is measured against it
        assert float(re.findall(r"([\d.]+) before", served.update("a"))[0]) > 2
        count = len(texts)
        wait_until(lambda: len(texts) >= count + 8)
    url = f"http://127.0.0.1:{served.ports.http}"
    swaps = httpx.get(f"{url}/v1/build", trust_env=False).json()["drafter_swaps"]
    digests = [build_digest(served.builds[name]) for name in ("drafter", "a")]
    assert [swap["digest"] for swap in swaps] == digests  # the bad one never served
    metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    assert f'drafter="{digests[-1][:12]}"' in metrics
    out = run("info", "--url", url).out
    assert f"drafter of  pycode {digests[0][:12]}, since 20" in out


@pytest.mark.soak
def test_twenty_updates_under_load(served: Served) -> None:
    with asking(served.ports, 8):
        for number in range(20):
            if number % 5 == 4:
                with pytest.raises(ServerError, match="tokens a round"):
                    served.update("bad", least=0.8)
            else:
                assert "serves" in served.update(("drafter", "a")[number % 2])
        served.update("a", least=0.0)


def test_in_process_it_is_replaced_between_two_rounds(built: Path) -> None:
    engines, prompt = built / "engines", prompt_ids(1)[0]
    rounds = RoundsInProcess(engines)
    scheduler = scheduler_of(rounds, Fixed(7), slots=2, max_seq_len=256)
    old = scheduler.submit(Request(prompt, TOKENS))
    for _ in range(4):
        scheduler.step()
    drafts = old.drafted
    rounds.load_drafter(engines / "drafter")
    old.lose_drafter()
    new = scheduler.submit(Request(prompt, TOKENS))
    while scheduler.has_work:
        scheduler.step()
    assert old.tokens == new.tokens
    assert old.drafted == drafts > 0
    assert new.acceptance_length > 2


def test_what_cannot_be_taken_is_said(served: Served, tmp_path: Path) -> None:
    served.builds["none"] = tmp_path
    with pytest.raises(ServerError, match="not a directory that `dflash-trt build` made"):
        served.update("none")
    with pytest.raises(ServerError, match=r"differs from .* in more than the drafter's weights"):
        served.update("target")
    with pytest.raises(ServerError, match=r"no `dflash-trt serve` of yours has HTTP port 1\."):
        update_drafter(1, served.builds["a"], 0.8)


def test_memory_is_looked_at_before_anything_is_loaded(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "free_memory", lambda: 1000)
    never = Mock(side_effect=AssertionError)
    server: Any = Mock(build=OpenedBuild(built, "none"), load_drafter=never)
    ports = serve_ports()
    with ExitStack() as stack:
        stack.callback(MODULE.Updates(server, ports.http, lambda line: None, "none", None).close)
        with pytest.raises(ServerError, match="GB of memory"):
            update_drafter(ports.http, built, 0.0)
    assert not server.triton.method_calls


def test_the_command_says_what_it_lacks(built: Path) -> None:
    code, out, err = run("update-drafter", str(built), "--http-port=1")
    assert (code, out) == (1, "")
    assert err.startswith("note: this drafter serves until `serve` ends")
    assert "no `dflash-trt serve` of yours has HTTP port 1." in err
