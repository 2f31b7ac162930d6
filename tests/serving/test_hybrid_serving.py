"""A hybrid behind the real Triton server, in both modes: 64 streams, and chats of six turns."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dflash_trt.builder.pipeline import build
from dflash_trt.serving.client import Client
from dflash_trt.serving.ports import Ports
from dflash_trt.serving.supervisor.run import running_server
from tests.support import families, reference
from tests.support.builds import config_of
from tests.support.pairs import Pair, make_endless, teach

pytestmark = pytest.mark.models

STREAMS, NEW_TOKENS, TURNS = 64, 24, 6
SERVING = {"slots": 16, "max_queue": 64, "max_seq_len": 256, "prefill_chunk": 24}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pair = families.make("qwen3.5", tmp_path_factory.mktemp("hybrid"))
    teach(pair)
    make_endless(pair)
    return pair


@pytest.fixture(scope="module", params=["ensemble", "in_process"])
def server(
    request: pytest.FixtureRequest, pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ports]:
    directory = tmp_path_factory.mktemp(request.param) / "built"
    serving = SERVING | {"mode": request.param}
    # fixed: the adaptive policy keeps states for those who draft only while it drafts itself
    always = {"policy": "fixed"}
    config = config_of(
        pair.target_dir.parent, serving=serving, engine={"threads": 1}, speculation=always
    )
    build(config, directory, lambda *_: None)
    with running_server(directory) as ports:
        yield ports


def tokens_of(client: Client, prompt: list[int], **options: object) -> list[int]:
    chunks = [*client.stream(prompt, **{"temperature": 0.0} | options)]
    return [token for chunk in chunks for token in chunk.token_ids]


def test_64_streams_are_each_the_targets_own_text(server: Ports, pair: Pair) -> None:
    dice = np.random.default_rng(0)
    prompts = [dice.integers(300, size=n % 40 + 1).tolist() for n in range(STREAMS)]
    expected = reference.greedy(pair.target_dir, prompts, NEW_TOKENS)
    with Client(f"127.0.0.1:{server.grpc}") as client, ThreadPoolExecutor(STREAMS) as pool:
        found = pool.map(lambda each: tokens_of(client, each, max_tokens=NEW_TOKENS), prompts)
        assert [*found] == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_chat_says_the_same_whether_its_state_was_kept(server: Ports, temperature: float) -> None:
    """A turn of another salt computes what the chat has kept."""
    reused = []
    with Client(f"127.0.0.1:{server.grpc}") as client:
        text, dice = [*range(60, 83)], np.random.default_rng(7)
        for turn in range(TURNS):
            options = {"max_tokens": 12, "temperature": temperature, "seed": turn}
            answers = []
            for salt in ("chat", f"alone {turn} {temperature}"):
                (*_, last) = chunks = [*client.stream(text, cache_salt=salt, **options)]
                answers.append([token for chunk in chunks for token in chunk.token_ids])
                reused.append(last.cached_tokens)
            assert answers[0] == answers[1]
            text = [*text, *answers[0], *dice.integers(300, size=5 + turn).tolist()]
    assert reused[1::2] == [0] * TURNS
    assert all(count > 20 for count in reused[2::2]), reused
