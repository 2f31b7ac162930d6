"""The demo pair with a chat template, on one server; a request handler without any."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from dflash_trt.serving.model.request_handler import RequestHandler
from dflash_trt.serving.ports import Ports
from dflash_trt.serving.supervisor.run import running_server
from tests.support.chat_pair import build_chat_pair
from tests.support.handlers import CountingModel, open_front
from tests.support.pairs import Pair, make_endless, make_pair, teach
from tests.support.servers import openai_front


@pytest.fixture(scope="session")
def chat_built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_pair(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="session")
def triton(chat_built: Path) -> Iterator[Ports]:
    with running_server(chat_built) as ports:
        yield ports


@pytest.fixture(scope="session")
def url(chat_built: Path, triton: Ports) -> Iterator[str]:
    with openai_front(chat_built, triton) as url:
        yield url


@pytest.fixture(scope="session")
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=60.0) as client:
        yield client


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return a random, taught pair whose texts have no end."""
    pair = make_pair(tmp_path_factory.mktemp("endless"), longest=4096)
    teach(pair)
    make_endless(pair)
    return pair


@pytest.fixture(scope="session")
def plain(built: Path) -> Iterator[Ports]:
    """Serve the demo pair with defaults and no supervision."""
    with running_server(built) as ports:
        yield ports


@pytest.fixture
def model() -> CountingModel:
    return CountingModel()


@pytest.fixture
def front(model: CountingModel) -> Iterator[RequestHandler]:
    with open_front(model) as front:
        yield front
