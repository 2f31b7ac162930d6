"""Published chat templates: all of an ordinary chat reaches the model, and none is refused.

They come in the source distribution of llama-cpp-python, or in the folder that DFLASH_TRT_TEMPLATES
names.
"""

import os
import tarfile
from pathlib import Path

import pytest

from tests.support.chats import CHATS, TOOL, words
from tests.unit.test_tool_messages import chat_model

FOLDER = "vendor/llama.cpp/models/templates/"
WHERE = Path(os.environ.get("DFLASH_TRT_TEMPLATES", "."))
pytestmark = pytest.mark.soak


def templates() -> dict[str, str]:
    """Return sources by name, from a folder or a source distribution in it."""
    found = {file.stem: file.read_text(encoding="utf-8") for file in WHERE.glob("*.jinja")}
    for archive in sorted(WHERE.glob("llama_cpp_python-*.tar.gz")):
        with tarfile.open(archive) as files:
            for member in files:
                if FOLDER in member.name and member.name.endswith(".jinja"):
                    text = files.extractfile(member)
                    assert text is not None
                    found[Path(member.name).stem] = text.read().decode("utf-8")
    return found


SOURCES = templates()


def test_there_are_templates() -> None:
    if not SOURCES:
        pytest.skip("set DFLASH_TRT_TEMPLATES to a folder with llama-cpp-python's sdist")
    assert len(SOURCES) >= 60


@pytest.mark.parametrize("kind", CHATS)
@pytest.mark.parametrize("name", SOURCES)
def test_all_of_a_chat_reaches_the_model(name: str, kind: str) -> None:
    model, messages = chat_model(SOURCES[name]), CHATS[kind]
    for tools in ([], [TOOL]):
        text = model.prompt(messages, tools, template_values={"add_generation_prompt": True}).text
        assert words(messages) <= words([{"content": text}])
        assert not tools or "get_weather" in text
