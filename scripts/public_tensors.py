"""Write the tensors of the public models into their config.pbtxt.

`python scripts/public_tensors.py`, after a change of `request_schema` or of `OUTPUTS`.
"""

import re
from pathlib import Path

from dflash_trt.request_schema import Tensor, tensors
from dflash_trt.serving.answer import OUTPUTS

ROOT = Path(__file__).parents[1] / "model_repository"
MODELS = ("dflash", "dflash_infer")


def main() -> None:
    for file, text in configs().items():
        file.write_text(text, encoding="utf-8")


def configs() -> dict[Path, str]:
    """Both files as they should be: their lines of tensors replaced, the others as they are."""
    lines = [*(_input(*tensor) for tensor in tensors().items()), *_outputs()]
    texts = {}
    for model in MODELS:
        file = ROOT / model / "config.pbtxt"
        head, *_, rest = re.split(r"(?:^(?:in|out)put .*\n)+", file.read_text("utf-8"), flags=re.M)
        texts[file] = head + "".join(f"{line}\n" for line in lines) + rest
    return texts


def _input(name: str, tensor: Tensor) -> str:
    dims = -1 if tensor.is_list else 1
    return _tensor("input", name, tensor.datatype, [dims], True) + tensor.help


def _outputs() -> list[str]:
    return [
        _tensor("output", output.name, output.datatype, [*output.dims], False) + output.help
        for output in OUTPUTS.values()
    ]


def _tensor(way: str, name: str, datatype: str, dims: list[int], optional: bool) -> str:
    kind = datatype.replace("BYTES", "STRING")
    rest = " optional: true" if optional else ""
    return f'{way} {{ name: "{name}" data_type: TYPE_{kind} dims: {dims}{rest} }}  # '


if __name__ == "__main__":
    main()
