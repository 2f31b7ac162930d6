"""What a request may ask for, through the real server, in both modes."""

import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer
from tritonclient.grpc import InferenceServerClient

from dflash_trt.builder.pipeline import build
from dflash_trt.config import BuildConfig
from dflash_trt.serving.client import Client
from dflash_trt.serving.ports import Ports
from dflash_trt.serving.supervisor.run import running_server
from tests.support import reference
from tests.support.llm_build import standins, write_llm_build
from tests.support.pairs import Pair
from tests.support.request_tools import tensors, wait_until
from tests.support.servers import serve_ports, serving

PROMPT, NEW_TOKENS = "def f(x):", 40
SLOTS, WAIT = 10, 60.0


@pytest.fixture(scope="module")
def target(endless: Pair) -> Path:
    return endless.target_dir


@pytest.fixture(
    scope="module",
    params=["ensemble", "in_process", pytest.param("tensorrt_llm", marks=pytest.mark.models)],
)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(mode: str, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    built = tmp_path_factory.mktemp("options") / mode
    if mode == "tensorrt_llm":
        args = {"max_batch_size": SLOTS, "max_seq_len": 256}
        args |= {"speculative_config": {"max_draft_len": 7, "enable_penalty": True}}
        with standins(), running_server(write_llm_build(built, target.parent, args)) as ports:
            yield ports
        return
    config = BuildConfig(
        name="options",
        target={"path": target},
        drafter={"path": target.parent / "drafter"},
        engine={"threads": 1},
        serving={"mode": mode, "slots": SLOTS, "max_seq_len": 256, "prefill_chunk": 16},
    )
    build(config, built, lambda step, done, total: None)
    with running_server(built) as ports:
        yield ports


@pytest.fixture(scope="module")
def tokenizer(target: Path) -> Tokenizer:
    return Tokenizer.from_file(str(target / "tokenizer.json"))


@pytest.fixture(scope="module")
def greedy(target: Path, tokenizer: Tokenizer) -> list[int]:
    return reference.greedy(target, [tokenizer.encode(PROMPT).ids], NEW_TOKENS)[0]


def ask(server: Ports, model: str = "dflash", **body: Any) -> dict[str, Any]:
    body = {"max_tokens": NEW_TOKENS, **body}
    if "messages" not in body:
        body.setdefault("text_input", PROMPT)
    url = f"http://127.0.0.1:{server.http}/v2/models/{model}/generate"
    return httpx.post(url, json=body, timeout=WAIT).raise_for_status().json()


def test_one_seed_one_text_whatever_else_runs(server: Ports, mode: str) -> None:
    values = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}
    if mode != "tensorrt_llm":
        values["min_p"] = 0.01
    alone = ask(server, seed=7, **values)["text_output"]

    def other(number: int) -> str:
        drawing = {"seed": number, "temperature": 1.2} if number % 2 else {}
        return ask(server, text_input="abc" * number, **drawing)["text_output"]

    with ThreadPoolExecutor(2 * SLOTS) as pool:
        others = [pool.submit(other, number) for number in range(1, 2 * SLOTS)]
        among = [pool.submit(ask, server, seed=7, **values) for _ in range(4)]
        assert {each.result()["text_output"] for each in among} == {alone}
        assert all(each.result() for each in others)
    assert ask(server, seed=8, **values)["text_output"] != alone
    unseeded = {ask(server, **values)["text_output"] for _ in range(3)}
    assert len(unseeded) > 1, "without a seed every text is another one"


def test_rules_give_transformers_text(
    server: Ports, mode: str, target: Path, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(PROMPT).ids
    model = reference.load_target(target)
    bad = tokenizer.id_to_token(reference.greedy(target, [ids], 2)[0][1])
    words = [tokenizer.decode([tokenizer.token_to_id(bad)])] if mode != "tensorrt_llm" else []
    with torch.inference_mode():
        expected = model.generate(
            torch.tensor([ids]),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            repetition_penalty=1.4,
            bad_words_ids=[tokenizer.encode(w, add_special_tokens=False).ids for w in words]
            or None,
            pad_token_id=0,
        )[0, len(ids) :].tolist()
    assert ask(server, repetition_penalty=1.4, bad_words=words)["token_ids"] == expected


@pytest.mark.parametrize("model", ["dflash", "dflash_infer"])
def test_a_stop_word_is_never_given_out(
    model: str, server: Ports, greedy: list[int], tokenizer: Tokenizer
) -> None:
    text = tokenizer.decode(greedy)
    word = text[len(text) // 2 : len(text) // 2 + 3]
    answer = ask(server, model, stop_words=["never", word])
    assert answer["text_output"] == text[: text.index(word)]
    assert answer["finish_reason"] == "stop"
    count = answer["completion_tokens"]
    assert answer["token_ids"] == greedy[:count]
    assert word in tokenizer.decode(greedy[:count])
    assert word not in tokenizer.decode(greedy[: count - 1])


def test_several_choices(server: Ports, greedy: list[int]) -> None:
    answer = ask(server, n=3)
    assert answer["index"] == [0, 1, 2]
    assert answer["token_ids"] == greedy * 3
    assert answer["finish_reason"] == ["length"] * 3
    drawn = ask(server, n=3, temperature=1.0, seed=5)
    assert len(set(drawn["text_output"])) == 3
    # choice i is what seed + i gives alone
    assert drawn["text_output"][2] == ask(server, temperature=1.0, seed=7)["text_output"]


@pytest.mark.parametrize("model", ["dflash", "dflash_infer"])
def test_a_deadline(model: str, server: Ports) -> None:
    """It is Triton's request timeout; the text so far comes back, and the slot is free again."""
    inputs = tensors({"text_input": "a", "max_tokens": 250})
    reasons: list[str] = []
    # 0.2 ms are less than 250 tokens take, in either mode
    with InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        if model == "dflash_infer":
            result = client.infer(model, inputs, timeout=200, client_timeout=WAIT)
            reasons.append(result.as_numpy("finish_reason")[0].decode())
        else:
            client.start_stream(
                lambda result, error: reasons.append(
                    error or result.as_numpy("finish_reason")[0].decode()
                )
            )
            client.async_stream_infer(model, inputs, timeout=200)
            wait_until(lambda: reasons)
            client.stop_stream()
    assert reasons == ["cancelled"]
    assert settled(server)["trtllm_num_requests_running"] == 0


@pytest.mark.parametrize("model", ["dflash", "dflash_infer"])
def test_a_deadline_over_http(model: str, server: Ports) -> None:
    """The generate endpoint makes a parameter of a field that is no tensor."""
    answer = ask(server, model, max_tokens=240, timeout=200)
    assert answer["finish_reason"] == "cancelled"
    assert answer["completion_tokens"] < 240


def test_a_cancelled_infer_frees_its_row(server: Ports) -> None:
    calls, most = 12, 250
    inputs = tensors({"text_input": "a", "max_tokens": most})
    before = settled(server)
    answers: list[Any] = []
    with InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        running = [
            client.async_infer(
                "dflash_infer", inputs, callback=lambda result, error: answers.append(error)
            )
            for _ in range(calls)
        ]
        time.sleep(0.03)
        for call in running:
            call.cancel()
        after = settled(server)
    assert len(answers) == calls
    assert after["trtllm_num_requests_running"] == 0
    generated = after["trtllm_generation_tokens_total"] - before["trtllm_generation_tokens_total"]
    assert generated < calls * most


def settled(server: Ports) -> dict[str, float]:
    """Return the front's metrics, summed over labels, once they stop changing."""
    url, previous = f"http://127.0.0.1:{server.metrics}/metrics", None
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        values: dict[str, float] = {}
        for line in httpx.get(url, timeout=WAIT).text.splitlines():
            if found := re.match(r"((?:trtllm|dflash)_\w+)(?:\{.*\})? (\S+)$", line):
                values[found[1]] = values.get(found[1], 0.0) + float(found[2])
        if values == previous:
            return values
        previous = values
        time.sleep(1.2)  # they are sent once a second
    raise AssertionError("the metrics do not come to rest")


def test_metrics_say_what_the_answers_say(server: Ports, mode: str) -> None:
    before = settled(server)
    answers = [ask(server, text_input="x" * n, max_tokens=9 * n) for n in (1, 2, 3)]
    after = settled(server)
    for key, name in {
        "drafted": "trtllm_spec_decode_num_draft_tokens_total",
        "accepted": "trtllm_spec_decode_num_accepted_tokens_total",
        "rounds": "dflash_acceptance_length_count",
        "completion_tokens": "trtllm_generation_tokens_total",
        "prompt_tokens": "trtllm_prompt_tokens_total",
    }.items():
        assert after[name] - before[name] == sum(answer[key] for answer in answers), name
    assert after["dflash_requests_total"] - before["dflash_requests_total"] == 3
    assert after["trtllm_num_requests_running"] == 0
    assert after.get("dflash_kv_rows_used") == (None if mode == "tensorrt_llm" else 0)


def test_a_path_with_a_space_is_served(built: Path, tmp_path: Path) -> None:
    spaced = Path(shutil.copytree(built, tmp_path / "with a space"))
    ports = serve_ports()
    with serving(spaced, ports), Client(f"127.0.0.1:{ports.grpc}") as client:
        assert client.generate("def", max_tokens=4).text
