"""Declare the keys of a recipe that are this repository's own, without PyTorch: `--help` must not wait for it."""

import sys
from argparse import SUPPRESS, ArgumentParser
from dataclasses import MISSING, dataclass, field, fields


DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_MIXING_LR_MULTIPLIER = 40.0
ATTENTION_FORMS = ("virtual", "base")


@dataclass
class RunArguments:
    """Hold what a run needs beyond TRL's SFTConfig."""

    model_name_or_path: str = field(metadata={"help": "Checkpoint directory or id on the Hub to start from."})
    dataset_name: str = field(
        metadata={
            "help": "Rows: a directory of sft/prepare.py, a .jsonl, .parquet or .txt file, an id on the Hub, or a .yaml "
            "mixture of them."
        }
    )
    dataset_split: str = field(default="train", metadata={"help": "Split to read of a dataset on the Hub."})
    streaming: bool = field(
        default=False, metadata={"help": "Read and tokenize the rows as they are used; needs max_steps."}
    )
    eval_size: float = field(
        default=0.0, metadata={"help": "Rows held out for evaluation: a share below 1, or a number of rows."}
    )
    sample_prompts: int = field(
        default=2, metadata={"help": "Held-out prompts that the model answers, greedily, at each evaluation."}
    )
    dtype: str = field(default="float32", metadata={"help": "Type of the trained weights.", "choices": DTYPES})
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention core: eager, sdpa, flex_attention, flash_attention_2, ..."}
    )
    attention_form: str | None = field(
        default=None,
        metadata={"help": 'How "iha" layers compute: see IHAModel.attention_form.', "choices": ATTENTION_FORMS},
    )
    num_pseudo_heads: int | None = field(
        default=None, metadata={"help": "P that the recipe is for; another P of the checkpoint is refused."}
    )
    max_position_embeddings: int | None = field(
        default=None, metadata={"help": "Positions, in tokens, that the trained checkpoint declares."}
    )
    rope_theta: float | None = field(
        default=None, metadata={"help": "RoPE base to train with, which the trained checkpoint keeps."}
    )
    sliding_window: int | None = field(
        default=None, metadata={"help": "Window of the sliding layers, in tokens, which the trained checkpoint keeps."}
    )
    memory_gb: float | None = field(
        default=None, metadata={"help": "Memory of a device in GB to plan for, instead of what this machine has."}
    )
    mixing_lr_multiplier: float | None = field(
        default=None,
        metadata={
            "help": "Learning rate of the mixing and collapse weights, in units of learning_rate: 40 by default."
        },
    )
    mixing_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Learning rate of the mixing and collapse weights by itself, in place of the multiplier."},
    )
    use_peft: bool = field(
        default=False,
        metadata={"help": "Train LoRA adapters and, of the model, only the mixing and collapse weights."},
    )
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the adapters, in units of 1 / lora_r."})
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout before the adapters."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Names of the linear layers that get an adapter; all but the head by default."}
    )
    use_dora: bool = field(default=False, metadata={"help": "DoRA: adapters with a magnitude of their own."})
    push_repo_id: str | None = field(
        default=None, metadata={"help": "Repository on the Hub, such as me/model, to publish the final model in."}
    )

    def mixing_rate(self, learning_rate: float) -> float:
        """Return the peak learning rate of the mixing and collapse weights beside the backbone's."""
        if self.mixing_learning_rate is not None:
            return self.mixing_learning_rate
        multiplier = self.mixing_lr_multiplier
        return learning_rate * (DEFAULT_MIXING_LR_MULTIPLIER if multiplier is None else multiplier)


def answer_help(usage: str) -> None:
    """Print `usage` and the keys of `RunArguments`, and exit, where the command line asks for help."""
    parser = ArgumentParser(usage=usage, allow_abbrev=False, argument_default=SUPPRESS)
    parser.add_argument("--help_all", action="store_true", help="show the keys of TRL and Transformers as well")
    parser.add_argument("--config", metavar="FILE", help="YAML file with keys and values")
    for key in fields(RunArguments):
        default = "required" if key.default is MISSING else f"default: {key.default}"
        parser.add_argument(
            f"--{key.name}", metavar="VALUE", help=f"{key.metadata['help']} ({default})".replace("%", "%%")
        )
    if {"-h", "--help"} & set(sys.argv[1:]):
        parser.print_help()
        sys.exit()
