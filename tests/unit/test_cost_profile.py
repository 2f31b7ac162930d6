"""What rounds cost: measured on made-up and on real engines, kept beside them, and shown."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from built_pairs import BuildPair
from pycode import demo_config

from dflash_trt.build.manifest import differences, read_manifest
from dflash_trt.build.pipeline import build
from dflash_trt.decoding import in_process
from dflash_trt.decoding.messages import RoundOutput, VerifyInput, no_drafts
from dflash_trt.decoding.speculation import CostProfile, kept_profiles, profile_of
from dflash_trt.decoding.speculation import costs as cost_module
from dflash_trt.decoding.speculation.costs import BUDGET, MAX_BUDGET, measure
from dflash_trt.engines.info import COSTS_FILE
from dflash_trt.engines.load import load_engine

HOP = 0.25e-3


class Machine:
    """Rounds of a made-up cost, on a clock of their own; follows `RunRound`."""

    def __init__(self, scale: float = 1.0, spikes: int = 0) -> None:
        self.scale, self.spikes = scale, spikes  # each so-many-th round takes ten times as long
        self.now, self.rounds = 0.0, 0

    def verify(self, n: int, width: int, context: int) -> float:
        return self.scale * (1e-3 + 1e-4 * n * width + 1e-7 * n * context + 1e-8 * width * context)

    def draft(self, n: int, context: int) -> float:
        return self.scale * (5e-4 + 1e-4 * n + 1e-7 * n * context)

    def __call__(self, x: VerifyInput) -> RoundOutput:
        n, width = x.tokens.shape
        lengths, forced, places, budgets = x.rows.T
        assert (lengths == width).all()
        assert (forced == 1).all()
        assert (budgets > 0).all()
        verify, draft = self.verify(n, width, int(places[0])), 0.0
        if x.batch[1] > 0:
            draft = self.draft(n, int(places[0]))
        self.rounds += 1
        slow = 10 if self.spikes and self.rounds % self.spikes == 0 else 1
        self.now += HOP * self.scale + slow * (verify + draft)
        none = np.zeros((n, 1, 1))
        results = np.zeros((n, 3), np.int64)
        return RoundOutput(
            results,
            none.astype(np.float32),
            none.astype(np.int64),
            slow * verify,
            *no_drafts(n)[:2],
            slow * draft,
        )

    def measure(self) -> CostProfile:
        return measure(self, 8, 8, 1024, clock=lambda: self.now)


# --- measuring -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spikes", [0, 11])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_what_rounds_take_is_found(scale: float, spikes: int) -> None:
    """Hops between the models are part of verifying; a machine that is busy now and then is not."""
    machine = Machine(scale, spikes)
    found = machine.measure()
    assert found.rows == [1, 2, 4, 8]
    assert found.widths == [1, 2, 4, 8, 16]
    short, long = found.contexts
    assert (short, long) == (64, 1024 - 2 * 16)
    for context in found.contexts:
        at = context // 64 * 64 if context == short else context
        for n in (1, 2, 4, 8):
            for width in found.widths:
                i, j, k = (
                    axis.index(x)
                    for axis, x in zip(
                        (found.contexts, found.rows, found.widths), (context, n, width), strict=True
                    )
                )
                wanted = machine.verify(n, width, at) + HOP * scale
                assert found.verify_seconds[i][j][k] == pytest.approx(wanted)
            assert found.draft_seconds[i][j] == pytest.approx(machine.draft(n, at))
    between = found.verify(3, 5, 512)
    assert between == pytest.approx(machine.verify(3, 5, 512) + HOP * scale)


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0, 200.0])
def test_it_ends_in_time(scale: float) -> None:
    machine = Machine(scale)
    found = machine.measure()
    assert found.rows[-1] == 8
    assert (found.widths[0], found.widths[-1]) == (1, 16)
    assert machine.now <= BUDGET * (1 if scale <= 1 else MAX_BUDGET)
    if scale >= 200:
        assert len(found.widths) < 8


def test_real_engines_can_be_measured(built_pair: BuildPair) -> None:
    pair = built_pair()
    target, drafter = load_engine(pair.target_engine), load_engine(pair.drafter_engine)
    info = drafter.info
    run = in_process(target, drafter)
    found = measure(run, info.block_size, info.slots, target.info.max_seq_len, 0.3)
    assert (found.rows, found.widths[-1]) == ([1, 2, 4], 16)
    assert np.min(found.verify_seconds) > 0 < np.min(found.draft_seconds)


# --- keeping -------------------------------------------------------------------------------------


@pytest.fixture
def engines(built_pair: BuildPair, tmp_path: Path) -> Path:
    """What `profile_of` reads of a pair's engines."""
    for engine in (built_pair().target_engine, built_pair().drafter_engine):
        (tmp_path / "engines" / engine.name).mkdir(parents=True)
        shutil.copy(engine / "engine.json", tmp_path / "engines" / engine.name)
    return tmp_path / "engines"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """`profile_of` measures in a made-up time."""

    def made_up(run_round: Machine, *sizes: int) -> CostProfile:
        return measure(run_round, *sizes, clock=lambda: run_round.now)

    monkeypatch.setattr(cost_module, "measure", made_up)


def test_measured_once_on_a_machine(engines: Path) -> None:
    first, second = Machine(), Machine()
    costs = profile_of(engines, "in_process", first)
    assert first.rounds
    assert profile_of(engines, "in_process", second) == costs
    assert not second.rounds
    assert [path.name for path in engines.iterdir() if path.is_file()] == [COSTS_FILE]


@pytest.mark.parametrize("change", ["cpu", "mode", "drafter"])
def test_another_machine_is_measured(
    engines: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, other = profile_of(engines, "in_process", Machine()), Machine(2.0)
    mode = "ensemble" if change == "mode" else "in_process"
    if change == "cpu":
        monkeypatch.setattr(cost_module, "cpu_model", lambda: "another")
    elif change == "drafter":
        file = engines / "drafter" / "engine.json"
        file.write_text(file.read_text() + " ")
    there = profile_of(engines, mode, other)
    assert other.rounds
    assert there != here
    assert [*kept_profiles(engines).values()] == [here, there]


@pytest.mark.parametrize("damage", ["cut", "[1]", '{"machine": {}}', "table", "bytes"])
def test_a_damaged_file_is_measured_again(engines: Path, damage: str) -> None:
    costs = profile_of(engines, "in_process", Machine())
    file = engines / COSTS_FILE
    text = file.read_text()
    spoilt = {"cut": text[: len(text) // 2], "table": text.replace('"rows": [1, ', '"rows": [', 1)}
    file.write_bytes(b"\xff\xfe" if damage == "bytes" else spoilt.get(damage, damage).encode())
    again = Machine()
    assert profile_of(engines, "in_process", again) == costs
    assert again.rounds
    assert [*kept_profiles(engines).values()] == [costs]


def test_a_build_is_whole_with_and_without_it(built: Path, tmp_path: Path) -> None:
    config = demo_config()
    output = Path(shutil.copytree(built, tmp_path / "built"))
    profile_of(output / "engines", "in_process", Machine())
    leftover = output / "engines" / f"{COSTS_FILE}.4711"  # of a process that was killed
    leftover.touch()
    assert not differences(output, read_manifest(output))
    assert not build(config, output, lambda *_: None).built
    assert kept_profiles(output / "engines")
    serving = config.serving.model_copy(update={"slots": 2})
    assert build(config.model_copy(update={"serving": serving}), output, lambda *_: None).built
    assert not kept_profiles(output / "engines")
