"""Cases of `test_adaptive` that other files share."""

from functools import cache

import pytest

from tests.exact.test_adaptive import Case, CaseOf, case_for, pair_of
from tests.support.built_pairs import BuildPair


@pytest.fixture(scope="session")
def long_case_of(built_pair: BuildPair, tmp_path_factory: pytest.TempPathFactory) -> CaseOf:
    """Return `long_case_of(name)`: a pair, and requests longer than features are buffered."""

    @cache
    def make(name: str) -> Case:
        return case_for(pair_of(name, built_pair, tmp_path_factory))

    return make
