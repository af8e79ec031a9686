"""Export models by Transformers' own exporters, as docs/CHECKPOINTS.md shows."""

import pytest
import torch
from helpers import random_ids, random_model, small_config, train_mixing
from tiny_sources import tiny_source
from transformers import DynamicCache, exporters

from modeling_iha import interleave_heads
from modeling_iha.transformers_versions import CACHE


def interleaved():
    return train_mixing(interleave_heads(tiny_source(num_hidden_layers=1), 2))


def iha():
    return random_model(small_config(num_hidden_layers=1))


def padded(rows, tokens):
    """Return token ids and a mask that hides the first three tokens of the first row."""
    mask = torch.ones(rows, tokens, dtype=torch.long)
    mask[0, :3] = 0
    return {"input_ids": random_ids(rows, tokens), "attention_mask": mask}


@pytest.mark.skipif(not hasattr(exporters, "ExportedModel"), reason="this version of Transformers has no exporters")
@pytest.mark.slow  # test_compile.py exports by PyTorch alone
@pytest.mark.parametrize("make", [iha, interleaved])
def test_an_export_computes_what_the_model_does(make):
    """Read a prompt and add a token, with other numbers of rows and tokens than those that were traced."""
    model = make()
    config = exporters.DynamoConfig(dynamic=True)
    graphs = exporters.DynamoExporter().export_for_generation(model, padded(2, 7), config).runners
    inputs = padded(3, 12)
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        expected = model(**inputs)
    prompt = graphs["prefill"](**inputs, **{CACHE: DynamicCache(config=model.config)})
    torch.testing.assert_close(prompt["logits"][:, -1], expected.logits[:, -1])

    following = {
        "input_ids": expected.logits[:, -1:].argmax(-1),
        "attention_mask": torch.cat((inputs["attention_mask"], torch.ones(3, 1, dtype=torch.long)), dim=1),
        "position_ids": inputs["position_ids"][:, -1:] + 1,
    }
    decoded = graphs["decode"](**following, **{CACHE: prompt[CACHE]})
    with torch.no_grad():
        expected = model(**following, **{CACHE: expected[CACHE]})
    torch.testing.assert_close(decoded["logits"], expected.logits)
