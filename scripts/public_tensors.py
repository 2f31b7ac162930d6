"""Write the tensors of the public models into their config.pbtxt.

`python scripts/public_tensors.py`, after a change of `request_schema` or of `RequestOutput`.
"""

import re
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

from dflash_trt.request_schema import Tensor, tensors
from dflash_trt.serving.model.request_output import RequestOutput

ROOT = Path(__file__).parents[1] / "model_repository"
MODELS = ("dflash", "dflash_infer")


def main() -> None:
    for file, text in configs().items():
        file.write_text(text, encoding="utf-8")


def configs() -> dict[Path, str]:
    """Both files as they should be: their lines of tensors replaced, the others as they are."""
    lines = [*(_input(*each) for each in tensors().items()), *_outputs()]
    found = {}
    for model in MODELS:
        file = ROOT / model / "config.pbtxt"
        head, *_, rest = re.split(r"(?:^(?:in|out)put .*\n)+", file.read_text("utf-8"), flags=re.M)
        found[file] = head + "".join(f"{line}\n" for line in lines) + rest
    return found


def _input(name: str, tensor: Tensor) -> str:
    dims = -1 if tensor.is_list else 1
    return _tensor("input", name, tensor.datatype, [dims], True) + tensor.help


def _outputs() -> list[str]:
    lines = []
    for name, hint in get_type_hints(RequestOutput, include_extras=True).items():
        kind, help_ = get_args(hint)
        dims, datatype = [], "INT32"
        while get_origin(kind) is list:
            dims.append(-1)
            [kind] = get_args(kind)
        datatype = {str: "BYTES", float: "FP32"}.get(kind, "INT32")
        lines.append(_tensor("output", name, datatype, dims or [1], False) + help_)
    return lines


def _tensor(way: str, name: str, datatype: str, dims: list[int], optional: bool) -> str:
    kind = datatype.replace("BYTES", "STRING")
    rest = " optional: true" if optional else ""
    return f'{way} {{ name: "{name}" data_type: TYPE_{kind} dims: {dims}{rest} }}  # '


if __name__ == "__main__":
    main()
