"""Test that lm-eval, given a saved checkpoint with its shipped code only, sees the model of a direct call."""

import json

import pytest
import torch
from helpers import EVERY_KIND, GEOMETRIES, random_model, small_config
from tiny_sources import tiny_tokenizer

from iha_io.checkpoint_io import run_in_clean_process


pytest.importorskip("lm_eval", reason="lm-eval is not installed")

TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
""",
    "continuations": """
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: ""
generation_kwargs: {until: ["</s>"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
# One process for everything: starting lm-eval takes longer than all of its work here.
PROGRAM = """
import lm_eval.evaluator
from lm_eval.tasks import TaskManager

lm_eval.evaluator.add_env_info = lambda storage: None  # it would run `pip list` each time
tasks = TaskManager(include_path=request["tasks"], include_defaults=False)
result = []
for model in request["models"]:
    answer = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": model, "trust_remote_code": True, "dtype": "float32"},
        tasks=["choices", "continuations"],
        batch_size=4,  # of six documents: every batch is padded
        device="cpu",
        task_manager=tasks,
        bootstrap_iters=0,
    )
    samples = {
        task: [sample["resps"] for sample in sorted(rows, key=lambda sample: sample["doc_id"])]
        for task, rows in answer["samples"].items()
    }
    result.append({"accuracy": answer["results"]["choices"]["acc,none"], **samples})
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
    models = {}
    for geometry, fields in {"hybrid": GEOMETRIES["hybrid"], "every_kind": EVERY_KIND}.items():
        models[geometry] = random_model(small_config(eos_token_id=2, bos_token_id=1, **fields))
        models[geometry].save_pretrained(tmp_path / geometry)
        tiny_tokenizer().save_pretrained(tmp_path / geometry)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in documents()), encoding="utf-8")
    (tmp_path / "tasks").mkdir()
    for name, text in TASKS.items():
        data = (
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {rows}}}}}\ntest_split: test\n"
        )
        (tmp_path / "tasks" / f"{name}.yaml").write_text(data + text, encoding="utf-8")

    request = {"tasks": str(tmp_path / "tasks"), "models": [str(tmp_path / geometry) for geometry in models]}
    answers = run_in_clean_process(PROGRAM, request)
    for answer, model in zip(answers, models.values(), strict=True):
        expected = [
            [log_likelihood(model, row["context"], choice) for choice in row["choices"]] for row in documents()
        ]
        best = [likelihoods.index(max(likelihoods)) for likelihoods in expected]
        replies = []
        for row in documents():
            inputs = tiny_tokenizer()(row["context"], return_tensors="pt")
            output = model.generate(inputs["input_ids"], max_new_tokens=8, do_sample=False)
            reply = output[0, inputs["input_ids"].shape[1] :]
            replies.append(tiny_tokenizer().decode(reply, skip_special_tokens=True))
        assert len(set(replies)) == len(replies)
        measured = [[response[0][0] for response in responses] for responses in answer["choices"]]
        assert torch.tensor(measured, dtype=torch.float64).sub(torch.tensor(expected)).abs().max() < 1e-4
        assert answer["accuracy"] == pytest.approx(best.count(0) / len(best))
        assert [responses[0][0].strip() for responses in answer["continuations"]] == replies
