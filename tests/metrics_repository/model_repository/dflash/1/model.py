"""See config.pbtxt."""

import json
import time

import numpy as np
import triton_python_backend_utils as pb

from dflash_trt.serving.front.metrics import Metrics


class TritonPythonModel:
    def initialize(self, args):
        self.metrics = Metrics(pb, max_drafts=7)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        calls = json.loads(pb.get_input_tensor_by_name(request, "calls").as_numpy()[0])
        for _, arguments in calls:
            if "sequences" in arguments:
                arguments["sequences"] = [tuple(each) for each in arguments["sequences"]]
        start = time.perf_counter()
        for _ in range(int(pb.get_input_tensor_by_name(request, "times").as_numpy()[0])):
            for method, arguments in calls:
                getattr(self.metrics, method)(**arguments)
        seconds = np.array([time.perf_counter() - start], np.float32)
        return pb.InferenceResponse([pb.Tensor("seconds", seconds)])

    def finalize(self):
        self.metrics.close()
