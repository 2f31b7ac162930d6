"""The target's step of a round, as a Triton model. The work is in dflash_trt.decoding.rounds."""

from functools import partial

from dflash_trt.decoding import FeatureBuffer, VerifyInput, verify
from dflash_trt.serving.model.engine_model import EngineModel


class TritonPythonModel(EngineModel):
    input_type = VerifyInput
    step = staticmethod(partial(verify, buffer=FeatureBuffer()))
