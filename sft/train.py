"""Fine-tune a causal language model on answers with TRL's SFTTrainer: see `--help` and sft/recipes/README.md.

examples/sft.py is the same pipeline on one page, without checks, records and resume.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from iha.errors import UserError, check_packages, run_cli


def check_before_imports(words: Sequence[str]) -> None:
    """Check what can be checked before the imports below, which take seconds. Raise `UserError`."""
    check_packages("datasets", "peft", "trl")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    recipe = parser.parse_known_args(words)[0].config
    if recipe is not None and not os.path.isfile(recipe):
        raise UserError(
            f"--config {recipe}: no such file here, in {os.getcwd()}. The names sft/recipes/NAME/sft.yaml are seen "
            "from the root of a checkout."
        )


if __name__ == "__main__":
    run_cli(lambda: check_before_imports(sys.argv[1:]))
    if os.environ.get("RANK", "0") == "0":
        print("Loading TRL (some seconds)", file=sys.stderr, flush=True)

import torch
from datasets import Dataset, IterableDataset, disable_progress_bars
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig

from iha.adapter_card import write_adapter_card
from iha.cards import FINAL, name_of_place
from iha.files import new_directory, read_json, sole_writer, write_json
from iha.kinds import is_interleaved, is_ours
from iha.model_cost import flops_of_a_token
from modeling_iha import save_adapter
from modeling_iha.mixing_weights import trained_mixing
from sft.arguments import RecipeParser, RunArguments
from sft.base_model import (
    find_start,
    lora_config,
    prepare_model,
    prepare_tokenizer,
    run_config,
    settle_pseudo_heads,
    settle_training_options,
    stop_at_end_of_turn,
)
from sft.checkpoints import (
    RECORD,
    check_holds_no_model,
    checkpoint_to_resume,
    clear_later_checkpoints,
    newest_whole_checkpoint,
)
from sft.data import Rows, are_chats, training_rows
from sft.distributed import check_launch, processes_of_a_row, whole_model
from sft.record import Record, check_goes_on, make_record
from sft.results import card, write_curves
from sft.row_sources import RunData, check_splits, data_of
from sft.shared_row_trainer import SharedRowTrainer
from sft.trainer import NotFiniteError, SFTRecipeTrainer


USAGE = """python -m sft.train --config sft/recipes/NAME/sft.yaml [--key value ...]

Fine-tune a model on OpenThoughts-format rows, or train a preset from random weights on text. Every key below can be in
the YAML file or on the command line, which overrides the file. After a stop, the same command resumes from the newest
complete checkpoint. Another model or other data raises an error.

example:
  python -m sft.train --config sft/recipes/demo/sft.yaml \\
      --model_name_or_path checkpoints/smollm2-iha --dataset_name rows.jsonl --output_dir outputs/sft
  python -m sft.train --config sft/recipes/pretrain/sft.yaml --preset small-10m-paired-heads \\
      --tokenizer outputs/tokenizer --dataset_name train.txt --max_length 1024 --output_dir outputs/run
"""


def settle_machine(args: SFTConfig) -> None:
    """Change arguments that this terminal or a CPU cannot use."""
    if not sys.stderr.isatty():  # a log would keep every state of a bar
        args.disable_tqdm = True
        disable_progress_bars()
    if args.device.type == "cpu":
        args.dataloader_pin_memory = False  # PyTorch warns at every epoch that it cannot
        # Checkpoints are in the memory of the host already, and PyTorch cannot pin it without a GPU.
        (args.gradient_checkpointing_kwargs or {}).pop("offload", None)


def locked(args: SFTConfig) -> AbstractContextManager[None]:
    """Let no other run write into `output_dir`. The main process holds the lock for all processes of this run."""
    return sole_writer(args.output_dir) if args.process_index == 0 else nullcontext()


def find_checkpoint(args: SFTConfig) -> Path | None:
    """Return the checkpoint to resume from, or None for a new run. Raise `UserError` for a run that has finished."""
    output = Path(args.output_dir)
    if (output / FINAL).exists():
        raise UserError(
            f"{output / FINAL} exists: this run has finished. Choose another output_dir; to go on from the last "
            f"checkpoint with more max_steps or num_train_epochs, move {FINAL} away."
        )
    return checkpoint_to_resume(args.resume_from_checkpoint, output)


@contextmanager
def told_how_to_go_on(args: SFTConfig) -> Iterator[None]:
    """Add to an interrupt, and to a stop at NaN, from which checkpoint the run can go on."""
    output = Path(args.output_dir)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if args.resume_from_checkpoint is None:
            last = newest_whole_checkpoint(output)
            start = "starts again: there is no checkpoint yet" if last is None else f"goes on from {last}"
            interrupt.add_note(f"The same command {start}.")
        raise
    except NotFiniteError as error:
        last = newest_whole_checkpoint(output)
        where = "There is no checkpoint yet." if last is None else f"The last good checkpoint is {last}."
        raise UserError(
            f"Training stopped at {error} {where} Lower learning_rate, or check the data, and start in another "
            "output_dir."
        ) from error


def build_trainer(
    run: RunArguments,
    args: SFTConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    adapters: LoraConfig | None,
    rows: tuple[Rows, Dataset | None],
) -> SFTRecipeTrainer:
    """Build the trainer of a recipe from its model, its adapters, and its rows. Raise `UserError`."""
    train_rows, eval_rows = rows
    if are_chats(train_rows.features):
        stop_at_end_of_turn(model, tokenizer)
    # TRL rounds what a quantized run trains. `take_back_precision` needs these values.
    mixing = [weight.detach().clone() for weight in trained_mixing(model)] if run.is_quantized else []
    trainer_class = SharedRowTrainer if processes_of_a_row(args) > 1 else SFTRecipeTrainer
    trainer = trainer_class(
        model=model,
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        peft_config=adapters,
    )
    if run.is_quantized:
        take_back_precision(trainer.model, mixing)
    if isinstance(trainer.train_dataset, IterableDataset):
        # Repeat the stream without end, so that a resume can skip the batches that were seen, however many passes they
        # took. TRL has packed the stream before: of a short stream that repeats, it would pack 1,000 rows at a time.
        trainer.train_dataset = trainer.train_dataset.repeat(None)
    if run.peak_tflops is not None:
        peak = run.peak_tflops * 1e12 * args.world_size
        trainer.count_tokens.peak_tokens_per_second = peak / flops_of_a_token(model.config, args.max_length)
    return trainer


def take_back_precision(model: PeftModel, mixing: list[torch.Tensor]) -> None:
    """Train adapters in float32, and the mixing from these values.

    TRL rounds what is trained to bfloat16, which is too coarse for steps of the mixing. PEFT loads adapters in
    float32, so a run that was interrupted would end elsewhere.
    """
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    for weight, value in zip(trained_mixing(model), mixing, strict=True):
        weight.data.copy_(value)


def train(trainer: SFTRecipeTrainer, data: RunData, run: RunArguments, checkpoint: Path | None) -> None:
    """Train from the start or from `checkpoint`, and save the final model."""
    args = trainer.args
    if checkpoint is not None:
        trainer.accelerator.print(f"Resuming from {checkpoint}.")
        args.eval_on_start = False  # the history of the checkpoint begins with that evaluation
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    steps = trainer.state.global_step
    if steps < trainer.state.max_steps or steps == 0:
        reason = "Give the same command again to continue."
        if steps == 0:
            reason = "Lower per_device_train_batch_size if the rows do not fill one batch, or raise max_steps."
        raise UserError(
            f"Training ended after {steps} of {trainer.state.max_steps} steps, so there is no final model. {reason}"
        )
    if args.load_best_model_at_end and trainer.state.best_model_checkpoint is None:
        trainer.accelerator.print(
            f"Warning: there is no checkpoint of the best {args.metric_for_best_model}: final/ has the last weights."
        )
    save_final(trainer, data, run)
    # DDP's reducer must go before the process group. The last object to hold the group destroys it and joins its
    # threads. If that were the reducer, it would join them while it holds the GIL, and wait for ever for a thread that
    # needs the GIL to release a tensor.
    accelerator = trainer.accelerator
    trainer.model_wrapped = None
    accelerator.free_memory()
    accelerator.end_training()


def save_final(trainer: SFTRecipeTrainer, data: RunData, run: RunArguments) -> None:
    """Write the curves and the final model. Every process must call this, and the main one writes."""
    output = Path(trainer.args.output_dir)
    model = whole_model(trainer)
    if trainer.args.process_index != 0:
        return
    record = read_json(output / RECORD, Record)  # raises an error if the directory was removed
    write_curves(trainer.state.log_history, output)
    if run.is_quantized:
        write_adapter(trainer, model, run)
    else:
        write_model(trainer, model, data, run, record)


def write_model(
    trainer: SFTRecipeTrainer, model: PreTrainedModel, data: RunData, run: RunArguments, record: Record
) -> None:
    """Write the final model, into which adapters are merged, with its card if it is one of ours."""
    output = Path(trainer.args.output_dir)
    with new_directory(output / FINAL) as directory:
        model = model.merge_and_unload() if run.use_peft else model
        model.save_pretrained(directory)
        trainer.processing_class.save_pretrained(directory)
        if is_ours(model.config):
            shutil.copy(output / "curves.png", directory)
            text = card(model.config, trainer, data.eval_source, run, record)
            (directory / "README.md").write_text(text, encoding="utf-8")
    print(f"Final model: {output / FINAL}\nCurves:      loss.json and curves.png next to it")


def write_adapter(trainer: SFTRecipeTrainer, model: PeftModel, run: RunArguments) -> None:
    """Write the adapter of a quantised base, into whose rounded weights it is not merged."""
    output = Path(trainer.args.output_dir)
    base = run.model_name_or_path
    load, options = "PeftModel.from_pretrained", "dtype='float32'"
    with new_directory(output / FINAL) as directory:
        if is_interleaved(model.config):
            load = "load_adapter"
            save_adapter(model, directory)
            write_adapter_card(directory, base, name_of_place(output / FINAL))
        else:
            model.save_pretrained(directory)
            (directory / "README.md").unlink(missing_ok=True)  # PEFT's, which has nothing but blanks
            if is_ours(model.config):
                options += ", trust_remote_code=True"
        trainer.processing_class.save_pretrained(directory)
    print(
        f"Final adapter: {output / FINAL}\nCurves:        loss.json and curves.png next to it\n"
        f"To merge it into the base in full precision: {load}(AutoModelForCausalLM.from_pretrained({base!r}, "
        f"{options}), {str(output / FINAL)!r}).merge_and_unload()"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run a recipe of supervised fine-tuning. Raise `UserError`."""
    run, args = RecipeParser(USAGE).parse(argv)
    data = data_of(run, args)
    check_launch(args)
    check_holds_no_model(Path(args.output_dir))
    with locked(args), told_how_to_go_on(args):
        checkpoint = find_checkpoint(args)
        start = find_start(run)
        # These leave out keys that the machine or the start cannot use, so the record comes after them.
        settle_machine(args)
        settle_pseudo_heads(start, run)
        settle_training_options(start, run)
        config = run_config(start, run, args)
        if args.process_index == 0:
            check_splits(data)
            record = make_record(data, start, run, args)
            if checkpoint is not None:
                check_goes_on(record, checkpoint)
            clear_later_checkpoints(Path(args.output_dir), checkpoint)
            write_json(Path(args.output_dir) / RECORD, record)
        tokenizer = prepare_tokenizer(start, config, run)
        model = prepare_model(start, config, run, args)
        adapters = lora_config(run, model)
        rows = training_rows(data, run, args, tokenizer)
        train(build_trainer(run, args, model, tokenizer, adapters, rows), data, run, checkpoint)


if __name__ == "__main__":
    run_cli(main)
