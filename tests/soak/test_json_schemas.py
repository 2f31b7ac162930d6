"""The whole JSON Schema Test Suite: what llguidance takes of it is answered validly, and alike with
drafts and without.

    JSON_SCHEMA_SUITE=jsonschema-4.26.0/json/tests pytest tests/soak/test_json_schemas.py

The source distribution of `jsonschema` carries it: `pip download --no-deps --no-binary :all:
jsonschema`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from built_pairs import BuildPair
from schema_suite import run, suite

DRAFTS = ("draft4", "draft6", "draft7", "draft2019-09", "draft2020-12")


@pytest.mark.soak
@pytest.mark.skipif("JSON_SCHEMA_SUITE" not in os.environ, reason="JSON_SCHEMA_SUITE is not set")
@pytest.mark.parametrize("draft", DRAFTS)
def test_answers_validate(built_pair: BuildPair, draft: str) -> None:
    built = built_pair(family="qwen3", taps=(1, 2))
    outcome = run(built, suite(Path(os.environ["JSON_SCHEMA_SUITE"]), [draft]))
    assert (outcome.wrong, outcome.different) == ([], [])
    assert len(outcome.unchecked) < 3
    assert outcome.finished > 0.9 * outcome.answers > 100
    assert outcome.forced > 0
