"""Save the model that tests push and pull."""

import pytest
from helpers import random_model, small_config
from tiny_sources import tiny_tokenizer


CARD = "---\nlicense: mit\nbase_model: me/base\n---\nA model.\n"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the directory of a saved model with its tokenizer and a card."""
    path = tmp_path_factory.mktemp("saved") / "iha"
    random_model(small_config()).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    (path / "README.md").write_text(CARD)
    return path
