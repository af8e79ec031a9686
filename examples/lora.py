"""Train LoRA adapters and the mixing of an interleaved decoder, save them alone, and load them on the plain base.

example: python examples/lora.py HuggingFaceTB/SmolLM2-135M-Instruct trl-lib/Capybara smollm2-adapter --max_steps 100
"""

import sys
from argparse import ArgumentParser
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds neither the checkout nor `sft`

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from iha.adapter_card import write_adapter_card
from iha.errors import run_cli
from iha.sources import find_source
from modeling_iha import interleave_heads, load_adapter, save_adapter
from sft.data import load_rows


parser = ArgumentParser(description=__doc__)
parser.add_argument("model", help="any decoder: a directory or a Hub id")
parser.add_argument("dataset", help="rows that TRL knows: a file such as rows.jsonl, a folder of them or a Hub id")
parser.add_argument("out", help="the directory to make")
parser.add_argument("--max_steps", type=int, default=-1)
args = parser.parse_args()
run_cli(lambda: find_source(args.model))  # a wrong name is an error of one line, before anything is loaded
rows = run_cli(lambda: load_rows(args.dataset))

base = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")  # as the adapters are; autocast on a GPU
trainer = SFTTrainer(
    interleave_heads(base, num_pseudo_heads=2),
    SFTConfig(args.out, max_steps=args.max_steps, bf16=torch.cuda.is_available()),
    train_dataset=rows,
    processing_class=AutoTokenizer.from_pretrained(args.model),
    peft_config=LoraConfig(target_modules="all-linear", modules_to_save=["q_mix", "k_mix", "v_mix", "collapse"]),
)
trainer.train()
save_adapter(trainer.model, args.out)  # the adapters and the mixing, without the base
write_adapter_card(args.out, args.model)

loaded = load_adapter(AutoModelForCausalLM.from_pretrained(args.model, dtype="float32"), args.out)
print(f"{loaded.get_nb_trainable_parameters()[1]:,} parameters with the base: {args.out}")
