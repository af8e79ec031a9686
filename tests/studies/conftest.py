"""Run studies in small."""

import pytest
from matplotlib.figure import Figure


@pytest.fixture(autouse=True, scope="module")
def unpainted():
    """Leave figures unpainted, which takes longer than what they show."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, path, **options: path.write_bytes(b"\x89PNG"))
        yield
