"""Write a tiny untrained model and a tokenizer of bytes, which model_cards/tiny.yaml trains.

Every layer has the same attention kind, with its default options, and "iha" two pseudo-heads.

example: python -m research.checkpoints.untrained iha outputs/tiny-iha
"""

import argparse
from collections.abc import Sequence

from iha.errors import run_cli
from iha.files import expanded
from modeling_iha import IHAConfig
from modeling_iha.modeling_iha import ATTENTION_CLASSES
from sft.make_model import write_start
from sft.make_tokenizer import byte_tokenizer


DETAILS = "## Training\n\nNone: the weights are random (`python -m research.checkpoints.untrained`)."


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=ATTENTION_CLASSES, help="attention mechanism")
    parser.add_argument("dst", type=expanded, help="new directory")
    args = parser.parse_args(argv)
    tokenizer = byte_tokenizer()
    fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    fields |= {"eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": True, "attention_kinds": args.kind}
    if args.kind == "iha":
        fields["num_pseudo_heads"] = 2
    config = IHAConfig.from_preset("tiny", **fields)
    parameters = write_start(args.dst, config, tokenizer, license="apache-2.0", details=DETAILS)
    print(f"Wrote {args.dst}, {parameters:,} parameters")


if __name__ == "__main__":
    run_cli(main)
