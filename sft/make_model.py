"""Write a model with random weights from a preset, and its tokenizer, for trainers that start from a checkpoint.

example: python -m sft.make_model small-10m-paired-heads outputs/start --set num_hidden_layers=5
"""

import argparse
import sys
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from iha.card_template import render_card
from iha.cards import name_of_place
from iha.checkpoints import load_tokenizer
from iha.conversion.shared import preset_config
from iha.errors import UserError, run_cli
from iha.files import expanded, new_directory
from iha.presets import fields_of
from iha.sources import find_source
from modeling_iha import IHAConfig, IHAForCausalLM
from sft.make_tokenizer import byte_tokenizer


DETAILS = "## Training\n\nNone: the weights are random (`python -m sft.make_model`)."


def start_tokenizer(source: str | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a directory or id on the Hub, or one of single bytes. Raise `UserError`."""
    return load_tokenizer(find_source(source), sys.maxsize) if source else byte_tokenizer()


def config_of(preset: str, tokenizer: PreTrainedTokenizerBase, changes: list[str]) -> IHAConfig:
    """Return a preset's configuration for a tokenizer, with `FIELD=VALUE` changes. Raise `UserError`."""
    # PyTorch never trains the embedding of the padding token.
    pad = None if tokenizer.pad_token_id == tokenizer.eos_token_id else tokenizer.pad_token_id
    fields = {"vocab_size": max(tokenizer.get_vocab().values()) + 1, "pad_token_id": pad}
    fields |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    fields |= fields_of(changes)
    if fields["vocab_size"] <= max(tokenizer.get_vocab().values()):
        raise UserError(f"vocab_size={fields['vocab_size']} is smaller than that of the tokenizer, {len(tokenizer)}.")
    return preset_config(preset, **fields)


def random_model(config: IHAConfig, seed: int) -> IHAForCausalLM:
    """Build a model with random weights, in float32, which `seed` determines."""
    torch.manual_seed(seed)
    return IHAForCausalLM(config)


def main(argv: Sequence[str] | None = None) -> None:
    """Write a model with random weights, its tokenizer and a card. Raise `UserError`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", help="a name in configuration_iha, such as small-10m-paired-heads")
    parser.add_argument("dst", type=expanded, help="new directory")
    parser.add_argument("--tokenizer", help="directory or id on the Hub (default: a tokenizer of single bytes)")
    where = "fields to change in the preset; fields that depend on them follow"
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help=where)
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    args = parser.parse_args(argv)
    tokenizer = start_tokenizer(args.tokenizer)
    model = random_model(config_of(args.preset, tokenizer, args.set), args.seed)
    card = render_card(model.config, name_of_place(args.dst), from_scratch=True, details=DETAILS)
    with new_directory(args.dst) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        (directory / "README.md").write_text(card, encoding="utf-8")
    print(f"Wrote {args.dst}, {model.num_parameters():,} parameters with random weights")


if __name__ == "__main__":
    run_cli(main)
