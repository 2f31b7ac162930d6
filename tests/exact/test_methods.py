"""Builds without a DFlash drafter: plain decoding and n-grams give the target's own text."""

from pathlib import Path

import pytest

from dflash_trt.builder.pipeline import build
from dflash_trt.config import Method, Speculation, variants
from dflash_trt.decoding import check_lossless
from tests.support.builds import config_of, quiet
from tests.support.pairs import make_pair
from tests.support.random_proposals import COSTS

SPECULATION = {
    "none": Speculation(method="none"),
    "ngram": Speculation(method="ngram"),
    "ngram, 5 drafts": Speculation(method="ngram", draft_tokens=5),
}
PROMPTS = [[5, 6, 7, 8] * 6, [9, 10, 11, 9, 10, 11, 9]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[Method, Path]:
    directory = tmp_path_factory.mktemp("pair")
    make_pair(directory, block_size=8)
    found: dict[Method, Path] = {}
    for method, made in variants(config_of(directory)).items():
        if method != "dflash":
            (directory / "drafter").rename(directory / "elsewhere")
        found[method] = build(made, directory / method, quiet).directory
        if method != "dflash":
            (directory / "elsewhere").rename(directory / "drafter")
    return found


def test_a_build_without_a_drafter_has_none(built: dict[Method, Path]) -> None:
    assert {*built} == {"dflash", "ngram", "none"}
    for method in ("ngram", "none"):
        assert [path.name for path in (built[method] / "engines").iterdir()] == ["target"]
        models = {each.name for each in (built[method] / "model_repository").iterdir()}
        assert models == {"dflash", "dflash_infer"}  # nothing to put into an ensemble


@pytest.mark.parametrize("name", SPECULATION)
def test_its_text_is_the_targets(
    built: dict[Method, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are made up: on a busy machine measured ones would leave lookups out."""
    monkeypatch.setattr("dflash_trt.decoding.lossless.measure", lambda *_: COSTS["cheap"])
    speculation = SPECULATION[name]
    directory = built[speculation.method] / "engines"
    found = check_lossless(directory, PROMPTS, 40, speculation, lambda _: None)
    assert found.identical == found.total == len(PROMPTS)
    with_drafter = check_lossless(
        built["dflash"] / "engines", PROMPTS, 40, Speculation(), lambda _: None
    )
    assert found.outputs == with_drafter.outputs
    assert (found.tau > 1) == (speculation.method == "ngram")  # random text repeats itself soon
