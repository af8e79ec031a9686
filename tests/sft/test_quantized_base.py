"""Train adapters and the mixing next to a base in 4 or 8 bits, and merge them into the base in full precision."""

import pytest
import torch
from helpers import random_ids
from safetensors.torch import load_file
from tiny_training import at_step, decoder, interrupted_at, recipe, saved, sizes
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from iha.errors import UserError
from modeling_iha import load_adapter
from modeling_iha.mixing_weights import trained_mixing
from sft import train
from sft.trainer import SFTRecipeTrainer


pytestmark = pytest.mark.usefixtures("in_repository_root")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
# bitsandbytes rounds blocks of 64 weights together.
WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def command(place, rows, name, **keys) -> list[str]:
    keys = {"use_peft": "true", "lora_r": 4, "lora_dropout": 0, "num_pseudo_heads": 2, "learning_rate": 1e-2, **keys}
    return ["--config", recipe("demo"), *sizes(str(place / "plain"), rows, place / name, **keys)]


@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit"])
def test_the_adapter_of_a_quantized_base_merges_into_the_whole_base(key, rows_file, tmp_path, capsys):
    saved(decoder("llama", **WIDTHS), tmp_path / "plain")
    seen = {}

    def look(trainer):
        seen["types"] = {
            type(value).__name__ for name, value in trainer.model.named_parameters() if "q_proj.base" in name
        }
        seen["mixing"] = {weight.dtype for weight in trained_mixing(trainer.model)}
        seen["model"] = trainer.model

    with at_step(SFTRecipeTrainer, 1, look):
        train.main(command(tmp_path, rows_file, "run", **{key: "true"}, use_bnb_nested_quant="true"))
    assert seen["types"] == {"Params4bit" if key == "load_in_4bit" else "Int8Params"}
    assert seen["mixing"] == {torch.float32}
    final = tmp_path / "run" / "final"
    names = {file.name for file in final.iterdir()}
    assert {"adapter_model.safetensors", "interleaving.json", "tokenizer.json"} <= names
    assert "model.safetensors" not in names
    assert "load_adapter(base" in (final / "README.md").read_text()
    load = f"load_adapter(AutoModelForCausalLM.from_pretrained('{tmp_path / 'plain'}', dtype='float32')"
    assert load in capsys.readouterr().out

    ids = random_ids(2, 9)
    with torch.no_grad():
        trained = seen["model"].eval()(ids).logits
        # The base as it was rounded, with the adapter that was saved, is the model that was trained.
        bits = BitsAndBytesConfig(**{key: True}, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        options = {"dtype": torch.float32, "quantization_config": bits}
        rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **options)
        again = load_adapter(rounded.dequantize(), final).eval()(ids).logits
        # In 8 bits the states are rounded too.
        assert (again - trained).norm() < (0.03 if key == "load_in_4bit" else 0.06) * trained.norm()
        # The whole base takes the adapter, and the merge computes the same.
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
        plain = base(ids).logits
        adapted = load_adapter(base, final).eval()
        expected = adapted(ids).logits
        merged = adapted.merge_and_unload()(ids).logits
    assert torch.allclose(merged, expected, atol=1e-4)
    assert (merged - plain).norm() > 0.3 * plain.norm()


def test_the_recipe_of_4_bits_trains(rows_file, tmp_path, capsys):
    """Take two steps in bfloat16, with the mixing in float32, and merge as the run says."""
    saved(decoder("llama", **WIDTHS).bfloat16(), tmp_path / "plain")
    steps = {"max_steps": 2, "eval_steps": 2}
    words = sizes(str(tmp_path / "plain"), rows_file, tmp_path / "run", **steps)
    train.main(["--config", recipe("qlora"), *words])
    adapter = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors")
    moved = [value for name, value in adapter.items() if name.endswith("q_mix.weight")]
    assert len(moved) == 2 and all(value.dtype == torch.float32 and value.any() for value in moved)
    said = capsys.readouterr().out.rpartition("in full precision: ")[2]
    merged = eval(said, {"load_adapter": load_adapter, "AutoModelForCausalLM": AutoModelForCausalLM})
    assert merged.dtype == torch.float32


def test_a_run_on_4_bits_resumes_and_needs_adapters(rows_file, tmp_path):
    saved(decoder("llama", **WIDTHS), tmp_path / "plain")
    with pytest.raises(UserError, match="rounded weights cannot be trained, but adapters .* set use_peft to true"):
        train.main(command(tmp_path, rows_file, "run", load_in_4bit="true", use_peft="false"))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UserError, match="model.gguf is a GGUF file"):
        train.main(
            command(tmp_path, rows_file, "run", model_name_or_path=tmp_path / "model.gguf", load_in_4bit="true")
        )
    # Evaluations change nothing: in one, bitsandbytes would repack the weights for the CPUs that have it.
    train.main(command(tmp_path, rows_file, "whole", load_in_4bit="true", eval_on_start="true", eval_steps=2))
    later = {"load_in_4bit": "true", "eval_on_start": "false", "eval_steps": 4}
    with interrupted_at(SFTRecipeTrainer, 4):
        train.main(command(tmp_path, rows_file, "stopped", **later))
    train.main(command(tmp_path, rows_file, "stopped", **later))
    whole, stopped = (
        load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("whole", "stopped")
    )
    assert whole.keys() == stopped.keys() and all(torch.allclose(whole[name], stopped[name]) for name in whole)
    assert any("q_mix" in name for name in whole)
