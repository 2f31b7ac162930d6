"""The input tensors of a request, as values."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_trt.chat import parse_json
from dflash_trt.errors import RequestError
from dflash_trt.request_fields import FIELDS

MAX_WORDS_BYTES = 2**14  # of a list of texts
Tensors = Mapping[str, "np.ndarray[Any, Any]"]


class Inputs:
    """The values of a request by the names in `request_fields`; those not sent have the default."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        """Whether it was sent."""
        return name in self._tensors

    def __getitem__(self, name: str) -> Any:
        """One value or a list of them, texts decoded; RequestError for too many or a bad text."""
        field = FIELDS[name]
        if name not in self._tensors:
            return field.default
        values = self._tensors[name].ravel()
        if not field.is_list and values.size != 1:
            raise RequestError(f"{name} has {values.size} elements", "Send one.")
        if field.max_items is not None and values.size > field.max_items:
            kind = "words" if field.datatype == "BYTES" else "ids"
            raise RequestError(
                f"{name} has {values.size} {kind}", f"Send at most {field.max_items}."
            )
        found = values.tolist()
        if field.datatype == "BYTES":
            if field.is_list and (size := sum(map(len, found))) > MAX_WORDS_BYTES:
                raise RequestError(f"{name} is {size} bytes", f"Send at most {MAX_WORDS_BYTES}.")
            try:
                found = [value.decode() for value in found]
            except UnicodeDecodeError as error:
                raise RequestError(f"{name} is not UTF-8", "Encode it as UTF-8.") from error
        return found if field.is_list else found[0]

    def json(self, name: str) -> Any:
        """The JSON document in an input; when it was not sent, an empty list or object, or None."""
        kind, text = FIELDS[name].json_type, self[name]
        assert kind is not None
        if text is None:
            return None if kind is object else kind()
        return parse_json(name, text, kind)

    def size(self, name: str) -> int:
        """Bytes of a text."""
        tensor = self._tensors.get(name)
        return 0 if tensor is None else sum(map(len, tensor.ravel().tolist()))
