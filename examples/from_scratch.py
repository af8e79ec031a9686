"""Train a small model with the paper's schedule from scratch on the bytes of a text, save it, and load it.

python examples/from_scratch.py text.txt small-iha --max_steps 1000
"""

from argparse import ArgumentParser
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from modeling_iha import IHAConfig, IHAForCausalLM


LENGTH = 512

parser = ArgumentParser(description=__doc__)
parser.add_argument("text", help="any file")
parser.add_argument("out", help="the directory to make")
parser.add_argument("--max_steps", type=int, default=-1)
args = parser.parse_args()

config = IHAConfig.from_preset(
    "paper-2.4b-iha",  # four "iha" layers with a window of N / (2 P^2) tokens, then a global "mha" layer
    **{"vocab_size": 256, "bos_token_id": None, "eos_token_id": None},
    **{"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 4},
    num_pseudo_heads=2,
    max_position_embeddings=LENGTH,
)
tokens = torch.frombuffer(bytearray(Path(args.text).read_bytes()), dtype=torch.uint8).long()
rows = [{"input_ids": row, "labels": row} for row in tokens.split(LENGTH) if len(row) == LENGTH]
options = TrainingArguments(args.out, max_steps=args.max_steps, learning_rate=1e-3, lr_scheduler_type="cosine")
trainer = Trainer(IHAForCausalLM(config), options, train_dataset=rows)
trainer.train()
trainer.save_model()  # with the model's code

# In any process, without this package:
loaded = AutoModelForCausalLM.from_pretrained(args.out, trust_remote_code=True)
print(f"{loaded.num_parameters():,} parameters, {loaded.config.attention_kinds}: {args.out}")
