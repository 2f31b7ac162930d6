"""Whether a quantized target's logits of a lone row are those it has among others."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from dflash_trt.engines.base import LoadedEngine


def least_rows(engine: "LoadedEngine") -> int:
    """Tokens and head rows that a step must have for logits to depend on no neighbours, 1 or 2.

    Some CPUs have another kernel of ONNX Runtime for one row than for more. They agree to 1e-5, of
    which quantized layers make up to 0.5 where an input is rounded otherwise. So an engine decodes
    two tokens together and one by one as it is loaded, and compares bits; its cache is empty yet.
    """
    together = _logits(engine, 0, 2)
    alone = [_logits(engine, place, 1) for place in range(2)]
    return 1 if np.array_equal(together, np.concatenate(alone)) else 2


def _logits(engine: "LoadedEngine", place: int, width: int) -> npt.NDArray[np.float32]:
    visible = min(engine.visible_step, engine.info.cache_len)
    step, places = engine.step(0, 1, width, visible, width), place + np.arange(width)
    step.inputs["tokens"][:] = engine.info.vocab_size // (places + 2)
    step.inputs["positions"][:] = places
    step.inputs["write_index"][:] = place
    step.inputs["mask"][:] = np.arange(visible) <= places[:, None]
    step.inputs["head_rows"][:] = np.arange(width)
    step.run()
    return np.array(step.outputs["logits"], np.float32)
