import pytest
from tiny_training import leave_figures_empty


@pytest.fixture(scope="session", autouse=True)
def empty_figures():
    with pytest.MonkeyPatch.context() as patch:
        leave_figures_empty(patch)
        yield
