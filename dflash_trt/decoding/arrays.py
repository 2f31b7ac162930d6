"""Types of arrays, by their elements."""

from typing import Any

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.object_]
# tap features, float32: numpy's, or a tensor of torch that stays on a GPU
FeatureArray = Any
