"""Test fine-tuning: every recipe trains, resumes and saves."""

import json
import shutil
import sys

import pytest
import torch
from helpers import random_model
from tiny_training import byte_config, byte_tokenizer, recipe, sizes, with_template
from transformers import GenerationConfig

from iha.checkpoints import end_tokens, load_model, load_tokenizer
from iha.errors import UserError
from iha.processes import load_in_clean_process
from iha.sources import find_source
from modeling_iha import IHAConfig, IHAForCausalLM
from sft import make_reasoning_data, score_reasoning, train
from sft.base_model import stop_at_end_of_turn
from sft.data import load_rows


pytestmark = pytest.mark.usefixtures("in_repository_root")


# Training


def test_a_recipe_saves_a_checkpoint_that_stands_alone(tiny, rows_file, tmp_path):
    output = tmp_path / "demo"
    train.main(["--config", recipe("demo"), *sizes(tiny, rows_file, output)])

    losses = json.loads((output / "loss.json").read_text())
    assert [step for step, _ in losses["train"]] == [1, 2, 3, 4]
    assert {2, 4} <= {step for step, _ in losses["eval"]}

    final = output / "final"
    assert not list(output.glob(".final*"))
    assert {"model.safetensors", "modeling_iha.py", "tokenizer.json", "chat_template.jinja", "README.md"} <= {
        file.name for file in final.iterdir()
    }
    prompt = [{"role": "user", "content": "1+1?"}]
    reply = load_in_clean_process(final, prompt=prompt, max_new_tokens=4)
    trained = IHAForCausalLM.from_pretrained(final)
    source = IHAForCausalLM.from_pretrained(tiny)
    before, after = (dict(model.named_parameters()) for model in (source, trained))
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert {name for name in after if "_mix" in name or "collapse" in name} <= changed
    inputs = with_template("smollm2.jinja").apply_chat_template(
        prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    here = trained.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
    assert reply["token_ids"] == here[0, inputs["input_ids"].shape[1] :].tolist()

    with pytest.raises(UserError, match="has finished"):
        train.main(["--config", recipe("demo"), *sizes(tiny, rows_file, output)])


@pytest.mark.parametrize("only", ["true", "false"])
def test_the_final_model_stops_at_the_end_of_a_turn(only, rows_file, tmp_path):
    """Begin with a base that ends texts with another token."""
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    random_model(byte_config(eos_token_id=tokenizer.eos_token_id)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    short = {"max_steps": 1, "eval_size": 0, "eval_strategy": "no", "eval_on_start": "false", "bf16": "false"}
    short["assistant_only_loss"] = only
    train.main(["--config", recipe("demo"), *sizes(tmp_path / "base", rows_file, tmp_path / "run", **short)])
    ends = GenerationConfig.from_pretrained(tmp_path / "run" / "final").eos_token_id
    assert set(ends) == set(tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))


def test_a_template_without_an_end_of_turn_is_said(capsys):
    model, tokenizer = random_model(byte_config(eos_token_id=None)), byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    stop_at_end_of_turn(model, tokenizer)
    assert "ends a turn with no special token" in capsys.readouterr().out
    tokenizer.add_tokens(["\n"])  # which the answer may contain
    stop_at_end_of_turn(model, tokenizer)
    assert "ends a turn with no special token" in capsys.readouterr().out
    assert end_tokens(model.generation_config) == []
    assert model.generation_config.eos_token_id is None


# Bad input


@pytest.mark.parametrize(
    "overrides, named, reads_rows",
    [
        ({"attn_implementation": "flash_attention_2"}, "package for FlashAttention2 doesn't seem to be", False),
        ({"use_peft": "true", "lora_target_modules": "absent"}, "no module named absent", False),
        ({"use_peft": "true", "lora_target_modules": "lm_head"}, "PEFT adapter to `lm_head` is not supported", True),
        ({"eval_size": 20}, "eval_size=20", True),
        ({"max_length": 10}, "max_length=10", True),
        ({"dataloader_drop_last": "true", "per_device_train_batch_size": 17}, "rows do not fill one batch", True),
    ],
)
def test_an_impossible_run_is_refused_before_it_starts(
    overrides, named, reads_rows, tiny, rows_file, tmp_path, monkeypatch
):
    if not reads_rows:
        monkeypatch.setattr(train, "training_rows", lambda *_: pytest.fail("the rows were read"))
    with pytest.raises(UserError, match=named):
        train.main(["--config", recipe("demo"), *sizes(tiny, rows_file, tmp_path / "run", **overrides)])
    assert not (tmp_path / "run" / "final").exists()


def test_generation_settings_that_cannot_be_saved_are_refused_before_the_training(tiny, rows_file, tmp_path):
    shutil.copytree(tiny, tmp_path / "model")
    settings = {"do_sample": False, "temperature": 0.6}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        UserError, match="Transformers would not save its generation_config.json after the training; .*temperature"
    ):
        train.main(["--config", recipe("demo"), *sizes(tmp_path / "model", rows_file, tmp_path / "run")])


# Reasoning rows


@pytest.mark.parametrize("generator", ["chain_sum", "gcd", "spell_backward", "basic_arithmetic"])
def test_reasoning_rows_are_worked_and_right(generator, tmp_path):
    out = tmp_path / "rows.jsonl"
    make_reasoning_data.main([str(out), "--rows", "20", "--generator", generator])
    rows = score_reasoning.read_rows(out)
    questions = {row["conversations"][0]["value"] for row in rows}
    assert len(rows) == len(questions) == 20
    assert [message["role"] for message in load_rows(str(out))[0]["messages"]] == ["system", "user", "assistant"]
    for row in rows:
        thought = row["conversations"][1]["value"].partition("<|end_of_thought|>")[0].splitlines()[1:]
        answer = row["entry"]["answer"]
        if generator == "chain_sum":
            assert len(thought) == row["entry"]["metadata"]["num_terms"] - 1
            assert all(eval(line.replace("=", "==")) for line in thought)
            assert not thought or thought[-1].endswith(f"= {answer}")
        elif generator == "gcd":
            assert all(eval(line.replace("mod", "%").replace("=", "==")) for line in thought)
            assert thought[-1].endswith("= 0") and thought[-1].split()[2] == answer
        elif generator == "spell_backward":
            assert thought[1].replace(" ", "") == answer
        else:
            assert "thought" not in row["conversations"][1]["value"]

    with pytest.raises(UserError, match="exists"):
        make_reasoning_data.main([str(out), "--rows", "2"])


def test_seeds_reproduce_and_excluded_questions_do_not_return(tmp_path):
    options = ["--options", "min_terms=2", "max_terms=2", "max_digits=1"]
    files = [tmp_path / name for name in ("train.jsonl", "again.jsonl", "test.jsonl", "more.jsonl")]
    make_reasoning_data.main([str(files[0]), "--rows", "150", *options])
    make_reasoning_data.main([str(files[1]), "--rows", "150", *options])
    make_reasoning_data.main([str(files[2]), "--rows", "40", "--seed", "1", "--exclude", str(files[0]), *options])
    first, again, test = ([row["entry"]["question"] for row in score_reasoning.read_rows(file)] for file in files[:3])
    assert first == again
    assert not set(first) & set(test)
    # There are 10 * 2 * 10 sums of two digits.
    with pytest.raises(UserError, match="only 50 more questions"):
        make_reasoning_data.main([str(files[3]), "--rows", "1_000_000", "--exclude", str(files[0]), *options])


@pytest.mark.parametrize(
    "reply, solution",
    [
        ("<|begin_of_thought|>\n3\n<|end_of_thought|>\n<|begin_of_solution|>\n-4\n<|end_of_solution|>", "-4"),
        ("<|begin_of_solution|> 7", "7"),
        ("<|begin_of_thought|>\nIt is 3", ""),
        ("<think>\nIs it\n<|begin_of_solution|>\n3\n<|end_of_solution|>?", ""),
        ("<|begin_of_thought|>\n3\n<|end_of_thought|>", ""),
        ("<|begin_of_solution|>\n\N{MINUS SIGN}4\n<|end_of_solution|>", "-4"),
        ("So it is \N{MINUS SIGN}4.", "-4"),
        ("6 = 10-4", "4"),
        ("First 3, so the answer is 1,204.5.", "1,204.5"),
        ("no number ", "no number"),
    ],
)
def test_the_solution_is_found_in_a_reply(reply, solution):
    assert make_reasoning_data.extract_solution(reply) == solution


def test_scoring_counts_what_the_verifier_accepts(tiny, tmp_path, monkeypatch, capsys):
    out = tmp_path / "rows.jsonl"
    make_reasoning_data.main([str(out), "--rows", "4"])
    rows = score_reasoning.read_rows(out)
    replies = [f"It is {row['entry']['answer']}" for row in rows[:3]] + ["It is 123456"]
    monkeypatch.setattr(score_reasoning, "generate_replies", lambda *_: replies)
    figures = tmp_path / "figures.json"
    result = score_reasoning.main([tiny, str(out), "--json", str(figures)])
    assert (result["accuracy"], result["correct"], result["rows"]) == (0.75, 3, 4)
    assert json.loads(figures.read_text()) == result
    assert capsys.readouterr().out.splitlines()[-1] == "3 of 4: 75.0%"

    make_reasoning_data.main([str(tmp_path / "words.jsonl"), "--rows", "1", "--generator", "spell_backward"])
    out.write_text(out.read_text() + (tmp_path / "words.jsonl").read_text())
    replies.append("nonsense")
    result = score_reasoning.main([tiny, str(out)])
    assert (result["parts"]["chain_sum"]["correct"], result["parts"]["spell_backward"]["rows"]) == (3, 1)
    lines = ["chain_sum: 3 of 4: 75.0%", "spell_backward: 0 of 1: 0.0%", "all: 3 of 5: 60.0%"]
    assert capsys.readouterr().out.splitlines()[-3:] == lines
    monkeypatch.setattr(score_reasoning, "generate_replies", lambda *_: ["nonsense"] * 2)
    result = score_reasoning.main([tiny, str(out), str(tmp_path / "words.jsonl"), "--limit", "1"])
    files = [str(out), str(tmp_path / "words.jsonl")]
    assert {part: each["rows"] for part, each in result["parts"].items()} == dict.fromkeys(files, 1)


def test_the_loss_of_an_answer_is_that_of_its_tokens(tiny, tmp_path):
    model, tokenizer = load_model(find_source(tiny)), load_tokenizer(find_source(tiny), sys.maxsize)
    prompt, answer = [{"role": "user", "content": "2 + 3"}], "It is 5"
    (loss,) = score_reasoning.answer_losses(model, tokenizer, [prompt], [answer])
    before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    own = tokenizer(answer, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([before + own])
    labels = torch.tensor([[-100] * len(before) + own])
    with torch.no_grad():
        expected = model(ids, labels=labels).loss * len(own)
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_no_row_runs_code_that_nobody_trusts(tmp_path):
    """Give a verifier that evaluates the row's answer a call that leaves a trace."""
    out, trace = tmp_path / "rows.jsonl", tmp_path / "trace"
    make_reasoning_data.main([str(out), "--rows", "1", "--generator", "number_sorting"])
    (row,) = score_reasoning.read_rows(out)
    row["entry"]["answer"] = f"[str(open({str(trace)!r}, 'w').name)]"
    with pytest.raises(UserError, match="row 1: the verifier of 'number_sorting' may run fields of the row as code"):
        score_reasoning.check_rows([row])
    assert not trace.exists()
    score_reasoning.check_rows(score_reasoning.read_rows(out), trust_rows=True)


def test_prompts_that_leave_no_room_for_a_reply_are_refused(tiny):
    model, tokenizer = random_model(IHAConfig.from_pretrained(tiny)), with_template("smollm2.jinja")
    model.config.max_position_embeddings = positions = 150
    prompts = [[{"role": "user", "content": text}] for text in ("1", "1" * 30)]
    longest = len(tokenizer.apply_chat_template(prompts[1], add_generation_prompt=True)["input_ids"])
    room = positions - longest
    assert len(score_reasoning.generate_replies(model, tokenizer, prompts, 2, room)) == 2
    with pytest.raises(UserError, match=f"longest prompt has {longest} tokens and its reply .* {room + 1} .*150 pos"):
        score_reasoning.generate_replies(model, tokenizer, prompts, 2, room + 1)


def test_replies_do_not_depend_on_the_batch(tiny, capsys):
    model = random_model(IHAConfig.from_pretrained(tiny))
    tokenizer = with_template("smollm2.jinja")
    tokenizer.pad_token = None
    prompts = [[{"role": "user", "content": "1" * length}] for length in (1, 9, 30)]
    together = score_reasoning.generate_replies(model, tokenizer, prompts, 3, 12)
    assert "3/3" in capsys.readouterr().err  # the bar counts rows, because a short test has few batches
    alone = score_reasoning.generate_replies(model, tokenizer, prompts, 1, 12)
    assert together == alone
    assert len(set(together)) == 3


def test_a_reply_begins_with_the_thought_that_its_prompt_opens(tiny):
    model, tokenizer = random_model(IHAConfig.from_pretrained(tiny)), with_template("smollm2.jinja")
    prompts = [[{"role": "user", "content": "1+1?"}]]
    tokenizer.chat_template += "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
    (reply,) = score_reasoning.generate_replies(model, tokenizer, prompts, 1, 4)
    assert reply.startswith("<think>") and make_reasoning_data.extract_solution(reply) == ""


def test_replies_are_greedy_whatever_the_checkpoint_asks_for(tiny):
    model, tokenizer = random_model(IHAConfig.from_pretrained(tiny)), with_template("smollm2.jinja")
    prompts = [[{"role": "user", "content": "1+1?"}]]
    expected = score_reasoning.generate_replies(model, tokenizer, prompts, 1, 12)
    model.generation_config.repetition_penalty = 50.0
    model.generation_config.no_repeat_ngram_size = 1
    model.generation_config.eos_token_id = None
    assert score_reasoning.generate_replies(model, tokenizer, prompts, 1, 12) == expected
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id]
