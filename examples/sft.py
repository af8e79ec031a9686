"""Interleave the heads of a decoder, fine-tune it with TRL, save it, and load it.

example: python examples/sft.py HuggingFaceTB/SmolLM2-135M-Instruct trl-lib/Capybara smollm2-tuned --max_steps 100
"""

import sys
from argparse import ArgumentParser
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds neither the checkout nor `sft`

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from iha.errors import run_cli
from iha.sources import find_source
from modeling_iha import interleave_heads
from sft.data import load_rows


parser = ArgumentParser(description=__doc__)
parser.add_argument("model", help="any decoder: a directory or a Hub id")
parser.add_argument("dataset", help="rows that TRL knows: a file such as rows.jsonl, a folder of them or a Hub id")
parser.add_argument("out", help="the directory to make")
parser.add_argument("--max_steps", type=int, default=-1)
args = parser.parse_args()
run_cli(lambda: find_source(args.model))  # a wrong name is an error of one line, before anything is loaded
rows = run_cli(lambda: load_rows(args.dataset))

# Many checkpoints are in bfloat16, whose weights round small steps away: train in float32, under autocast on a GPU.
model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
interleave_heads(model, num_pseudo_heads=2)
trainer = SFTTrainer(
    model,
    SFTConfig(args.out, max_steps=args.max_steps, bf16=torch.cuda.is_available()),
    train_dataset=rows,
    processing_class=AutoTokenizer.from_pretrained(args.model),
)
trainer.train()
trainer.save_model()  # with the tokenizer and the model's code

# In any process, without this package:
loaded = AutoModelForCausalLM.from_pretrained(args.out, trust_remote_code=True)
print(f"{type(loaded).__name__}, {loaded.num_parameters():,} parameters: {args.out}")
