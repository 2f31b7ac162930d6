"""What people might ask: user turns that the target itself samples after the bare chat template
(Magpie, arXiv 2406.08464), some begun for it, and functions of the standard library to complete."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

import torch
from rollout import roll_out
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

USER_TOKENS = 72  # a sampled user turn that has not ended by then is dropped
BEGINNINGS = (
    *("What", "How", "Why", "Explain", "Write", "Can you", "Give me", "List", "Summarize", "When"),
    *("Tell me", "I want to", "Describe", "Is it", "Who", "Compare", "Help me", "Translate"),
    *("Imagine", "Solve", "A train", "Write a short story about", "Write an email", "Rewrite"),
    "What is the",
)
CODE_BEGINNINGS = (
    *("Write a Python function", "Write a function that", "Implement", "def ", "How do I"),
    *("from typing import List\n\n\ndef ", "import math\n\n\ndef ", "Write a Python program"),
    *("Complete the following Python function:\n\ndef ", "Fix this code:\n\n"),
    *("Write a Python class", "Explain what this code does:\n\n"),
)


def user_turn(tokenizer: PreTrainedTokenizerBase, beginning: str) -> list[int]:
    """The template up to where the user's words are, then how they begin."""
    bare = tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False)
    return list(tokenizer.encode(bare.split("\0")[0] + beginning, add_special_tokens=False))


def chat(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """The ids that a server sends for a question as a chat."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def sample_questions(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    code: float,
    generator: torch.Generator,
) -> list[str]:
    """About `count` questions, a share `code` of them about code; unfinished ones are left out."""
    beginnings = []
    for draw in torch.rand(count, 2, generator=generator).tolist():
        pool = CODE_BEGINNINGS if draw[0] < code else BEGINNINGS
        # half of the plain ones are the model's own from the first word on
        free = draw[0] >= code and draw[0] > (1 + code) / 2
        beginnings.append("" if free else pool[int(draw[1] * len(pool))])
    prompts = [user_turn(tokenizer, beginning) for beginning in beginnings]
    temperatures = torch.full((count,), 0.8)
    rows = roll_out(
        model, prompts, USER_TOKENS, temperatures, tokenizer.eos_token_id, [], generator
    )
    questions = []
    for row, prompt, beginning in zip(rows, prompts, beginnings, strict=True):
        words = tokenizer.decode(row.ids[len(prompt) : -1])
        if row.ended and 12 <= len(beginning + words) <= 400 and "<|" not in words:
            questions.append(beginning + words)
    return questions


def solve(head: str) -> str:
    """As z-lab's benchmark asks for a solution of a HumanEval problem."""
    return (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{head}\n```"
    )


def library_functions() -> list[str]:
    """Heads of functions with their docstrings, from the standard library, as HumanEval writes its
    problems (of which none is used)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for file in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(file.parts):
            continue
        try:
            source = file.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = source.splitlines()
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                head = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]) + "\n"
                if 80 <= len(head) <= 700:
                    found.append(head)
    return found
