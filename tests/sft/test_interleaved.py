"""Train decoders of Transformers whose heads are interleaved, by recipes and by TRL's own trainer."""

import copy
import json
import tempfile

import pytest
import torch
import yaml
from datasets import Dataset
from helpers import DECODERS, random_ids, random_model
from tiny_training import (
    byte_config,
    byte_tokenizer,
    decoder,
    interrupted_at,
    one_step,
    recipe,
    saved,
    sizes,
    training_rows,
    write_jsonl,
)
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from iha.checkpoints import load_model
from iha.errors import UserError
from iha.model_cost import flops_of_a_token
from iha.processes import load_in_clean_process
from iha.sources import find_source
from modeling_iha import interleave_heads, load_adapter, pair_heads, save_adapter
from modeling_iha.mixing_weights import mixing_parameters, state_with_values, trained_mixing
from sft import train
from sft.arguments import RecipeParser
from sft.base_model import find_start, prepare_model, run_config, settle_pseudo_heads, settle_training_options
from sft.trainer import SFTRecipeTrainer


def arguments(tmp_path, model, name, **keys) -> list[str]:
    rows = write_jsonl(tmp_path / "rows.jsonl", training_rows(20))
    return ["--config", recipe("demo"), *sizes(str(tmp_path / model), rows, tmp_path / name, **keys)]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("qwen3_moe", {"packing": "true"}),
        pytest.param("gemma3_text", {"use_peft": "true", "lora_dropout": 0}, marks=pytest.mark.slow),
    ],
)
def test_a_recipe_interleaves_a_plain_model_and_resumes(name, keys, tmp_path):
    saved(decoder(name), tmp_path / "plain")
    keys |= {"num_pseudo_heads": 2}
    with interrupted_at(SFTRecipeTrainer, 4):
        train.main(arguments(tmp_path, "plain", "resumed", **keys))
    for run in ("resumed", "whole"):
        train.main(arguments(tmp_path, "plain", run, **keys))
    resumed, whole = (load_model(find_source(tmp_path / run / "final")) for run in ("resumed", "whole"))
    assert type(resumed).__name__ == f"Interleaved{type(decoder(name)).__name__}"
    assert type(resumed).__module__ == "modeling_iha.modeling_interleaved"  # not the checkpoint's own code
    for (key, weight), other in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert torch.allclose(weight, other, atol=1e-6), key
    assert json.loads((tmp_path / "whole" / "run.json").read_text())["recipe"]["num_pseudo_heads"] == 2
    card = (tmp_path / "whole" / "final" / "README.md").read_text()
    assert "interleaved-head-attention" in card and "Fine-tuned from plain" in card

    if not keys.get("use_peft"):
        return  # tests/modeling/test_saved.py loads such a checkpoint in a clean process
    chat = [{"role": "user", "content": "1+1?"}]
    reply = load_in_clean_process(tmp_path / "whole" / "final", chat, 4)
    assert reply["module"].startswith("transformers_modules.")
    inputs = byte_tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    output = whole.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert output[0, inputs["input_ids"].shape[1] :].tolist() == reply["token_ids"]


def test_a_recipe_says_how_heads_are_interleaved(tmp_path, capsys):
    saved(decoder("llama"), tmp_path / "plain")
    short = {"max_steps": 2, "eval_size": 0, "eval_strategy": "no", "eval_on_start": "false", "peak_tflops": 0.5}
    how = {"interleaved_layers": "1", "interleaved_window": "paper", "collapse": "all_heads"}
    how["recompute_virtual_tokens"] = "true"
    train.main(arguments(tmp_path, "plain", "run", num_pseudo_heads=2, mixing_scale=10, **short, **how))
    assert "Interleaved 1 of 2 layers, P = 2, window 32." in capsys.readouterr().out  # 256 / (2 P^2)
    first = load_model(find_source(tmp_path / "run" / "final"))
    config = first.config
    assert list(config.interleaved_layers) == ["layers.1.self_attn"] and config.pseudo_collapse == "all_heads"
    assert (config.interleaved_window, config.mixing_scale) == (32, 10)
    assert config.recompute_virtual_tokens is True
    history = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    flops = flops_of_a_token(config, 128)
    assert flops > flops_of_a_token(decoder("llama").config, 128)
    (logged, *_) = [entry for entry in history if "loss" in entry]
    assert logged["model_flops_utilization"] == pytest.approx(logged["tokens_per_second"] * flops / 0.5e12)

    # A checkpoint keeps its values where the recipe gives its mixing another rate.
    expected = state_with_values(first)
    for scale in (4, 1):
        name = f"again{scale}"
        train.main(arguments(tmp_path, "run/final", name, mixing_scale=scale, learning_rate=0, **short))
        again = load_model(find_source(tmp_path / name / "final"))
        assert again.config.mixing_scale == scale
        assert all(torch.equal(value, expected[name]) for name, value in state_with_values(again).items())


def test_a_run_does_not_go_on_with_another_scale(tmp_path):
    """The weights and the optimizer of a checkpoint belong to the scale that the run began with."""
    saved(decoder("llama"), tmp_path / "plain")
    run = {"num_pseudo_heads": 2, "mixing_scale": 10}
    with interrupted_at(SFTRecipeTrainer, 4):
        train.main(arguments(tmp_path, "plain", "run", **run))
    with pytest.raises(UserError, match="mixing_scale: the run began with 10.0 and cannot go on with 40.0"):
        train.main(arguments(tmp_path, "plain", "run", **{**run, "mixing_scale": 40}))
    train.main(arguments(tmp_path, "plain", "run", **run))
    assert load_model(find_source(tmp_path / "run" / "final")).config.mixing_scale == 10


@pytest.mark.parametrize(
    ("model", "keys", "named"),
    [
        ("plain", {"interleaved_layers": "0", "collapse": "per_head"}, "interleaved_layers, collapse: for runs that"),
        ("plain", {"interleaved_layers": "papr", "num_pseudo_heads": 2}, "interleaved_layers=papr: expected indices"),
        ("plain", {"interleaved_window": "papr", "num_pseudo_heads": 2}, "interleaved_window=papr: expected a number"),
        ("plain", {"lora_dropout": 0.5}, "lora_dropout: without effect"),
        ("interleaved", {"interleaved_window": 8, "num_pseudo_heads": 2}, "interleaved keeps what it was made with"),
        ("qwen2", {"sliding_window": 8}, "sliding_window: .*qwen2 has no sliding layers"),
        ("plain", {"peak_tflops": 1, "max_length": "null"}, "peak_tflops needs max_length"),
        ("plain", {"peak_tflops": 1, "use_peft": "true"}, "peak_tflops: the utilization is that of a run that trains"),
    ],
)
def test_what_a_recipe_cannot_interleave_is_refused(model, keys, named, tmp_path, monkeypatch):
    monkeypatch.setattr("sft.base_model.load_base_model", lambda *_: pytest.fail("the model was loaded"))
    made = decoder("qwen2" if model == "qwen2" else "llama")
    saved(interleave_heads(made, 2) if model == "interleaved" else made, tmp_path / model)
    with pytest.raises(UserError, match=named):
        train.main(arguments(tmp_path, model, "run", **keys))


def test_a_plain_model_has_no_virtual_tokens_to_recompute(tmp_path):
    saved(decoder("llama"), tmp_path / "plain")
    with pytest.raises(UserError, match="recompute_virtual_tokens: .*plain has no virtual tokens; remove the key"):
        train.main(arguments(tmp_path, "plain", "run", recompute_virtual_tokens="true"))


def test_the_control_of_a_recipe_leaves_out_how_its_file_interleaves(tmp_path, capsys):
    """Take a file that names layers without P for an oversight, and with a P that the command line takes away not."""
    saved(decoder("llama"), tmp_path / "plain")
    keys = {"interleaved_layers": "paper", "interleaved_window": 8, "recompute_virtual_tokens": True}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(keys))
    words = ["--config", str(tmp_path / "recipe.yaml"), *arguments(tmp_path, "plain", "run")[2:]]
    for more, is_control in (([], False), (["--num_pseudo_heads", "null"], True)):
        run, _ = RecipeParser(train.USAGE).parse([*words, *more])
        start = find_start(run)
        if not is_control:
            with pytest.raises(UserError, match="interleaved_layers, interleaved_window: for runs that interleave"):
                settle_pseudo_heads(start, run)
            continue
        settle_pseudo_heads(start, run)
        settle_training_options(start, run)
        assert (run.interleaved_layers, run.interleaved_window, run.recompute_virtual_tokens) == (None, None, None)
        assert "Note: interleaved_layers=paper is left out: num_pseudo_heads is null." in capsys.readouterr().out


def test_a_rate_of_the_mixing_needs_a_mixing(tmp_path):
    for name, made in (("plain", decoder("llama")), ("paired", pair_heads(decoder("llama"), 2))):
        saved(made, tmp_path / name)
        with pytest.raises(UserError, match="mixing_scale: .* has no weights that mix heads"):
            train.main(arguments(tmp_path, name, "run", mixing_scale=4))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kind", "pseudo_heads", "mixes"),
    [
        ("plain", "null", False),
        ("paired", "null", False),
        ("mha", "null", False),
        ("plain", 2, True),
        ("interleaved", "null", True),
        ("talking_heads", "null", True),
    ],
)
def test_a_recipes_file_trains_models_without_a_mixing_too(kind, pseudo_heads, mixes, tmp_path, capsys):
    """Leave out the `mixing_scale` of a file: the control of a recipe is plain, and paired heads mix nothing."""
    in_place = {"paired": pair_heads, "interleaved": interleave_heads}
    if kind in in_place:
        model = in_place[kind](decoder("llama"), 2)
    else:
        model = decoder("llama") if kind == "plain" else random_model(byte_config(attention_kinds=kind))
    saved(model, tmp_path / kind)
    words = sizes(str(tmp_path / kind), "rows.jsonl", tmp_path / "run", num_pseudo_heads=pseudo_heads)
    run, args = RecipeParser(train.USAGE).parse(["--config", recipe("lora"), *words])
    start = find_start(run)
    settle_pseudo_heads(start, run)
    assert run.mixing_scale == 2
    settle_training_options(start, run)
    assert run.mixing_scale == (2 if mixes else None)
    assert ("Note: mixing_scale=2.0 is left out: " in capsys.readouterr().out) is not mixes
    model = prepare_model(start, run_config(start, run, args), run, args)
    assert bool(trained_mixing(model)) is mixes


def test_a_record_and_a_card_leave_out_a_rate_without_a_mixing(tmp_path):
    saved(pair_heads(decoder("llama"), 2), tmp_path / "paired")
    rows = write_jsonl(tmp_path / "rows.jsonl", training_rows(20))
    short = {"max_steps": 1, "eval_size": 0, "eval_strategy": "no", "eval_on_start": "false"}
    words = sizes(str(tmp_path / "paired"), rows, tmp_path / "run", num_pseudo_heads="null", **short)
    train.main(["--config", recipe("lora"), *words])
    assert json.loads((tmp_path / "run" / "run.json").read_text())["recipe"]["mixing_scale"] is None
    assert "| `mixing_scale` |" not in (tmp_path / "run" / "final" / "README.md").read_text()


def test_the_experts_of_the_best_checkpoint_end_in_the_final_model(tmp_path, monkeypatch):
    evaluate = SFTRecipeTrainer.evaluate

    def rising(self, *args, **kwargs):
        return evaluate(self, *args, **kwargs) | {"eval_loss": float(self.state.global_step)}

    monkeypatch.setattr(SFTRecipeTrainer, "evaluate", rising)
    saved(decoder("qwen3_moe"), tmp_path / "plain")
    train.main(arguments(tmp_path, "plain", "run", num_pseudo_heads=2, load_best_model_at_end="true"))
    final, best = (load_model(find_source(tmp_path / "run" / name)) for name in ("final", "checkpoint-2"))
    for (key, weight), other in zip(final.named_parameters(), best.parameters(), strict=True):
        assert torch.equal(weight, other), key
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert "| Weights | those of step 2, with a held-out loss of " in card


@pytest.mark.parametrize("name", DECODERS)
def test_packed_rows_have_the_loss_of_padded_ones(name, tmp_path):
    """Compare a step of TRL's trainer on packed rows (bfd) with one on padded rows."""
    rows = [{"input_ids": ids[:length].tolist()} for ids, length in zip(random_ids(6, 30), (30, 9, 17, 5, 22, 11))]
    losses = {}
    for packing in (False, True):
        model = interleave_heads(decoder(name), 2)
        before = [weight.detach().clone() for weight in mixing_parameters(model)]
        options = {"packing": packing, "packing_strategy": "bfd", "max_length": 32, "learning_rate": 1e-2}
        args = SFTConfig(**one_step(tmp_path, per_device_train_batch_size=6, **options))
        trainer = SFTTrainer(
            model, args=args, train_dataset=Dataset.from_list(rows), processing_class=byte_tokenizer()
        )
        assert len(trainer.train_dataset) == (4 if packing else 6)
        trainer.train()
        losses[packing] = trainer.state.log_history[0]["loss"]
        assert before and all(not torch.equal(*pair) for pair in zip(mixing_parameters(model), before, strict=True))
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)


def with_loaded_mixing(model, num_pseudo_heads, sliding_window):
    """Interleave a model by a trained mixing alone, as `save_adapter` saved it."""
    trained = interleave_heads(copy.deepcopy(model), num_pseudo_heads, sliding_window=sliding_window)
    for weight in mixing_parameters(trained):
        torch.nn.init.normal_(weight.data, std=0.01)
    with tempfile.TemporaryDirectory() as place:
        save_adapter(trained, place)
        return load_adapter(model, place)


@pytest.mark.parametrize(
    ("change", "window", "reference"),
    [
        (interleave_heads, None, False),
        (interleave_heads, 4, False),
        (interleave_heads, 4, True),
        (pair_heads, None, False),
        (with_loaded_mixing, None, False),
    ],
)
@pytest.mark.filterwarnings("ignore:.*are paired")
def test_the_reference_of_dpo_computes_what_the_model_does_or_is_refused(change, window, reference, tmp_path):
    """Have TRL load the reference by the name of the model, as it does where none is given: it is empty."""
    plain = saved(decoder("llama"), tmp_path / "plain")
    model, other = (change(AutoModelForCausalLM.from_pretrained(plain), 2, sliding_window=window) for _ in range(2))
    rows = Dataset.from_list([{"prompt": "What is 2 + 2?", "chosen": "It is 4.", "rejected": "It is 5, of course."}])
    options = {
        "args": DPOConfig(**one_step(tmp_path / "out", per_device_train_batch_size=1)),
        "train_dataset": rows,
        "processing_class": byte_tokenizer(),
    }
    if not reference:
        with pytest.raises(OSError, match="Repo id must .*: ''"):
            DPOTrainer(model, **options)
        return
    trainer = DPOTrainer(model, ref_model=other, **options)
    trainer.train()
    # Before the first step model and reference are the same, and the margin of the rewards is zero.
    assert trainer.state.log_history[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
