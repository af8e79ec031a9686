"""Write a tiny untrained model and a tokenizer of bytes, which model_cards/tiny.yaml trains.

Every layer has the same attention kind, with its default options, and "iha" two pseudo-heads.

example: python -m research.checkpoints.untrained iha outputs/tiny-iha
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from iha_io.command_io import new_directory, run_cli
from model_cards.render import render_card
from modeling_iha import IHAConfig, IHAForCausalLM
from modeling_iha.attention_kinds import ATTENTION_CLASSES
from sft.make_tokenizer import byte_tokenizer


DETAILS = "## Training\n\nNone: the weights are random (`python -m research.checkpoints.untrained`)."


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=ATTENTION_CLASSES, help="attention mechanism")
    parser.add_argument("dst", type=Path, help="new directory")
    args = parser.parse_args(argv)
    tokenizer = byte_tokenizer()
    fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    fields |= {"eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": True, "attention_kinds": args.kind}
    if args.kind == "iha":
        fields["num_pseudo_heads"] = 2
    torch.manual_seed(0)
    model = IHAForCausalLM(IHAConfig.from_preset("tiny", **fields))
    with new_directory(args.dst) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        card = render_card(model.config, args.dst.name, license="apache-2.0", details=DETAILS)
        (directory / "README.md").write_text(card, encoding="utf-8")
    print(f"Wrote {args.dst}, {model.num_parameters():,} parameters")


if __name__ == "__main__":
    run_cli(main)
