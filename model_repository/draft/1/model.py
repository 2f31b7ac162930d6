"""The drafter's step of a round, as a Triton model. The work is in dflash_trt.decoding.rounds."""

from dflash_trt.decoding import DraftInput, draft
from dflash_trt.serving.model.engine_model import EngineModel


class TritonPythonModel(EngineModel):
    input_type = DraftInput
    step = staticmethod(draft)
