import pytest


@pytest.fixture(scope="module")
def uncounted_cards():
    """Have no card count costs, which takes longer than a conversion: tests/hub/test_model_cards.py looks at them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("iha.card_template._costs", lambda config: None)
        yield
