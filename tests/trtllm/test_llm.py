"""TensorRT-LLM as the front's decoder: what differs from our own rounds. Over the stand-in."""

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from dflash_trt.checkpoints import load_tokenizer
from dflash_trt.errors import BuildError
from dflash_trt.serving.answer import Chunk
from dflash_trt.serving.client import Client
from dflash_trt.serving.model.llm import MPI_JOB, TensorRTLLM, limits
from dflash_trt.serving.model.metrics import Metrics
from dflash_trt.serving.model.request_handler import RequestHandler
from dflash_trt.tensorrt_llm.bundle import read_llm_args
from dflash_trt.wire import Settings
from tests.support.handlers import FakeReply, Response
from tests.support.llm_build import STANDINS, standins, write_llm_build
from tests.support.request_tools import wait_until
from tests.support.servers import serve_ports, serving
from tests.support.triton_metrics import Triton

PAIR = Path(__file__).parents[2] / "examples" / "pycode"
ARGS: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 512}
WAIT = 30.0


class Reply(FakeReply):
    def send(self, chunks: Sequence[Chunk], *, last: bool) -> None:
        self.got.put(Response(chunks))

    def parts(self) -> list[Response]:
        found = [self.got.get(timeout=WAIT)]
        while isinstance(found[-1], Response) and found[-1].finish_reason[0] in ("", "error"):
            found.append(self.got.get(timeout=WAIT))
        return found


@pytest.fixture
def tensorrt_llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(STANDINS)
    import tensorrt_llm  # noqa: PLC0415

    yield tensorrt_llm
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@contextmanager
def _front(
    directory: Path, args: dict[str, Any], **serving: Any
) -> Iterator[tuple[RequestHandler, TensorRTLLM, Triton]]:
    build = write_llm_build(directory / "build", PAIR, {**ARGS, **args}, **serving)
    args, triton = read_llm_args(build / "engines" / "tensorrt_llm"), Triton()
    names = {"mode": "tensorrt_llm", "tokenizer": "", "engines": "", "max_queue": "9"}
    settings = Settings.from_parameters({**names, "eos_token_ids": "[0]", **limits(args)})
    metrics = Metrics(triton, settings.max_draft_tokens, rounds=False)
    decoder = TensorRTLLM(settings, args, metrics)
    front = RequestHandler(settings, load_tokenizer(build / "tokenizer"), None, decoder, metrics)
    try:
        yield front, decoder, triton
    finally:
        front.close()
        metrics.close()


def _inputs(text: str = "def main():", **values: Any) -> dict[str, np.ndarray]:
    prompt = {} if "input_ids" in values else {"text_input": text.encode()}
    return {
        name: np.array(value if isinstance(value, list) else [value], object)
        for name, value in {**prompt, "stream": True, "max_tokens": 40, **values}.items()
    }


def _ask(front: RequestHandler, **values: Any) -> list[Any]:
    reply = Reply()
    front.submit(_inputs(**values), reply)
    return reply.parts()


def test_what_it_cannot_do_is_refused(tensorrt_llm: ModuleType, tmp_path: Path) -> None:
    with _front(tmp_path, {"max_num_tokens": 30, "enable_chunked_prefill": False}) as (front, _, _):
        for values, words in (
            ({"logprobs": 0}, "logprobs is not possible: with a drafter"),
            ({"min_p": 0.1}, "min_p is not possible"),
            ({"min_tokens": 3}, "min_tokens is not possible"),
            ({"bad_words": [b"x"]}, "bad_words is not possible"),
            ({"repetition_penalty": 1.2}, "enable_penalty"),
            ({"presence_penalty": -1.0}, "presence_penalty is not possible"),
            ({"text": "x = 1\n" * 20}, "this server takes 30"),
        ):
            [(code, message)] = _ask(front, **values)
            assert code == "INVALID_ARG"
            assert words in message
        neutral = {"min_p": 0.0, "min_tokens": 0, "repetition_penalty": 1.0}
        assert _ask(front, **neutral)[-1].finish_reason == ["length"]


@pytest.mark.models
def test_a_grammar_becomes_a_guide_where_the_build_has_them(
    tensorrt_llm: ModuleType, tmp_path: Path
) -> None:
    with _front(tmp_path / "without", {}) as (front, _, _):
        [(code, said)] = _ask(front, guided_regex=b"[ab]+")
        assert code == "INVALID_ARG"
        assert "guided_regex is not possible: this server was built without guided" in said
    with _front(tmp_path / "with", {"guided_decoding_backend": "llguidance"}) as (front, _, _):
        [part] = _ask(front, guided_regex=b"[ab]{3}", stream=False)
        assert set(part.text_output[0]) <= {"a", "b"}
        assert part.finish_reason == ["stop"]
        code, said = _ask(front, guided_grammar=b"start: nothing")[-1]
        assert code == "INVALID_ARG"
        assert 'unknown name: "nothing"' in said


def test_salts_go_on_and_reused_tokens_come_back(tensorrt_llm: ModuleType, tmp_path: Path) -> None:
    """Chats begin alike, except the tail that `recompute_tail` runs again."""
    tail = {"speculative_config": {"context_recompute_tail": 64}}
    with _front(tmp_path, tail, prefix_cache="recompute_tail") as (front, _, triton):
        found = [
            _ask(front, input_ids=[5] * 200, max_tokens=1, **salt)[-1].cached_tokens[0]
            for salt in ({"cache_salt": b"a"}, {"cache_salt": b"a"}, {}, {"cache_salt": b"b"}, {})
        ]
        assert found == [0, 128, 0, 0, 128]
        wait_until(lambda: triton.value("dflash_cached_prompt_tokens_total") == 256)
        assert triton.value("trtllm_prompt_tokens_total") == 5 * 200
        assert triton.violations == []


def test_figures_however_many_iterations_come_together(
    tensorrt_llm: ModuleType, tmp_path: Path
) -> None:
    figures = []
    for interval in (1, 5):
        with _front(tmp_path / f"{interval}", {"stream_interval": interval}) as (front, _, triton):
            parts = _ask(front, max_tokens=60)
            end, rounds = parts[-1], [count for part in parts for count in part.round_tokens]
            assert end.completion_tokens == [60]
            assert sum(rounds) == 59
            assert len(rounds) == end.rounds[0]
            assert end.acceptance_length[0] == pytest.approx(59 / end.rounds[0])
            assert 0 < end.accepted[0] < end.drafted[0] <= 7 * end.rounds[0]
            for name, value in {
                "trtllm_spec_decode_num_draft_tokens_total": end.drafted[0],
                "trtllm_spec_decode_num_accepted_tokens_total": end.accepted[0],
                "dflash_acceptance_length_count": end.rounds[0],
                "trtllm_prompt_tokens_total": end.prompt_tokens,
            }.items():  # sent once a second, one after the other
                wait_until(lambda n=name, v=value, t=triton: t.value(n) == v)
            assert triton.violations == []
            figures.append((end.rounds, end.drafted, end.accepted))
            if interval == 1:
                assert len(set(rounds)) > 2, "drafts are accepted now and then"
    assert figures[0] == figures[1]


def _live(decoder: TensorRTLLM) -> int:
    """Return requests that the stand-in still decodes."""
    return len(decoder._llm._engine._live)


def test_a_stop_word_ends_the_generation(tensorrt_llm: ModuleType, tmp_path: Path) -> None:
    with _front(tmp_path, {}) as (front, decoder, _):
        [whole] = _ask(front, stream=False)
        word = whole.text_output[0][10:14]
        [part] = _ask(front, stream=False, stop_words=[word.encode()], max_tokens=400)
        assert part.finish_reason == ["stop"]
        assert part.text_output[0] == whole.text_output[0].split(word)[0]
        wait_until(lambda: _live(decoder) == 0)


def test_who_leaves_or_is_late_frees_a_slot(tensorrt_llm: ModuleType, tmp_path: Path) -> None:
    with _front(tmp_path, {}) as (front, decoder, _):
        replies = [Reply() for _ in range(3)]  # one more than there are slots
        for reply in replies:
            front.submit(_inputs(max_tokens=400, ignore_eos=True), reply)
        for reply in replies[:2]:
            reply.got.get(timeout=WAIT)
            reply.gone.set()
        assert replies[2].parts()[-1].finish_reason == ["length"]
        for reply in replies[:2]:
            said = reply.got.get(timeout=WAIT)
            while isinstance(said, Response):  # the last of them perhaps after it has left
                said = reply.got.get(timeout=WAIT)
            assert said == ("CANCELLED", "The request was cancelled.")
        late = Reply()
        front.submit(_inputs(max_tokens=480, ignore_eos=True), late, timeout=0.05)
        end = late.parts()[-1]
        assert end.finish_reason == ["cancelled"]
        assert end.completion_tokens[0] < 480
        wait_until(lambda: _live(decoder) == 0)


@pytest.mark.models
def test_who_waits_is_served_by_priority(tensorrt_llm: ModuleType, tmp_path: Path) -> None:
    with _front(tmp_path, {"max_batch_size": 1}) as (front, _, _):
        first, both = Reply(), Reply()  # `both`: of two requests, in order
        front.submit(_inputs(max_tokens=300, ignore_eos=True), first)
        front.submit(_inputs(max_tokens=100, ignore_eos=True, priority=2), both)
        front.submit(_inputs(max_tokens=10, ignore_eos=True, priority=1), both)
        assert both.parts()[-1].completion_tokens == [10]
        assert both.parts()[-1].completion_tokens == [100]


def test_what_fails_at_submission_is_an_error_of_its_own(
    tensorrt_llm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal by TensorRT-LLM is the client's error; other failures reveal nothing inside."""
    from tensorrt_llm.errors import RequestError  # noqa: PLC0415

    with _front(tmp_path, {}) as (front, decoder, _):
        for error, code in (
            (ValueError("top_x is odd"), "INVALID_ARG"),
            (RequestError("top_x is odd"), "INVALID_ARG"),
            (RuntimeError("out of memory at /some/path.py"), "INTERNAL"),
        ):

            def fail(*args: Any, error: Exception = error, **kwargs: Any) -> Any:
                raise error

            with monkeypatch.context() as patch:
                patch.setattr(decoder._llm, "generate_async", fail)
                found, said = _ask(front, n=2)[-1]
            assert found == code
            assert (said == "top_x is odd") == (code == "INVALID_ARG")
            assert "path" not in said
        assert _ask(front)[-1].finish_reason == ["length"]


def test_a_dead_engine_ends_the_process(
    tensorrt_llm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr("dflash_trt.serving.model.llm.end_process", ended.set)
    with _front(tmp_path, {}) as (front, decoder, _):
        pending = Reply()
        front.submit(_inputs(max_tokens=480, ignore_eos=True), pending)
        pending.got.get(timeout=WAIT)
        assert not ended.is_set()
        decoder._llm._engine.die()
        assert pending.parts()[-1][0] == "INTERNAL"
        assert ended.wait(WAIT)
        ended.clear()
        assert _ask(front)[-1][0] == "INTERNAL"  # of submission
        assert ended.wait(WAIT)


def test_closing_tells_who_waits(tensorrt_llm: ModuleType, tmp_path: Path) -> None:
    replies = [Reply() for _ in range(3)]
    with _front(tmp_path, {}) as (front, decoder, _):
        for reply in replies:
            front.submit(_inputs(max_tokens=480, ignore_eos=True), reply)
        replies[0].got.get(timeout=WAIT)
        llm = decoder._llm
    for reply in replies:
        assert reply.parts()[-1] == ("UNAVAILABLE", "The server is stopping. Try again later.")
    with pytest.raises(RuntimeError, match="shutting down"):
        llm.generate_async([1], None)


def test_limits_are_those_of_the_arguments() -> None:
    args = {**ARGS, "tensor_parallel_size": 4, "speculative_config": {"max_draft_len": 7}}
    assert limits(args)["slots"] == "2"
    assert limits({**args, "enable_attention_dp": True})["slots"] == "8"
    assert limits(args)["block_size"] == "8"
    with pytest.raises(BuildError, match="max_batch_size"):
        limits({**args, "max_batch_size": None})


def test_only_the_job_of_mpi_is_forgotten() -> None:
    """TensorRT-LLM's own Triton model does so; settings such as running as root stay."""
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_MCA_orte_precondition", "PMIX_RANK", "PMI_SIZE"):
        assert MPI_JOB.match(name), name
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_btl", "PMIX_MCA_gds", "PATH", "PMI_SIZES"):
        assert not MPI_JOB.match(name), name


def _check_what_is_told(api: openai.OpenAI, text: str, port: int) -> None:
    """Check rounds and tokens; TensorRT-LLM reports neither sources nor proposals."""
    asked: Any = {"include_usage": True, "include_drafting": True}
    *chunks, last = api.completions.create(
        model="tiny",
        prompt="def main():",
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options=asked,
    )
    told = [each for chunk in chunks for each in chunk.choices[0].model_extra["drafting"]["rounds"]]
    assert [each["round"] for each in told] == list(range(len(told)))
    assert last.usage is not None
    assert len(told) - 1 == last.usage.model_extra["rounds"]
    tokens = [token for each in told for token in each["tokens"]]
    assert "".join(token["text"] for token in tokens) == text
    assert {token["source"] for token in tokens} == {None}
    assert not any(each["proposal"] for each in told)
    page = httpx.get(f"http://127.0.0.1:{port}/page/server").json()
    assert (page["engine"], page["slots"]) == ("tensorrt_llm", 2)
    assert page["untold"]
    assert page["schema"] is False


def test_serve_and_the_openai_front(tmp_path: Path) -> None:
    build = write_llm_build(tmp_path / "build", PAIR, ARGS)
    ports = serve_ports()
    port = ports.http
    with standins(), serving(build, ports) as (process, _):
        with Client(f"127.0.0.1:{ports.grpc}") as client:
            [expected] = client.generate("def main():", max_tokens=20).choices
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-") as api:
            answer = api.completions.create(
                model="tiny", prompt="def main():", max_tokens=20, temperature=0
            )
            assert answer.choices[0].text == expected.text
            assert answer.usage is not None
            assert answer.usage.rounds == expected.rounds
            assert answer.metrics["speculative_decoding"]["per_step_accepted"]
            with pytest.raises(openai.BadRequestError, match="logprobs is not possible"):
                api.completions.create(model="tiny", prompt="x", logprobs=2)
            _check_what_is_told(api, expected.text, port)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 0
