"""The planted faults still apply, and name tests that are there."""

import shlex
import shutil
from pathlib import Path

import pytest

from tests.support import planted


@pytest.mark.parametrize("fault", planted.faults(), ids=lambda fault: fault.name)
def test_a_fault_applies(fault: planted.Fault, tmp_path: Path) -> None:
    (tmp_path / fault.file).parent.mkdir(parents=True)
    shutil.copyfile(planted.ROOT / fault.file, tmp_path / fault.file)
    fault.apply(tmp_path)
    words = [each for each in shlex.split(fault.fails) if each.startswith("tests/")]
    assert words
    assert all((planted.ROOT / each.split("::")[0]).is_file() for each in words)
