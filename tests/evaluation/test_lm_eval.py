"""Test that lm-eval, given a saved checkpoint with its shipped code only, sees the model of a direct call."""

import pytest
import torch
from helpers import GEOMETRIES, random_model, small_config
from tiny_sources import tiny_tokenizer
from tiny_training import write_jsonl

from iha.processes import run_in_clean_process


pytest.importorskip("lm_eval", reason="lm-eval is not installed")

TASK = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""
PROGRAM = """
import lm_eval.evaluator
from lm_eval.tasks import TaskManager

lm_eval.evaluator.add_env_info = lambda storage: None  # it would run `pip list` each time
tasks = TaskManager(include_path=request["tasks"], include_defaults=False)
answer = lm_eval.simple_evaluate(
    model="hf",
    model_args={"pretrained": request["model"], "trust_remote_code": True, "dtype": "float32"},
    tasks=["choices"],
    batch_size=4,  # of six documents: every batch is padded
    device="cpu",
    task_manager=tasks,
    bootstrap_iters=0,
)
samples = sorted(answer["samples"]["choices"], key=lambda sample: sample["doc_id"])
result = {"accuracy": answer["results"]["choices"]["acc,none"], "choices": [sample["resps"] for sample in samples]}
loaded = [name for name in sys.modules if name.endswith(".modeling_iha")]
assert loaded and all(name.startswith("transformers_modules.") for name in loaded), loaded
"""


def documents() -> list[dict]:
    """Return contexts and choices of different lengths, so that a batch is padded."""
    words = sorted(word for word in tiny_tokenizer().get_vocab() if word.isalpha())
    return [
        {
            "context": " ".join(words[i : 3 * i]),
            "choices": [f" {words[i]}", f" {words[-i]} {words[2 * i]}", f" {' '.join(words[i : 2 * i])}"],
        }
        for i in (2, 7, 3, 11, 5, 4)
    ]


def log_likelihood(model, context: str, choice: str) -> float:
    tokenizer = tiny_tokenizer()
    length = len(tokenizer(context)["input_ids"])
    input_ids = tokenizer(context + choice, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        log_probs = model(input_ids).logits[0, length - 1 : -1].log_softmax(-1)
    return log_probs.gather(-1, input_ids[0, length:, None]).sum().item()


def test_lm_eval_sees_the_model_of_a_direct_call(tmp_path):
    model = random_model(small_config(eos_token_id=2, bos_token_id=1, **GEOMETRIES["hybrid"]))
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    rows = write_jsonl(tmp_path / "rows.jsonl", documents())
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "choices.yaml").write_text(TASK.format(rows=rows), encoding="utf-8")
    answer = run_in_clean_process(PROGRAM, {"tasks": str(tmp_path / "tasks"), "model": str(tmp_path / "model")})
    expected = [[log_likelihood(model, row["context"], choice) for choice in row["choices"]] for row in documents()]
    best = [likelihoods.index(max(likelihoods)) for likelihoods in expected]
    measured = [[response[0][0] for response in responses] for responses in answer["choices"]]
    assert torch.tensor(measured, dtype=torch.float64).sub(torch.tensor(expected)).abs().max() < 1e-4
    assert answer["accuracy"] == pytest.approx(best.count(0) / len(best))
