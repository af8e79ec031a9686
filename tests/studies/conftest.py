import pytest
from matplotlib.figure import Figure


@pytest.fixture(scope="session", autouse=True)
def no_layout():
    """Draw each plot once: to find its margins, Matplotlib draws it a first time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "tight_layout", lambda self: None)
        yield
