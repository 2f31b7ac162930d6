"""What a GGUF file's vocabulary tells: ends of turns, and the pre-tokenizer."""

from pathlib import Path

import ggufs
import pytest
from pairs import make_pair

from dflash_trt.chat import load_chat_template
from dflash_trt.checkpoints import load_target, sampling_defaults
from dflash_trt.checkpoints.gguf import as_directory


def test_turns_end_texts_and_recommendations_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file that names the base model's end alone."""
    pair = make_pair(tmp_path)
    monkeypatch.setattr("dflash_trt.checkpoints.gguf.ENDS_OF_TURNS", {"<|mask|>"})
    more: dict[str, object] = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    more |= {"tokenizer.chat_template.tool_use": "with tools"}
    file = ggufs.write(tmp_path / "tiny.gguf", pair.target_dir, more=more)
    directory = as_directory(file)
    assert load_target(directory).spec.eos_token_ids == (318, 319)
    render = load_chat_template(directory)
    assert render is not None
    assert render(messages=[], tools=[{}]) == "with tools"
    assert render(messages=[]) == ""
    assert sampling_defaults(directory) == ({"temperature": 0.5, "top_k": 20}, "")
