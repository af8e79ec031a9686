"""Write a tiny untrained model and a tokenizer of bytes, which model_cards/tiny.yaml trains.

Every layer has the same attention kind, with the first settings that the kind's file in kind_facts/ measures.

example: python -m research.checkpoints.untrained iha outputs/tiny-iha
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from iha_io.command_io import new_directory, run_cli
from kind_facts import companion_of
from model_cards.render import render_card
from modeling_iha import IHAConfig, IHAForCausalLM
from modeling_iha.attention_kinds import ATTENTION_CLASSES


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=ATTENTION_CLASSES, help="attention mechanism")
    parser.add_argument("dst", type=Path, help="new directory")
    return parser.parse_args(argv)


# Those of sft/chat_templates.
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

DETAILS = "## Training\n\nNone: the weights are random (`python -m research.checkpoints.untrained`)."


def byte_tokenizer(special: Sequence[str] = SPECIAL) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes and special tokens, of which the first pads and the last ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[-1])


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    tokenizer, form = byte_tokenizer(), next(iter(companion_of(args.kind).forms.values()))
    fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    fields |= {"eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": True, "attention_kinds": args.kind}
    torch.manual_seed(0)
    model = IHAForCausalLM(IHAConfig.from_preset("tiny", **fields | form))
    with new_directory(args.dst) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        card = render_card(model.config, args.dst.name, license="apache-2.0", details=DETAILS)
        (directory / "README.md").write_text(card, encoding="utf-8")
    print(f"Wrote {args.dst}, {model.num_parameters():,} parameters")


if __name__ == "__main__":
    run_cli(main)
