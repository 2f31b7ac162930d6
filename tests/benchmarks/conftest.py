"""The files here are `bench_*.py`: `make bench` names the folder, `make test` skips it."""

from pathlib import Path

import pytest


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect bench files of the folder; pytest itself collects one that is named."""
    if not file_path.name.startswith("bench_") or parent.session.isinitpath(file_path):
        return None
    return pytest.Module.from_parent(parent, path=file_path)
