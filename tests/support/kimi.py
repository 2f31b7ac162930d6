"""A repository with Kimi's tokenizer, written at run time: the ranks are those of `splintr`.

What the Python file says is what Kimi's says of its tokenizer; if it were run, it would fail.
"""

import base64
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import splintr
import tiktoken

RANKED = 163_584
SPECIAL = {
    163_584: "[BOS]",
    163_585: "[EOS]",
    163_586: "<|im_end|>",
    163_587: "<|im_user|>",
    163_588: "<|im_assistant|>",
    163_590: "<|start_header_id|>",
    163_591: "<|end_header_id|>",
    163_593: "[EOT]",
    163_594: "<|im_system|>",
    163_595: "<|tool_calls_section_begin|>",
    163_596: "<|tool_calls_section_end|>",
    163_597: "<|tool_call_begin|>",
    163_598: "<|tool_call_argument_begin|>",
    163_599: "<|tool_call_end|>",
    163_601: "<|im_middle|>",
    163_602: "<|media_begin|>",
    163_603: "<|media_content|>",
    163_604: "<|media_end|>",
    163_605: "<|media_pad|>",
    163_606: "<think>",
    163_607: "</think>",
    163_838: "[UNK]",
    163_839: "[PAD]",
}
PATTERN = [
    r"""[\p{Han}]+""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""",
    r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
    r"""\s*[\r\n]+""",
    r"""\s+(?!\S)""",
    r"""\s+""",
]
CODE = """raise RuntimeError("code of a checkpoint ran")


class TikTokenTokenizer:
    num_reserved_special_tokens = 256
    pat_str = "|".join([
{pattern}    ])

    def __init__(self, vocab_file):
        self.model = tiktoken.Encoding(name="kimi", pat_str=self.pat_str)
"""


@cache
def kimi_tokens() -> tuple[bytes, ...]:
    tokenizer = splintr.Tokenizer.from_pretrained("kimi_k2")
    return tuple(tokenizer.decode_bytes([rank]) for rank in range(RANKED))


def ranks_file(tokens: Mapping[int, bytes]) -> bytes:
    return b"".join(b"%s %d\n" % (base64.b64encode(text), rank) for rank, text in tokens.items())


def tokenizer_code(pattern: list[str] | None = None) -> str:
    lines = "".join(f'        r"""{part}""",\n' for part in pattern or PATTERN)
    return CODE.format(pattern=lines)


def tokenizer_settings(special: Mapping[int, str] = SPECIAL, **more: Any) -> dict[str, Any]:
    added = {
        str(number): {"content": text, "special": not text.startswith("<|tool_call")}
        for number, text in special.items()
    }
    return {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
        **more,
    }


def write_kimi_tokenizer(directory: Path, ranks: int = RANKED, **settings: Any) -> None:
    """Write the files of the first ranks, whose special tokens follow them."""
    special = {number - RANKED + ranks: text for number, text in SPECIAL.items()}
    tokens = dict(enumerate(kimi_tokens()[:ranks]))
    (directory / "tiktoken.model").write_bytes(ranks_file(tokens))
    (directory / "tokenization_kimi.py").write_text(tokenizer_code())
    text = json.dumps(tokenizer_settings(special, **settings))
    (directory / "tokenizer_config.json").write_text(text)


def kimi_encoding(ranks: int = RANKED) -> tiktoken.Encoding:
    """Return the encoding that the repository's code would make."""
    named = {number - RANKED + ranks: text for number, text in SPECIAL.items()}
    return tiktoken.Encoding(
        name="kimi",
        pat_str="|".join(PATTERN),
        mergeable_ranks={token: rank for rank, token in enumerate(kimi_tokens()[:ranks])},
        special_tokens={
            named.get(number, f"<|reserved_token_{number}|>"): number
            for number in range(ranks, ranks + 256)
        },
    )
