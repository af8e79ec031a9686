"""Compare forms of attention through all stages, for whoever can pay for several runs, into a table like the paper's.

For one model begin with docs/FROM_SCRATCH.md.

Run it in the root of a checkout, after `pip install -e ".[scripts,evaluation]"`. For each form and seed it runs, in
this order, commands that you can also run by hand, and it prints each of them (before, it makes the data once):

    1. sft.train            pre-training on your text, from random weights (recipe pretrain)
    2. sft.train            more text in longer rows, with longer windows (recipe long_context_64k/continued)
    3. sft.train            chats: sums, and needles in a haystack, or OpenThoughts (recipe paper_sft)
    4. evaluation.run       loss by position in held-out text, and from 100m on RULER, of the model of stage 2
    5. sft.score_reasoning  answers to new sums and needles of the model of stage 3, which from 100m on
       evaluation.run       also asks GSM8K and MATH-500
    6. push_to_hub          a rehearsal of the upload, which checks the checkpoint and its card

A command whose output exists is passed over, so the same line goes on after a stop. --dry-run prints all commands, and
the hours and the memory of each stage by the functions of `iha cost`, before anything runs.

examples:
  python examples/speedrun.py --size seconds --forms paired-heads
  python examples/speedrun.py --size minutes --text my.txt --seeds 3
  python examples/speedrun.py --size 100m --devices 8 --launch "accelerate launch --num_processes 8 -m" --dry-run
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, stdev


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a launcher by path does not find the checkout

import trl

from evaluation.options import PACKAGES
from iha import plots
from iha.cards import markdown_table
from iha.conversion.shared import preset_config
from iha.errors import UserError, check_packages, run_cli
from iha.files import read_json, read_jsonl, write_json, write_jsonl
from iha.model_cost import passes_of_model
from iha.presets import fields_of
from iha.step_memory import Way, of_training
from modeling_iha import IHAConfig
from sft.make_text import modules


# The end of a preset's name, and what it is.
FORMS = {
    "global": "ordinary attention over all tokens",
    "global-local": "ordinary attention in windows, and over all tokens in each fifth layer",
    "paired-heads": "paired heads (P = 4) in shorter windows, and over all tokens in each fifth layer",
    "iha": "the paper's schedule: interleaved heads in windows, and ordinary attention in each fifth layer",
}


# With the tokens of Llama 3, and marks around what a model learns.
LLAMA3_TEMPLATE = str(Path(trl.__file__).parent / "chat_templates" / "llama3_training.jinja")


@dataclass(frozen=True)
class Stage:
    """Hold the length of a stage of training: `rows` rows of `tokens` tokens in each of `steps` steps."""

    tokens: int
    steps: int
    rows: int
    rate: float
    rows_at_once: int = 8  # on one device, which accumulates the others

    @property
    def checkpoints(self) -> bool:
        """Return whether the backward pass computes activations again, which saves memory."""
        return self.tokens > 2048

    def at_once(self, devices: int) -> int:
        """Return the rows that each device takes at once. Raise `UserError` for devices that cannot share a step."""
        if self.rows % devices:
            raise UserError(f"--devices {devices}: a step has {self.rows} rows; expected a divisor of them.")
        share = self.rows // devices
        return max(rows for rows in range(1, self.rows_at_once + 1) if share % rows == 0)


@dataclass(frozen=True)
class Size:
    """Hold what is trained, on what, and for how long. `tflops` of one device is a guess for the forecast."""

    preset: str
    pretrain: Stage
    long: Stage
    chat: Stage
    tflops: float
    fields: tuple[str, ...] = ()  # changes of every preset
    iha_fields: tuple[str, ...] = ("num_pseudo_heads=4",)  # changes of "iha", whose presets have P = H
    tokenizer: str | None = None  # on the Hub; by default one is trained on the text
    vocabulary: int = 1024  # tokens of the tokenizer
    characters: int = 4_000_000  # of the text of --text that are read
    text: str | None = None  # on the Hub; by default the text is that of --text
    chats: str | None = None  # on the Hub; by default sums and needles
    chat_tokens: dict[str, str] = field(default_factory=dict)  # of a tokenizer without those of the recipe
    rope_theta: float = 160_000.0  # of the longer rows
    needles: tuple[int, ...] = (2, 8, 24)  # statements of a haystack: how far back an answer lies
    ruler: tuple[int, ...] = ()  # lengths of RULER's prompts in tokens

    @property
    def stages(self) -> dict[str, Stage]:
        return {"pretrain": self.pretrain, "long": self.long, "chat": self.chat}

    def changes(self, form: str) -> list[str]:
        """Return the changes of the preset of a form, with the rows of pre-training as its context."""
        of_form = self.iha_fields if form == "iha" else ()
        return [*self.fields, *of_form, f"max_position_embeddings={self.pretrain.tokens}"]


SIZES = {
    "seconds": Size(
        preset="small-1m",
        fields=("hidden_size=64", "intermediate_size=176", "num_attention_heads=4"),
        pretrain=Stage(tokens=256, steps=20, rows=8, rate=4e-3),
        long=Stage(tokens=1024, steps=4, rows=2, rate=1e-3),
        chat=Stage(tokens=1024, steps=20, rows=8, rate=2e-3),
        tflops=0.02,
        characters=300_000,
        needles=(2,),
    ),
    "minutes": Size(
        preset="small-1m",
        pretrain=Stage(tokens=256, steps=150, rows=8, rate=2e-3),
        long=Stage(tokens=1024, steps=20, rows=2, rate=5e-4),
        chat=Stage(tokens=1024, steps=80, rows=4, rate=1e-3),
        tflops=0.02,
    ),
    # Never run. One GPU with 80 GB, an evening.
    "100m": Size(
        preset="small-100m",
        tokenizer="HuggingFaceTB/SmolLM2-135M",
        vocabulary=49_152,
        text="HuggingFaceFW/fineweb-edu",
        chats="open-thoughts/OpenThoughts-114k",
        pretrain=Stage(tokens=2048, steps=5000, rows=256, rate=6e-4, rows_at_once=16),
        long=Stage(tokens=8192, steps=200, rows=64, rate=6e-5, rows_at_once=2),
        chat=Stage(tokens=8192, steps=1000, rows=96, rate=1e-4, rows_at_once=4),
        tflops=300,
        ruler=(1024, 2048, 4096),
    ),
    # Never run. Nodes of GPUs, a weekend for the last two stages and weeks for the first: the paper's steps and rates.
    # The text is that of `sample-10BT`, 24 times.
    "2.4b": Size(
        preset="paper-2.4b",
        iha_fields=(),
        tokenizer="meta-llama/Llama-3.1-8B",
        vocabulary=128_256,
        characters=10_000_000,
        chat_tokens={"chat_template_path": LLAMA3_TEMPLATE, "eos_token": "<|eot_id|>"},
        rope_theta=8e6,
        text="HuggingFaceFW/fineweb-edu",
        chats="open-thoughts/OpenThoughts-114k",
        pretrain=Stage(tokens=8192, steps=240_000, rows=128, rate=8e-4, rows_at_once=1),
        long=Stage(tokens=65536, steps=5000, rows=64, rate=1e-5, rows_at_once=1),
        chat=Stage(tokens=8192, steps=10_173, rows=96, rate=1e-5, rows_at_once=1),
        tflops=300,
        ruler=(4096, 8192, 16384),
    ),
}


@dataclass
class Command:
    """Hold a command line, and the file or directory that exists once it has run."""

    done: Path
    words: list[str]

    @property
    def log(self) -> Path:
        """Return out/pretrain.log for out/pretrain/final, and out/answers.log for out/answers.json."""
        stage = self.done.parent if self.done.name in ("final", "results.json") else self.done
        return stage.with_suffix(".log")

    def run(self) -> None:
        """Print and run the command unless it is done. Keep its log, and its time in seconds.jsonl."""
        print(f"\n$ {shlex.join(self.words)}", flush=True)
        if self.done.exists():
            print("  (done before)")
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        words = [sys.executable, *self.words[1:]] if self.words[0] == "python" else self.words
        with open(self.log, "w", encoding="utf-8") as file:
            status = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT).returncode
        if status:
            sys.exit(f"{self.log.read_text(encoding='utf-8')[-3000:]}\nThis command failed. Its output: {self.log}")
        if not self.done.exists():  # a command that only prints
            self.done.write_text(self.log.read_text(encoding="utf-8"), encoding="utf-8")
        seconds = time.monotonic() - started
        with open(self.log.with_name("seconds.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": self.log.stem, "seconds": seconds}) + "\n")
        print(f"  {seconds:.0f} s", flush=True)


def command(done: Path, /, *words: object, launch: str = "python -m", **options: object) -> Command:
    """Return `python -m` words, with `--name value` for each option."""
    line = [*shlex.split(launch), *map(str, words)]
    for name, value in options.items():
        values = value if isinstance(value, list | tuple) else [value]
        line += [f"--{name}", *map(str, values)]
    return Command(done, line)


class Run:
    """Hold what all commands of a call share: options, size, and the directory of texts, chats and tokenizer."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.size = SIZES[args.size]
        self.out = args.out / args.size
        self.data = self.out / "data"

    # The data

    def write_texts(self) -> None:
        """Write the text to train on, and a hundredth of it to hold out, as rows of 20,000 characters."""
        self.data.mkdir(parents=True, exist_ok=True)
        texts = modules() if self.args.text is None else [self.args.text.read_text(encoding="utf-8")]
        text = "\n".join(texts)[: self.size.characters]
        rows = [{"text": text[start : start + 20_000]} for start in range(0, len(text), 20_000)]
        if len(rows) < 2:
            raise UserError(f"--text {self.args.text} has {len(text)} characters: expected more than 20,000.")
        held = max(1, len(rows) // 100)
        write_jsonl(self.data / "train.jsonl", rows[held:])
        write_jsonl(self.data / "held.jsonl", rows[:held])
        self.data.joinpath("held.txt").write_text("".join(row["text"] for row in rows[:held]), encoding="utf-8")
        mixture = [
            {"path": f"{self.data / name}.jsonl", "share": 1 / len(self.generators)} for name in self.generators
        ]
        self.data.joinpath("chats.yaml").write_text(json.dumps(mixture), encoding="utf-8")

    @property
    def generators(self) -> dict[str, tuple[str, list[str]]]:
        """Return the generators of questions and their options, by the names of their files."""
        sums = ["min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1"]
        generators = {"sums": ("chain_sum", sums)}
        for count in self.size.needles:
            statements = [f"min_num_statements={count}", f"max_num_statements={count}"]
            generators[f"needles-{count}"] = ("needle_haystack", statements)
        return generators

    def data_commands(self) -> list[Command]:
        """Return the commands that make what all forms share."""
        commands = []
        rows = min(1000, self.size.chat.rows * self.size.chat.steps // len(self.generators) + 1)
        for name, (generator, options) in self.generators.items():
            train, test = self.data / f"{name}.jsonl", self.data / f"{name}-test.jsonl"
            made = {"generator": generator, "options": options}
            # There are few sums of two digits in all: new ones are those that the rows to train on leave.
            count = 60 if generator == "chain_sum" else rows
            commands.append(command(train, "sft.make_reasoning_data", train, rows=count, **made))
            commands.append(command(test, "sft.make_reasoning_data", test, rows=40, seed=1, exclude=train, **made))
        tokenizer, text = self.data / "tokenizer", self.data / "train.jsonl"
        if self.size.tokenizer is None:
            commands.append(
                command(tokenizer, "sft.make_tokenizer", text, tokenizer, **{"vocab-size": self.size.vocabulary})
            )
        return commands

    # The forms

    def training(self, out: Path, recipe: str, stage: Stage, **options: object) -> Command:
        """Return the command of a stage of training, whose final model is `out`/final."""
        at_once = stage.at_once(self.args.devices)
        return command(
            out / "final",
            "sft.train",
            launch=self.args.launch,
            config=f"sft/recipes/{recipe}.yaml",
            output_dir=out,
            max_length=stage.tokens,
            max_steps=stage.steps,
            learning_rate=stage.rate,
            warmup_steps=0.05,
            per_device_train_batch_size=at_once,
            per_device_eval_batch_size=at_once,
            gradient_accumulation_steps=stage.rows // (at_once * self.args.devices),
            gradient_checkpointing=stage.checkpoints,
            logging_steps=max(1, stage.steps // 20),
            eval_strategy="steps",
            eval_steps=max(1, stage.steps // 2),
            save_steps=max(1, min(500, stage.steps // 2)),
            **options,
        )

    def form_commands(self, form: str, seed: int) -> list[Command]:
        """Return the commands of a form, from random weights to a rehearsal of the upload."""
        size = self.size
        out = self.out / f"{form}-{seed}"
        pretrained, longer, chatting = (out / name / "final" for name in size.stages)
        start = {
            "preset": f"{size.preset}-{form}",
            "preset_fields": size.changes(form),
            "tokenizer": size.tokenizer or self.data / "tokenizer",
        }
        if size.text:
            texts = {"dataset_name": size.text, "dataset_config": "sample-10BT", "eval_size": 200}
        else:
            texts = {"dataset_name": self.data / "train.jsonl", "eval_dataset_name": self.data / "held.jsonl"}
        texts |= {"dataset_streaming": bool(size.text), "seed": seed}
        chats = {"dataset_name": size.chats or self.data / "chats.yaml", "eval_size": 0.05, "seed": seed}
        chats |= size.chat_tokens
        context = {"max_position_embeddings": size.long.tokens, "rope_theta": size.rope_theta}
        if form != "global":
            context["sliding_window"] = "scale"
        commands = [
            self.training(out / "pretrain", "pretrain/sft", size.pretrain, **start, **texts),
            self.training(
                *(out / "long", "long_context_64k/continued", size.long),
                **{"model_name_or_path": pretrained, **context, **texts},
            ),
            self.training(out / "chat", "paper_sft/sft", size.chat, model_name_or_path=longer, **chats),
        ]
        tasks = ["perplexity_by_position", *(["niah_single_1", "niah_multikey_2"] if size.ruler else [])]
        read = {"tasks": tasks, "lengths": size.ruler or [size.long.tokens], "text": self.data / "held.txt"}
        commands.append(command(out / "read" / "results.json", "evaluation.run", longer, **read, output=out / "read"))
        answers = out / "answers.json"
        questions = [self.data / f"{name}-test.jsonl" for name in self.generators]
        length = 1024 if size.chats else 32  # of a reply
        options = {"json": answers, "max-new-tokens": length}
        commands.append(command(answers, "sft.score_reasoning", chatting, *questions, **options))
        if size.ruler:
            asked = {"tasks": ["gsm8k", "math500"], "samples": 1, "limit": 200, "output": out / "paper"}
            commands.append(command(out / "paper" / "results.json", "evaluation.run", chatting, **asked))
        push = ("conversion_scripts.push_to_hub", chatting, f"me/{form}", "--dry-run")
        commands.append(command(out / "push.txt", *push, license="mit"))
        return commands

    def config_of(self, form: str, stage: str) -> IHAConfig:
        """Return the configuration that a form has in a stage: its windows grow with its rows."""
        context = self.size.pretrain.tokens if stage == "pretrain" else self.size.long.tokens
        fields = [*self.size.changes(form), f"vocab_size={self.size.vocabulary}", f"max_position_embeddings={context}"]
        return preset_config(f"{self.size.preset}-{form}", **fields_of(fields))

    def forecast(self, form: str) -> list[str]:
        """Return a row of the forecast for each stage: its hours, and the memory of a step on one device."""
        rows = []
        for name, stage in self.size.stages.items():
            config = self.config_of(form, name)
            products = passes_of_model(config, stage.tokens).training * stage.rows * stage.steps
            hours = 2 * products / (self.size.tflops * 1e12 * self.args.devices) / 3600
            at_once = stage.at_once(self.args.devices)
            memory = of_training(config, at_once, stage.tokens, Way(stage.checkpoints, tiled_loss=True))
            rows.append(f"| {form} | {name} | {hours:.3g} | {memory.peak / 1e9:.2f} |")
        return rows


# The table


def by_position(metric: str) -> str | None:
    """Return the column of a loss at some positions of a text, whose metric is "loss@64", or `None` for others."""
    if not metric.startswith("loss@"):
        return None
    first = int(metric.removeprefix("loss@"))
    return f"loss of tokens {first} to {max(64, 2 * first) - 1}"


def figures_of(out: Path, size: Size) -> dict[str, float]:
    """Return the figures of one form and seed, by the names of their columns.

    A model of a million parameters answers nothing right, so small sizes leave out the right answers."""
    figures = {}
    for name in ("pretrain", "long"):
        logged = read_json(out / name / "loss.json")
        figures[f"bits per byte, {name}"] = logged["eval_bits_per_byte"][-1][1]
    figures["loss of chats"] = read_json(out / "chat" / "loss.json")["eval"][-1][1]
    answers = read_json(out / "answers.json")["parts"]
    for file, answer in answers.items():
        name = Path(file).stem
        figures[f"loss of answers, {name}"] = answer["loss"]
        if size.ruler:
            figures[f"right answers, {name}"] = answer["accuracy"]
    for results in (out / "read" / "results.json", out / "paper" / "results.json"):
        for task, result in read_json(results)["tasks"].items() if results.exists() else ():
            for name, metric in result["metrics"].items():
                if name != "bits_per_byte":  # that of the second stage
                    figures[by_position(name) or f"{task}, {name}"] = metric["value"]
    logged = read_json(out / "pretrain" / "loss.json")
    figures["tokens/s"] = median(value for _, value in logged["tokens_per_second"])
    figures |= {f"seconds, {each['stage']}": each["seconds"] for each in read_jsonl(out / "seconds.jsonl")}
    return figures


def mean_of(values: Sequence[float]) -> dict[str, float]:
    """Return the mean over seeds, and its standard error."""
    return {"mean": mean(values), "half_width": stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0}


def report(run: Run, forms: Sequence[str], seeds: int) -> str:
    """Write table.json, with every seed, report.md and the curves of the first stage, and return the table."""
    found = {form: [figures_of(run.out / f"{form}-{seed}", run.size) for seed in range(seeds)] for form in forms}
    names = list(found[forms[0]][0])
    means = {name: {form: mean_of([each[name] for each in found[form]]) for form in forms} for name in names}
    rows = []
    for name, of_forms in means.items():
        errors = [f" ± {each['half_width']:.2g}" if seeds > 1 else "" for each in of_forms.values()]
        rows.append([name, *(f"{each['mean']:.4g}{error}" for each, error in zip(of_forms.values(), errors))])
    note = f"Means and standard errors of {seeds} seeds." if seeds > 1 else "One seed: no ranking."
    units = (
        "Losses are in nats per token. The loss of an answer is the sum over its tokens: minus the logarithm of the "
        "probability that the model gives to the whole right answer. Bits per byte and losses of tokens are of "
        "held-out text, the losses of tokens by their place in it."
    )
    table = f"{markdown_table(['', *forms], rows)}\n{note} {units}\n"
    write_json(run.out / "table.json", {"means": means, "seeds": found})
    run.out.joinpath("report.md").write_text(f"{table}\n![the curves of pre-training](curves.png)\n", encoding="utf-8")
    plots.draw_runs([run.out / f"{form}-0" / "pretrain" for form in forms], run.out / "curves.png")
    return f"{table}\nWrote report.md, curves.png and table.json (every seed) in {run.out}."


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", choices=SIZES, default="minutes", help="what to train, and for how long (default: minutes)")
    add("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="forms of attention (default: all)")
    add("--text", type=Path, help="text file to learn from (default: the sources of this Python)")
    add("--seeds", type=int, default=1, help="runs of each form (default: 1)")
    add("--launch", default="python -m", help="what starts the training (default: python -m)")
    add("--devices", type=int, default=1, help="GPUs that --launch uses (default: 1)")
    add("--out", type=Path, default=Path("outputs/speedrun"), help="directory (default: outputs/speedrun)")
    add("--dry-run", action="store_true", help="print the commands, hours and memory, and run nothing")
    args = parser.parse_args(argv)
    if args.text is not None and SIZES[args.size].text:
        raise UserError(f"--size {args.size} reads {SIZES[args.size].text}: leave out --text.")
    for stage in SIZES[args.size].stages.values():
        stage.at_once(args.devices)
    return args


def claim(run: Run) -> None:
    """Write what decides on all figures into options.json. Raise `UserError` if other options began the directory."""
    options = {"text": str(run.args.text), "devices": run.args.devices}
    file = run.out / "options.json"
    if file.exists() and read_json(file) != options:
        raise UserError(f"{run.out} holds runs with other options, {read_json(file)}: choose another --out.")
    run.out.mkdir(parents=True, exist_ok=True)
    write_json(file, options)


def main(argv: Sequence[str] | None = None) -> None:
    """Run all commands, or print them."""
    args = parse(argv)
    check_packages("matplotlib", "reasoning_gym", "trl", *PACKAGES)  # what all stages need, before the first
    run = Run(args)
    if args.dry_run:
        for each in [*run.data_commands(), *(each for form in args.forms for each in run.form_commands(form, 0))]:
            print(f"\n$ {shlex.join(each.words)}")
        print(f"\nIf each device computes {run.size.tflops:g} TFLOP/s, one seed takes:\n")
        print("| form | stage | hours | GB of a step |\n|---|---|---|---|")
        for form in args.forms:
            print("\n".join(run.forecast(form)), flush=True)
        return
    claim(run)
    run.write_texts()
    for each in run.data_commands():
        each.run()
    for seed in range(args.seeds):
        for form in args.forms:
            for each in run.form_commands(form, seed):
                each.run()
    print(f"\n{report(run, args.forms, args.seeds)}")


if __name__ == "__main__":
    run_cli(main)
