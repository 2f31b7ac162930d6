"""What needs an NVIDIA GPU: `make test-gpu`, which writes a report.

None of them has run yet.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_trt.builder.pipeline import build
from dflash_trt.checkpoints import NotKnown
from dflash_trt.config import BuildConfig
from dflash_trt.config.build import Speculation
from dflash_trt.decoding import check_lossless
from dflash_trt.engines import Engine, load_engine
from dflash_trt.engines.pytorch import DTYPES, launch
from dflash_trt.engines.tensorrt.library import compute_capabilities
from dflash_trt.engines.tensorrt.plan import DTYPES as PLAN_DTYPES
from dflash_trt.tensorrt_llm.host import judged_arguments
from tests.support.builds import build_engines
from tests.support.families import CELLS, HYBRIDS, make, pair_of
from tests.support.llm_build import write_llm_build
from tests.support.pycode import PYCODE, prompt_ids

pytestmark = pytest.mark.gpu

RTX = ("8.0", "8.6", "8.9", "12.0", "12.1")  # what TensorRT for RTX builds for


def assert_lossless(directory: Path, **engine: object) -> None:
    """Assert that drafts change no text of the demo pair, and that enough are accepted."""
    paths = {role: {"path": PYCODE / role} for role in ("target", "drafter")}
    config = BuildConfig.model_validate({"name": "pycode", "engine": engine, **paths})
    build(config, directory, lambda *_: None)
    found = check_lossless(directory / "engines", prompt_ids(8), 64, Speculation(), lambda _: None)
    assert found.identical == found.total == 8
    assert found.tau > 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorch_runs_the_demo_pair(dtype: str, tmp_path: Path) -> None:
    assert_lossless(tmp_path / "built", kind="pytorch", dtype=dtype)


@pytest.mark.parametrize("cell", [*CELLS, *((name, "") for name in HYBRIDS)], ids=str)
def test_pytorchs_logits_are_the_cpus(cell: tuple[str, str], tmp_path: Path) -> None:
    family, form = cell
    pair = pair_of(family, form, tmp_path) if form else make(family, tmp_path)
    found = {}
    for kind in ("onnxruntime", "pytorch"):
        directory = tmp_path / kind
        sizes = {"slots": 2, "max_seq_len": 64, "kind": kind}
        build_engines(pair.target_dir, pair.drafter_dir, directory, **sizes)
        for role in ("target", "drafter"):
            found[role, kind] = logits(load_engine(directory / role, alone=True))
    for role in ("target", "drafter"):
        ours, theirs = (found[role, kind] for kind in ("pytorch", "onnxruntime"))
        np.testing.assert_allclose(ours, theirs, atol=2e-3, rtol=0)


def logits(engine: Engine) -> np.ndarray:
    context = 0 if engine.info.role == "target" else 3
    step = engine.step(1, 1, 8, 32, 8, context)
    for name, array in step.inputs.items():
        array[...] = (
            0 if name != "features" else np.linspace(-1, 1, array.size).reshape(array.shape)
        )
    tokens = step.inputs["tokens" if context == 0 else "block"]
    tokens[...] = np.arange(5, 13)
    step.inputs["positions"][...] = np.arange(context + 8)
    step.inputs["mask"][0, 0, :, : context + 8] = np.tri(8, context + 8, context, dtype=bool)
    step.inputs["scored_tokens"][...] = np.arange(8)
    if engine.info.states is not None:
        step.inputs["known"][...] = 8
    step.run()
    return np.array(step.outputs["logits"])


@pytest.mark.parametrize("scaled", [None, "row", "block"])
@pytest.mark.parametrize(("columns", "depth"), [(6144, 4096), (4096, 12288), (24576, 4096)])
def test_a_row_has_the_same_bits_in_every_tile(
    columns: int, depth: int, scaled: str | None
) -> None:
    """Tensor cores have other instructions for many rows than for few."""
    bfloat16, block = torch.bfloat16, 128 if scaled == "block" else 0
    with torch.device("cuda"):
        x = torch.randn(512, depth).to(bfloat16)
        weight = torch.randn(columns, depth).to(torch.float8_e4m3fn if scaled else bfloat16)
        scales = torch.rand(columns, *([depth // block] if block else [])) if scaled else None
    assert_first_rows_alike(
        lambda rows: launch.linear(x[:rows], weight, scales, dtype=bfloat16, block=block)
    )


def test_a_row_has_the_same_bits_in_every_tile_of_experts() -> None:
    with torch.device("cuda"):
        x = torch.randn(1, 512, 2048).to(torch.bfloat16)
        stack, shares = torch.randn(4, 2048, 1536).to(torch.bfloat16), torch.rand(4, 512, 1)
    assert_first_rows_alike(lambda rows: launch.experts(x[:, :rows], stack, shares[:, :rows]))


def assert_first_rows_alike(multiply: Callable[[int], torch.Tensor]) -> None:
    """Assert that a product of the first rows has the bits that it has of all 512."""
    whole = multiply(512)
    for rows in (1, 16, 17, 33, 64, 65, 128):
        assert torch.equal(multiply(rows), whole[:, :rows]), rows


@pytest.mark.parametrize("dtype", PLAN_DTYPES)
@pytest.mark.parametrize("library", ["tensorrt", "tensorrt_rtx"])
def test_plans_run_the_demo_pair(library: str, dtype: str, tmp_path: Path) -> None:
    if find_spec("tensorrt" if library == "tensorrt" else "tensorrt_rtx_bindings") is None:
        pytest.skip(f"{library} is not installed")
    if library == "tensorrt_rtx" and compute_capabilities()[0] not in RTX:
        pytest.skip(f"tensorrt_rtx builds for no GPU of {compute_capabilities()[0]}")
    assert_lossless(tmp_path / "built", kind="tensorrt", library=library, dtype=dtype)


def test_tensorrt_llm_takes_the_arguments_of_a_bundle(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_llm", exc_type=ImportError)
    bundle = write_llm_build(tmp_path / "llm", PYCODE, {"max_batch_size": 2, "max_seq_len": 512})
    try:
        assert judged_arguments(bundle / "engines" / "tensorrt_llm")[1] == []
    except NotKnown as error:
        pytest.skip(str(error))
