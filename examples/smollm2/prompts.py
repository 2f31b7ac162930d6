"""What people might ask: user turns that the target itself writes after the bare chat template
(Magpie, arXiv 2406.08464), most begun for it, and functions of the standard library to complete."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

from transformers import PreTrainedTokenizerBase

BEGINNINGS = (
    *("What", "How", "Why", "Explain", "Write", "Can you", "Give me", "List", "Summarize", "When"),
    *("Tell me", "I want to", "Describe", "Is it", "Who", "Compare", "Help me", "Translate"),
    *("Imagine", "Solve", "A train", "Write a short story about", "Write an email", "Rewrite"),
    "What is the",
)
CODE_BEGINNINGS = (
    *("Write a Python function", "Write a function that", "Implement", "def", "How do I"),
    *("from typing import List\n\n\ndef", "import math\n\n\ndef", "Write a Python program"),
    *("Complete the following Python function:\n\ndef", "Fix this code:\n\n"),
    *("Write a Python class", "Explain what this code does:\n\n"),
)
SOLVE = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
)


def frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the chat template's text before the user's words, and after them up to the answer."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "\0"}], tokenize=False, add_generation_prompt=True
    )
    before, after = text.split("\0")
    return before, after


def user_turns(tokenizer: PreTrainedTokenizerBase, beginnings: list[str]) -> list[list[int]]:
    """Return the template up to the user's words, then their beginnings."""
    before, _ = frame(tokenizer)
    texts = [before + beginning for beginning in beginnings]
    return list(tokenizer(texts, add_special_tokens=False)["input_ids"])


def chats(tokenizer: PreTrainedTokenizerBase, questions: list[str]) -> list[list[int]]:
    """Return the ids of questions as chats, as a server would encode them."""
    before, after = frame(tokenizer)
    if not questions:
        return []
    texts = [before + question + after for question in questions]
    return list(tokenizer(texts, add_special_tokens=False)["input_ids"])


def solve(head: str) -> str:
    """Ask for a solution of a HumanEval problem as z-lab's benchmark does."""
    return f"{SOLVE}{head}\n```"


def problem_beginnings(heads: list[str]) -> list[str]:
    """Return beginnings like HumanEval's: a function's signature, then its docstring's quotes."""
    beginnings = [SOLVE + text for text in ("def", "from typing import List\n\n\ndef")]
    for number, head in enumerate(heads):
        signature, quotes, _ = head.partition('"""')
        if quotes and head.startswith("def ") and len(signature) < 120:
            imported = "from typing import List\n\n\n" if number % 3 == 0 else ""
            beginnings.append(SOLVE + imported + signature + quotes)
    return beginnings


def library_functions() -> list[str]:
    """Return heads and docstrings of the standard library's functions, in HumanEval's form."""
    root = Path(sysconfig.get_paths()["stdlib"])
    heads = []
    for file in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(file.parts):
            continue
        try:
            source = file.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                head = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]) + "\n"
                if 80 <= len(head) <= 900:
                    heads.append(head)
    return heads
