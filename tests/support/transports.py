"""Each way to ask a running server: gRPC, Triton's HTTP, OpenAI's API."""

import json
from collections.abc import Callable, Iterator

import httpx
from tritonclient.grpc import InferenceServerClient

from dflash_trt.serving.client import Client
from dflash_trt.serving.ports import Ports
from tests.support.request_tools import WAIT, tensors

CHANNEL = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]


class RefusedError(Exception):
    pass


class Roads:
    def __init__(self, ports: Ports, temperature: float = 0.0) -> None:
        self.rules = {"ignore_eos": True, "temperature": temperature}
        self.client = Client(f"127.0.0.1:{ports.grpc}")
        self.grpc = InferenceServerClient(f"127.0.0.1:{ports.grpc}", channel_args=CHANNEL)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{ports.http}", timeout=WAIT)
        self.all: list[Callable[[str, int, float | None], tuple[str, str]]] = [
            *(self.stream, self.generate, self.infer, self.http_generate, self.http_stream),
            *(self.completion, self.completion_stream),
        ]

    def close(self) -> None:
        for each in (self.client, self.http):
            each.__exit__(None, None, None)
        self.grpc.close()

    def stream(self, prompt: str, count: int, late: float | None) -> tuple[str, str]:
        options = {"max_tokens": count, "timeout": late or WAIT, **self.rules}
        text = ""
        for chunk in self.client.stream(prompt, **options):
            text += chunk.text
        return text, chunk.finish_reason

    def generate(self, prompt: str, count: int, late: float | None) -> tuple[str, str]:
        options = {"max_tokens": count, "timeout": late or WAIT, **self.rules}
        (choice,) = self.client.generate(prompt, **options).choices
        return choice.text, choice.finish_reason

    def infer(self, prompt: str, count: int, late: float | None) -> tuple[str, str]:
        inputs = tensors({"text_input": prompt, "max_tokens": count, **self.rules})
        limit = late and round(late * 1e6)
        result = self.grpc.infer("dflash_infer", inputs, timeout=limit, client_timeout=WAIT)
        text, reason = (result.as_numpy(name)[0] for name in ("text_output", "finish_reason"))
        return text.decode(), reason.decode()

    def http_generate(self, prompt: str, count: int, late: float | None) -> tuple[str, str]:
        answer = self.http.post("/v2/models/dflash/generate", json=self._body(prompt, count, late))
        return _told(_good(answer))

    def http_stream(self, prompt: str, count: int, late: float | None) -> tuple[str, str]:
        body = self._body(prompt, count, late) | {"stream": True}
        text, reason = "", ""
        for line in _lines(self.http, "/v2/models/dflash/generate_stream", body):
            part, reason = _told(line)
            text += part
        return text, reason

    def completion(self, prompt: str, count: int, late: float | None) -> tuple[str, str]:
        answer = self.http.post("/v1/completions", json=self._completion(prompt, count))
        (choice,) = _good(answer)["choices"]
        return choice["text"], choice["finish_reason"]

    def completion_stream(self, prompt: str, count: int, late: float | None) -> tuple[str, str]:
        body, text, reason = self._completion(prompt, count) | {"stream": True}, "", ""
        for line in _lines(self.http, "/v1/completions", body):
            for choice in line["choices"]:
                text, reason = text + choice["text"], choice["finish_reason"] or reason
        return text, reason

    def _body(self, prompt: str, count: int, late: float | None) -> dict[str, object]:
        limit = {} if late is None else {"timeout": round(late * 1e6)}
        return {"text_input": prompt, "max_tokens": count, **limit, **self.rules}

    def _completion(self, prompt: str, count: int) -> dict[str, object]:
        return {"model": "dflash", "prompt": prompt, "max_tokens": count, **self.rules}


def _good(answer: httpx.Response) -> dict[str, object]:
    if answer.status_code != 200:
        raise RefusedError(answer.text)
    return answer.json()


def _told(answer: dict[str, object]) -> tuple[str, str]:
    if "error" in answer:
        raise RefusedError(str(answer["error"]))
    return str(answer["text_output"]), str(answer["finish_reason"])


def _lines(http: httpx.Client, path: str, body: dict[str, object]) -> Iterator[dict[str, object]]:
    with http.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            answer.read()
            raise RefusedError(answer.text)
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                found = json.loads(line[6:])
                if "error" in found:
                    raise RefusedError(line)
                yield found
