"""Export models by Transformers' own exporters, as docs/CHECKPOINTS.md shows."""

import pytest
import torch
from helpers import random_ids, random_model, small_config
from tiny_sources import tiny_source
from transformers import exporters

from modeling_iha import interleave_heads
from modeling_iha.mixing import mixing_parameters


def interleaved():
    model = interleave_heads(tiny_source(num_hidden_layers=1), 2)
    for weight in mixing_parameters(model):
        torch.nn.init.normal_(weight, std=0.01)
    return model.eval()


def windowed():
    return random_model(small_config(num_hidden_layers=1, layer_types="sliding_attention", sliding_window=3))


@pytest.mark.skipif(not hasattr(exporters, "ExportedModel"), reason="this version of Transformers has no exporters")
@pytest.mark.parametrize("make", [interleaved, windowed])
def test_an_export_computes_what_the_model_does(make, tmp_path):
    """Take other numbers of rows and tokens than those that were traced."""
    model = make()
    inputs = {"input_ids": random_ids(2, 7), "attention_mask": torch.ones(2, 7, dtype=torch.long), "use_cache": False}
    shapes = dict.fromkeys(("input_ids", "attention_mask"), {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO})
    exported = exporters.DynamoExporter().export(model, inputs, exporters.DynamoConfig(dynamic_shapes=shapes))
    exported.save_pretrained(tmp_path)
    exported = exporters.ExportedModel.from_pretrained(tmp_path)
    for rows, tokens in ((3, 12), (2, 20)):
        inputs = {"input_ids": random_ids(rows, tokens), "attention_mask": torch.ones(rows, tokens, dtype=torch.long)}
        inputs["attention_mask"][0, :4] = 0
        with torch.no_grad():
            expected = model(**inputs, use_cache=False).logits
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(exported(**inputs)["logits"][real], expected[real], atol=2e-5, rtol=1e-4)
