"""Test that rows of every schema become messages or text, and right labels, and that bad rows are named."""

import gzip
import json
import os
import re
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest
from datasets import Dataset, IterableDataset
from helpers import small_config
from tiny_training import (
    TEMPLATES,
    byte_tokenizer,
    interrupted_at,
    recipe,
    sizes,
    training_rows,
    with_template,
    write_jsonl,
)
from trl import SFTConfig

from iha_io.command_io import UserError
from modeling_iha import IHAForCausalLM
from sft import data, prepare, train
from sft.arguments import RunArguments
from sft.data import load_rows, to_messages, tokenize
from sft.trainer import MixingTrainer
from sft.training_rows import check_rows, epoch_summary, split_rows
from sft.training_rows import training_rows as rows_of_run


CONVERSATIONS = [
    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi \n\n"},
        {"role": "assistant", "content": "\nHello, <b>you</b>.\n"},
        {"role": "user", "content": "assistant\nBye"},
        {"role": "assistant", "content": "Bye <|im_start|>"},
    ],
    [
        {"role": "assistant", "content": "I begin."},
        {"role": "user", "content": "Größe 🙂?"},
        {"role": "assistant", "content": "日本 🙂"},
    ],
]


pytestmark = pytest.mark.usefixtures("in_repository_root")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Keep tests from each other's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def rows_file(tmp_path) -> str:
    return write_jsonl(tmp_path / "rows.jsonl", training_rows(20))


def run_of(name: str, tmp_path: Path, **keys):
    run = RunArguments(
        model_name_or_path="none",
        dataset_name=str(name),
        **{key: keys.pop(key) for key in list(keys) if hasattr(RunArguments, key)},
    )
    fields = {"assistant_only_loss": True, "max_length": 128, "use_cpu": True, "bf16": False, "report_to": "none"}
    return run, SFTConfig(output_dir=str(tmp_path / "run"), **{**fields, **keys})


# Rows

GOOD_TURNS = [{"from": "user", "value": "Q"}, {"from": "assistant", "value": "A"}]


@pytest.mark.parametrize(
    "row",
    [
        {"system": "S", "conversations": GOOD_TURNS},
        {"source": "x", "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {"messages": None, "system": None, "conversations": GOOD_TURNS},
        {"conversations": [GOOD_TURNS[0] | {"train": None}, GOOD_TURNS[1] | {"weight": 1.0, "train": True}]},
    ],
    ids=["openthoughts-114k", "openthoughts3", "messages", "columns-filled-with-null", "turns-to-learn"],
)
def test_both_openthoughts_schemas_become_messages(row):
    system = [{"role": "system", "content": "S"}] if row.get("system") else []
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    assert to_messages(row, "row 1") == system + turns


@pytest.mark.parametrize(
    "bad, named",
    [
        ({"prompt": "Q"}, "column 'conversations' .* is missing; the row has .*prompt"),
        ({"conversations": [{"from": "robot", "value": "A"}]}, "0.from is 'robot'.*'human'"),
        ({"conversations": GOOD_TURNS[:1]}, "column 'conversations': the last turn must be the assistant's, got user"),
        ({"messages": [{"role": "assistant", "content": " \n"}]}, "turn 1, 'content': the text is empty"),
        ({"messages": [{"role": "assistant", "content": "A\ud83d"}]}, "0.content is .*valid string"),
        ({"messages": [{"role": "assistant", "content": "A", "tool_calls": [{"id": 1}]}]}, "turn 1: 'tool_calls'"),
        ({"messages": [{"role": "assistant", "content": "A", "reasoning": "B"}]}, "turn 1: 'reasoning' would be"),
        ({"messages": [{"role": "assistant", "content": "A", "weight": 0}]}, "turn 1: 'weight' is 0, and the turn"),
        ({"messages": [{"role": "assistant", "content": "A", "train": False}]}, "turn 1: 'train' is False"),
        ({"system": "S", "messages": CONVERSATIONS[1]}, "column 'system' and a turn of 'messages' both hold"),
        ({"messages": CONVERSATIONS[0], "tools": [{"name": "f"}]}, "column 'tools' would be lost"),
        ({"messages": CONVERSATIONS[0], "conversations": GOOD_TURNS}, "'messages' and 'conversations' both"),
    ],
)
def test_a_bad_row_is_named_with_its_column(tmp_path, bad, named):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"conversations": GOOD_TURNS}, bad])
    with pytest.raises(UserError, match=f"rows.jsonl, row 2.*{named}"):
        load_rows(path)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_changed_file_of_equal_size_and_time_is_read_again(suffix, tmp_path):
    path = tmp_path / f"rows.{suffix}"
    for text in ("one", "two"):
        rows = Dataset.from_list([{"text": text}])
        (rows.to_json if suffix == "jsonl" else rows.to_parquet)(path)
        os.utime(path, ns=(0, 0))
        assert list(load_rows(str(path))) == [{"text": text, "prompt_size": 0}]


def test_what_another_version_has_cached_is_made_again(rows_file, tmp_path, monkeypatch):
    def make() -> dict:
        return tokenize(load_rows(rows_file), with_template("chatml.jinja"), assistant_only=True)[0]

    old = make()
    monkeypatch.setattr(data._text, "__code__", (lambda value, place, may_be_empty: value + "!").__code__)
    assert make() == old  # as long as the file is the same
    (tmp_path / "data.py").write_text("# updated")
    monkeypatch.setattr(data, "__file__", str(tmp_path / "data.py"))
    assert make()["input_ids"] != old["input_ids"]


# Chat templates and labels


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_smollm2_template_renders_what_the_stock_template_renders(messages):
    stock, ours = (
        [
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
            for add_generation_prompt in (False, True)
        ]
        for tokenizer in (byte_tokenizer(), with_template("smollm2.jinja"))
    )
    assert ours == stock


@pytest.mark.parametrize("template", ["smollm2.jinja", "chatml.jinja"])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_labels_cover_the_assistants_text_and_its_end_of_turn_token(template, messages):
    tokenizer = with_template(template)
    if template == "smollm2.jinja" and messages[0]["role"] != "system":
        default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        expected_messages = [{"role": "system", "content": default}, *messages]
    else:
        expected_messages = messages
    input_ids, labels = [], []
    for message in expected_messages:
        learned = message["role"] == "assistant"
        for text, is_label in (
            (f"<|im_start|>{message['role']}\n", False),
            (f"{message['content']}<|im_end|>", learned),
            ("\n", False),
        ):
            tokens = tokenizer.encode(text)
            input_ids += tokens
            labels += tokens if is_label else [-100] * len(tokens)

    row = tokenize(Dataset.from_list([{"messages": messages}]), tokenizer, assistant_only=True)[0]
    assert row["input_ids"] == input_ids
    assert row["labels"] == labels


def test_a_template_that_would_not_teach_the_model_to_stop_is_refused(rows_file):
    without_chatml = byte_tokenizer(special=("<|endoftext|>", "</s>"))
    without_chatml.chat_template = (TEMPLATES / "chatml.jinja").read_text(encoding="utf-8")
    for tokenizer in (byte_tokenizer(), without_chatml):  # whose template marks nothing
        with pytest.raises(UserError, match="end-of-turn"):
            tokenize(load_rows(rows_file), tokenizer, assistant_only=True)


def test_cut_rows_are_counted_and_rows_without_an_answer_refused(tmp_path, capsys):
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "0123456789" * 3}]}
        for question in ("a", "a" * 40, "a")
    ]
    path, tokenizer = write_jsonl(tmp_path / "rows.jsonl", rows), with_template("chatml.jinja")
    run, args = run_of(path, tmp_path, max_length=70)
    tokenized, _ = rows_of_run(run, args, tokenizer)
    assert (
        "1 of 3 rows are longer than max_length=70 tokens (33.3%) and are cut on the right: 21 of 195 tokens are lost "
        "(10.8%)." in capsys.readouterr().out
    )
    trainer = trainer_of(args, tokenized, tokenizer)
    lengths = [(len(row["input_ids"]), len(row["labels"])) for row in trainer.train_dataset]
    assert lengths == [(52, 52), (70, 70), (52, 52)]
    args.max_length = 55
    with pytest.raises(UserError, match=r"1 rows have no assistant token.*max_length=55.*row 2"):
        rows_of_run(run, args, tokenizer)


def trainer_of(args: SFTConfig, rows: Dataset, tokenizer, eval_rows=None) -> MixingTrainer:
    model = IHAForCausalLM(small_config(vocab_size=len(tokenizer)))
    return MixingTrainer(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
    )


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template, refused",
    [
        ("{# nothing #}", "row 1: the chat template renders nothing"),
        ("{{ raise_exception('roles must alternate') }}", "row 1: the chat template does not take it: roles must"),
        ("{{ 1 / 0 }}", "row 1: the chat template does not take it: division by zero"),
        (LOOP, "row 1: the chat template does not take it: it takes more than 0.2 s"),
    ],
)
def test_a_template_that_fails_is_refused(template, refused, rows_file, monkeypatch):
    monkeypatch.setattr(data, "RENDER_SECONDS", 0.2)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=refused):
        tokenize(load_rows(rows_file), tokenizer, assistant_only=False)
    # Before any row, for the loss on the assistant's text, the template is tried on turns of its own.
    tokenizer.chat_template = f"{{% generation %}}{template}{{% endgeneration %}}"
    with pytest.raises(UserError, match="chat template"):
        tokenize(load_rows(rows_file), tokenizer, assistant_only=True)


# Sources


def test_every_type_of_file_holds_the_same_rows(rows_file, tmp_path):
    expected = list(load_rows(rows_file))
    path, raw = Path(rows_file), Path(rows_file).read_bytes()
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "misnamed.jsonl").write_bytes(gzip.compress(raw))
    Dataset.from_list([json.loads(line) for line in raw.splitlines()]).to_parquet(tmp_path / "rows.parquet")
    lines = raw.splitlines(keepends=True)
    (tmp_path / "folder").mkdir()
    for name, part in (("b", lines[9:]), ("a", lines[:9])):
        (tmp_path / "folder" / f"{name}.jsonl").write_bytes(b"".join(part))
    for name in (path.name, "packed.jsonl.gz", "misnamed.jsonl", "rows.parquet", "folder"):
        for streaming in (False, True):
            rows = load_rows(str(tmp_path / name), streaming=streaming)
            assert isinstance(rows, IterableDataset) == streaming
            assert list(rows) == expected, name


def test_plain_text_is_learned_whole_and_ends(tmp_path):
    text, tokenizer = "Größe 🙂\n\nEnd", byte_tokenizer()
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "with_bom.txt").write_text(text, encoding="utf-8-sig")
    write_jsonl(tmp_path / "rows.jsonl", [{"text": text}])
    for name in ("a.txt", "b.txt.gz", "with_bom.txt", "rows.jsonl"):
        rows = load_rows(str(tmp_path / name))
        (row,) = tokenize(rows, tokenizer, assistant_only=False)
        assert tokenizer.decode(row["input_ids"]) == f"{text}<|im_end|>"
        assert row["labels"] == row["input_ids"] and row["num_tokens"] == len(row["input_ids"])
    with pytest.raises(UserError, match="plain text: set it to false"):
        tokenize(rows, tokenizer, assistant_only=True)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="end-of-sequence"):
        tokenize(rows, tokenizer, assistant_only=False)


@pytest.mark.parametrize(
    "name, content, named",
    [
        ("cut.jsonl.gz", gzip.compress(b'{"text": "Q"}\n' * 99, mtime=0)[:-9], "cannot be decompressed"),
        ("latin.txt", "Größe".encode("latin-1"), "not UTF-8 text"),
        ("empty.txt", b"", "the text is empty"),
        ("rows.csv", b"a,b", "one type among .jsonl"),
        ("empty.jsonl.gz", gzip.compress(b"\n", mtime=0), "holds no rows"),
        ("rows.parquet", b"PAR1", "rows.parquet"),
        ("mixed.jsonl", b'{"text": "Q"}\n{"messages": []}', "row 2, column 'text'"),
        ("pipe.jsonl", None, "pipe.jsonl is no regular file; rows are read more than once"),
    ],
)
def test_a_damaged_file_is_refused(name, content, named, tmp_path):
    os.mkfifo(tmp_path / name) if content is None else (tmp_path / name).write_bytes(content)
    for streaming in (False, True):
        with pytest.raises(UserError) as refused:
            list(load_rows(str(tmp_path / name), streaming=streaming))
        assert named in str(refused.value) and "\n" not in str(refused.value)


# What a run reads


def test_of_a_mixture_only_the_assistants_tokens_are_learned(rows_file, tmp_path):
    write_jsonl(tmp_path / "other.jsonl", [conversation("Why?", "So it is.")])
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(f"[{{path: {rows_file}, share: 0.5}}, {{path: {tmp_path / 'other.jsonl'}, share: 0.5}}]")
    tokenizer = with_template("chatml.jinja")
    run, args = run_of(mixture, tmp_path, per_device_train_batch_size=1)
    trainer = trainer_of(args, rows_of_run(run, args, tokenizer)[0], tokenizer)
    learned = {tokenizer.decode(batch["labels"][batch["labels"] >= 0]) for batch in trainer.get_train_dataloader()}
    assert "So it is.<|im_end|>" in learned
    assert all(re.fullmatch(r"(So it is|It is \d+)\.<\|im_end\|>", text) for text in learned)


@pytest.mark.parametrize(
    "keys, named",
    [
        ({"dataset_streaming": True, "max_steps": 3, "eval_size": 0.5}, "give a number of rows"),
        ({"dataset_train_split": "test"}, "is local and has no split 'test'"),
        ({"padding_free": True}, "padding_free without packing"),
        ({"eval_packing": True}, "eval_packing without packing"),
        ({"packing": True, "packing_strategy": "wrapped"}, "'wrapped' lets documents attend to one another"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys, named, rows_file, tmp_path):
    check_rows(*run_of(rows_file, tmp_path))
    with pytest.raises(UserError, match=named):
        check_rows(*run_of(rows_file, tmp_path, **keys))


TURNS = [{"role": role, "content": text} for role, text in (("user", "1+1?"), ("assistant", "2."), ("user", "+1?"))]


@pytest.mark.parametrize(
    "row, learned",
    [
        ({"prompt": "The sky is", "completion": " blue."}, " blue.<|im_end|>"),
        ({"prompt": TURNS, "completion": [{**TURNS[1], "content": "3."}]}, "3.<|im_end|>\n"),
        ({"prompt": TURNS, "completion": [{**TURNS[1], "content": "3."}], "system": "Add."}, "3.<|im_end|>\n"),
    ],
    ids=["text", "turns", "system"],
)
def test_of_a_prompt_and_its_completion_the_completion_is_learned(row, learned, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<|im_end|>"
    source = load_rows(write_jsonl(tmp_path / "rows.jsonl", [row, row]))
    tokens = next(iter(tokenize(source, tokenizer, assistant_only=False)))
    labels = [label for label in tokens["labels"] if label != -100]
    assert tokenizer.decode(labels) == learned and tokens["input_ids"][-len(labels) :] == labels
    assert "prompt_size" not in tokens and tokens["first_label"] == len(tokens["labels"]) - len(labels)


def test_a_stream_holds_out_its_first_rows(rows_file, tmp_path):
    tokenizer = with_template("chatml.jinja")
    whole = list(tokenize(load_rows(rows_file), tokenizer, assistant_only=True))
    run, args = run_of(rows_file, tmp_path, eval_size=4, dataset_streaming=True, max_steps=2)
    rows, held_out = rows_of_run(run, args, tokenizer)
    assert list(held_out) == whole[:4] and list(rows) == whole[4:]
    run.eval_size = 20
    with pytest.raises(UserError, match="eval_size=20 leaves no row of the 20"):
        rows_of_run(run, args, tokenizer)
    args.max_length = 3
    with pytest.raises(UserError, match="no streamed row has a token to learn within max_length=3"):
        rows_of_run(run, args, tokenizer)


def test_workers_stream_no_row_that_is_held_out(tmp_path):
    folder, written = tmp_path / "rows", training_rows(20)
    folder.mkdir()
    for name, part in (("a", written[:10]), ("b", written[10:])):
        write_jsonl(folder / f"{name}.jsonl", part)
    keys = {"eval_size": 4, "dataset_streaming": True, "max_steps": 9, "dataloader_num_workers": 2}
    run, args = run_of(folder, tmp_path, **keys, per_device_train_batch_size=1)
    tokenizer = with_template("chatml.jinja")
    rows, held_out = rows_of_run(run, args, tokenizer)
    assert args.dataloader_multiprocessing_context == "fork"  # the default until Python 3.14
    trained = [batch["input_ids"][0].tolist() for batch in trainer_of(args, rows, tokenizer).get_train_dataloader()]
    expected = tokenize(load_rows(str(folder)), tokenizer, assistant_only=True)["input_ids"][:]
    assert [*held_out["input_ids"], *trained] == expected


def test_held_out_rows_of_a_stream_in_shards_are_for_one_process(tmp_path):
    shards = {"parts": [1, 2]}
    rows = IterableDataset.from_generator(lambda parts: ({"prompt": part} for part in parts), gen_kwargs=shards)
    keys = {"eval_size": 1, "dataset_streaming": True, "max_steps": 2}
    train_rows, held_out = split_rows(rows, *run_of("rows", tmp_path, **keys, dataloader_num_workers=1))
    assert (list(held_out), list(train_rows)) == ([{"prompt": 1}], [{"prompt": 2}])
    with pytest.raises(UserError, match="eval_size=1 of a stream in 2 shards needs one process"):
        split_rows(rows, *run_of("rows", tmp_path, **keys, dataloader_num_workers=2))


@pytest.mark.parametrize("streaming", [False, True])
def test_no_row_is_both_learned_and_held_out(streaming, tmp_path, capsys):
    path, tokenizer = write_jsonl(tmp_path / "twice.jsonl", training_rows(9) * 2), with_template("chatml.jinja")
    keys = {"eval_size": 5, "max_steps": 2, "dataset_streaming": streaming, "dataloader_drop_last": True}
    run, args = run_of(path, tmp_path, **keys, per_device_eval_batch_size=3)
    rows, held_out = rows_of_run(run, args, tokenizer)
    learned, held = ({str(row["input_ids"]) for row in part} for part in (rows, held_out))
    assert len(held_out) == 5 and not learned & held and len(learned | held) == 9
    if not streaming:
        left_out = 13 - len(rows)
        assert f"{left_out} rows to train on are also held out" in capsys.readouterr().out
        loader = trainer_of(args, rows, tokenizer, held_out).get_eval_dataloader()
        assert sum(len(batch["input_ids"]) for batch in loader) == 5


@pytest.mark.parametrize("streaming", [False, True])
def test_packing_does_not_change_what_is_held_out(streaming, rows_file, tmp_path):
    tokenizer, held = with_template("chatml.jinja"), []
    for packing in (False, True):
        keys = {"packing": packing, "max_steps": 2, "eval_size": 4, "dataset_streaming": streaming}
        run, args = run_of(rows_file, tmp_path, **keys)
        rows, held_out = rows_of_run(run, args, tokenizer)
        held.append([row["input_ids"] for row in held_out])
        trainer = trainer_of(args, rows, tokenizer, held_out)
        assert sorted(sum((row["input_ids"] for row in trainer.eval_dataset), [])) == sorted(sum(held[-1], []))
        trained = sum(len(row["input_ids"]) for row in trainer.train_dataset)
        assert trained == sum(row["num_tokens"] for row in rows)
    assert held[0] == held[1]


@pytest.mark.parametrize(
    "keys, line",
    [
        ({}, "20 rows of 1,055 tokens: 10 steps an epoch of 2 sequences a step, 30 steps in all"),
        ({"packing": True}, " packed into 10 sequences: 5 steps an epoch of 2 sequences a step, 15 steps in all"),
        ({"dataset_streaming": True, "max_steps": 3}, "3 steps of 2 streamed sequences of at most 128 tokens"),
    ],
)
def test_tokens_and_steps_are_stated(keys, line, rows_file, tmp_path):
    tokenizer = with_template("smollm2.jinja")
    run, args = run_of(rows_file, tmp_path, num_train_epochs=3, per_device_train_batch_size=2, **keys)
    rows, _ = rows_of_run(run, args, tokenizer)
    assert line in epoch_summary(trainer_of(args, rows, tokenizer), rows)


# Prepared rows


SMOLLM2 = "sft/chat_templates/smollm2.jinja"


def prepared(source, out: Path, tiny: str, *options) -> dict:
    prepare.main([str(source), str(out), "--tokenizer", tiny, "--chat-template", SMOLLM2, *map(str, options)])
    return json.loads((out / "manifest.json").read_text())


def conversation(question: str, answer: str, **columns) -> dict:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **columns}


def test_prepared_rows_are_the_rows_of_the_source(rows_file, tiny, tmp_path):
    """Compare tokens and labels, some of them cut: everything after them is the same code."""
    prepared(rows_file, tmp_path / "out", tiny)
    tokenizer = with_template("smollm2.jinja")
    raw, ready = (
        rows_of_run(*run_of(source, tmp_path, max_length=50), tokenizer)[0] for source in (rows_file, tmp_path / "out")
    )
    assert len(raw) == 20
    for name in raw.column_names:
        assert raw[name][:] == ready[name][:], name


def test_the_same_rows_are_prepared_to_the_same_manifest_and_tokens(rows_file, tiny, tmp_path):
    made = []
    for name, cache in (("first", "one"), ("second", "another")):
        datasets.config.HF_DATASETS_CACHE = tmp_path / cache
        manifest = prepared(rows_file, tmp_path / name, tiny, "--max-length", 50)
        made.append((manifest, datasets.load_from_disk(tmp_path / name / "rows")[:]))
    assert made[0] == made[1]
    assert str(tmp_path) not in json.dumps(made[0][0])
    Path(rows_file).write_text(Path(rows_file).read_text().replace("It is 74", "It is 75"))
    assert prepared(rows_file, tmp_path / "third", tiny)["files"] != made[0][0]["files"]


def test_rows_are_filtered_and_counted(tiny, tmp_path, capsys):
    rows = [
        conversation("1", "one", domain="math"),
        conversation(" 1\n", "one ", domain="math"),  # the first again
        conversation("1", "One", domain="math"),
        conversation("Cafe\u0301?", "two", domain="code"),
        conversation("Caf\u00e9?", "two", domain="code"),  # as it is written otherwise
        {**conversation("1", "one", domain="code"), "system": "Think."},  # the first, asked otherwise
        conversation("2", "two", domain="law"),
        conversation("3", "x" * 300, domain="math"),
        conversation("y" * 400, "four", domain="math"),
        conversation("5", "", domain="math"),
    ]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    options = ["--where", "domain=math", "domain=code", "--max-length", "250"]
    with pytest.raises(UserError, match="row 10.*the text is empty"):
        prepared(source, tmp_path / "out", tiny, *options)
    manifest = prepared(source, tmp_path / "out", tiny, *options, "--drop-bad-rows")
    assert manifest["dropped"] == {
        "another domain": 1,
        "bad rows": 1,
        "duplicates": 3,
        "no token to learn within max_length": 1,
    }
    assert manifest["rows"] == 4
    said = capsys.readouterr().out
    assert "Dropped: 1 (another domain), 1 (bad rows), 3 (duplicates), 1 (no token" in said
    assert "1 of 4 rows are longer than max_length=250 tokens (25.0%)" in said and " 100%: 400." in said
    manifest = prepared(source, tmp_path / "short", tiny, *options, "--drop-bad-rows", "--max-tokens", 200)
    assert manifest["rows"] == 3 and manifest["dropped"]["more than max_tokens"] == 2
    with pytest.raises(UserError, match=r"no row is left; dropped were .*9 \(another domain\)"):
        prepared(source, tmp_path / "none", tiny, "--where", "domain=art", "--drop-bad-rows")
    with pytest.raises(UserError, match="row 1: --where names the column 'source'.*domain"):
        prepared(source, tmp_path / "none", tiny, "--where", "source=math")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "out", "rows.jsonl", "short"]


def test_a_killed_preparation_goes_on_from_its_last_step(rows_file, tiny, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare, "make_manifest", Mock(side_effect=KeyboardInterrupt))
        prepared(rows_file, tmp_path / "out", tiny)
    assert not (tmp_path / "out").exists()
    cached = sorted((tmp_path / "cache").rglob("*.arrow"))
    assert len(cached) >= 2
    prepared(rows_file, tmp_path / "out", tiny)
    assert sorted((tmp_path / "cache").rglob("*.arrow")) == cached
    with pytest.raises(UserError, match="exists and is not an empty directory"):
        prepared(rows_file, tmp_path / "out", tiny)


def test_prepared_rows_are_for_one_tokenizer_template_and_loss(rows_file, tiny, tmp_path):
    prepared(rows_file, tmp_path / "out", tiny)
    same, extended = with_template("smollm2.jinja"), with_template("smollm2.jinja")
    extended.add_tokens(["plus"])
    # What a call leaves behind in a tokenizer does not make it another one.
    same("used before", truncation=True, max_length=3, padding="max_length")
    run, args = run_of(tmp_path / "out", tmp_path)
    assert list(rows_of_run(run, args, same)[0]) == list(rows_of_run(*run_of(rows_file, tmp_path), same)[0])
    for tokenizer, keys, named in (
        (extended, {}, "another tokenizer: prepare"),
        (with_template("chatml.jinja"), {}, "another chat_template: prepare"),
        (same, {"assistant_only_loss": False}, "another assistant_only_loss: prepare"),
    ):
        with pytest.raises(UserError, match=named):
            rows_of_run(*run_of(tmp_path / "out", tmp_path, **keys), tokenizer)
    with pytest.raises(UserError, match="streaming is for rows that are not prepared"):
        check_rows(*run_of(tmp_path / "out", tmp_path, dataset_streaming=True, max_steps=2))


def test_prepared_rows_are_for_one_end_of_sequence_token_of_the_template(rows_file, tiny, tmp_path):
    template = tmp_path / "ends.jinja"
    template.write_text("{% generation %}{{ messages[1].content + eos_token }}{% endgeneration %}")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template.read_text()
    prepared(rows_file, tmp_path / "out", tiny, "--chat-template", template)
    assert len(rows_of_run(*run_of(tmp_path / "out", tmp_path), tokenizer)[0]) == 20
    # TRL's and `sft.train`'s key; where the template does not use it, it changes nothing.
    with pytest.raises(UserError, match="another tokenizer: prepare"):
        rows_of_run(*run_of(tmp_path / "out", tmp_path, eos_token="<|im_start|>"), tokenizer)
    prepared(rows_file, tmp_path / "fixed", tiny)
    run, args = run_of(tmp_path / "fixed", tmp_path, eos_token="<|im_start|>")
    assert len(rows_of_run(run, args, with_template("smollm2.jinja"))[0]) == 20


def test_a_run_on_prepared_rows_leaves_them_as_they_are_and_resumes(rows_file, tiny, tmp_path):
    prepared(rows_file, tmp_path / "out", tiny)
    written = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*")}
    stopped, other = (
        ["--config", recipe("demo"), *sizes(tiny, tmp_path / "out", tmp_path / name, max_length=length)]
        for name, length in (("stopped", 128), ("other", 60))
    )
    with interrupted_at(MixingTrainer, 4):
        train.main(stopped)
    train.main(other)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*")} == written
    (tmp_path / "out" / "rows" / "cache-1.arrow").touch()  # what others who read the rows leave there
    train.main(stopped)


def test_a_damaged_preparation_is_refused(rows_file, tiny, tmp_path):
    prepared(rows_file, tmp_path / "out", tiny)
    run, args = run_of(tmp_path / "out", tmp_path)
    manifest = tmp_path / "out" / "manifest.json"
    text = manifest.read_text()
    for damage, named in (
        (lambda: manifest.write_text(text.replace('"rows": 20', '"rows": 21')), "holds 20 rows, its manifest 21"),
        (lambda: (manifest.write_text(text), (tmp_path / "out/rows/state.json").write_text("")), "cannot be read"),
        (lambda: manifest.unlink(), "expected a file or a folder of files"),
    ):
        damage()
        with pytest.raises(UserError, match=named):
            check_rows(run, args)
            rows_of_run(run, args, with_template("smollm2.jinja"))


def test_plain_text_is_prepared(tiny, tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", [{"text": "One."}, {"text": "Two."}, {"text": "One. "}])
    manifest = prepared(source, tmp_path / "out", tiny)
    assert (manifest["kind"], manifest["rows"], manifest["chat_template"]) == ("text", 2, None)
    run, args = run_of(tmp_path / "out", tmp_path, assistant_only_loss=False, eos_token="<|im_start|>")
    with pytest.raises(UserError, match="another tokenizer"):
        rows_of_run(run, args, byte_tokenizer())
    args.eos_token = None
    assert len(rows_of_run(run, args, byte_tokenizer())[0]) == 2
