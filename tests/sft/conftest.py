import pytest
from tiny_training import hasten_runs


@pytest.fixture(scope="module", autouse=True)
def hastened_runs():
    with pytest.MonkeyPatch.context() as patch:
        hasten_runs(patch)
        yield
