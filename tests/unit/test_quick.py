"""`make quick` runs something of every room: the files of tests/quick.txt."""

import re
from pathlib import Path

import dflash_trt

PACKAGE = Path(dflash_trt.__file__).parent
TESTS = Path(__file__).parents[1]
ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def test_each_room_has_a_quick_test() -> None:
    files = (TESTS / "quick.txt").read_text().split()
    tested = set()
    for file in files:
        text = (TESTS.parent / file.split("::")[0]).read_text()
        tested.update(re.findall(r"^from dflash_trt\.(\w+)", text, re.MULTILINE))
    assert tested >= ROOMS
