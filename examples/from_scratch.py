"""Train a small model with the paper's schedule from scratch on the bytes of a text, save it, and generate text.

The same command resumes an interrupted run. OUT/curve.png shows the loss.

example: python examples/from_scratch.py text.txt small-iha --max_steps 1000
"""

from argparse import ArgumentParser
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from modeling_iha import IHAConfig, IHAForCausalLM


parser = ArgumentParser(description=__doc__)
parser.add_argument("text", type=Path, help="any file of at least 512 bytes")
parser.add_argument("out", help="the directory to make")
parser.add_argument("--max_steps", type=int, default=1000)
args = parser.parse_args()
if not args.text.is_file() or args.text.stat().st_size < 512:
    parser.error(f"{args.text}: expected a file of at least 512 bytes")

# Four "iha" layers with a window of N / (2 P^2) tokens, then a global "mha" layer.
config = IHAConfig.from_preset("small-10m-iha", num_hidden_layers=5, num_pseudo_heads=2, max_position_embeddings=512)
tokens = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
rows = [{"input_ids": row, "labels": row} for row in tokens.split(512) if len(row) == 512]
options = TrainingArguments(args.out, max_steps=args.max_steps, learning_rate=1e-3, save_steps=100, logging_steps=10)
trainer = Trainer(IHAForCausalLM(config), options, train_dataset=rows)
trainer.train(resume_from_checkpoint=get_last_checkpoint(args.out) if Path(args.out).is_dir() else None)
trainer.save_model()  # with the model's code
plt.plot(*zip(*[(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]))
plt.xlabel("step")
plt.ylabel("training loss, nats per byte")
plt.savefig(Path(args.out, "curve.png"))

loaded = AutoModelForCausalLM.from_pretrained(args.out, trust_remote_code=True)  # in any process, without this package
written = loaded.generate(tokens[None, :40], max_new_tokens=60, do_sample=True)
print(bytes(written[0].tolist()).decode(errors="replace"))
