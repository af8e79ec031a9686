"""Name the tasks of each suite and their defaults. The command line reads this before lm-eval is imported."""

from pathlib import Path
from typing import Any


# Packages that `evaluation.run` needs besides those of the extra "scripts".
PACKAGES = ("lm_eval", "datasets", "markdown_it", "math_verify", "wonderwords")
# A few hand-made rows of each benchmark, in the layout of a data directory, which are part of the repository.
SMOKE = Path(__file__).with_name("smoke_data")
# RULER's tasks: multi-key retrieval comes first, because the paper sees the largest difference there.
RULER = (
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multivalue",
    "niah_multiquery",
    "ruler_vt",
    "ruler_cwe",
    "ruler_fwe",
    "ruler_qa_squad",
    "ruler_qa_hotpot",
)
TABLE_1 = ("gsm8k", "math500", "mbpp", "humaneval")
TABLE_2 = ("gsm8k_5shot", "gsm8k_5shot_maj5", "math500_4shot", "mbpp_5shot", "humaneval_completion")
# Tasks that run programs that the model writes.
CODE = ("mbpp", "humaneval", "mbpp_5shot", "humaneval_completion")
# Tasks that are made anew for each of `--lengths`.
BY_POSITION = "perplexity_by_position"
BY_LENGTH = (*RULER, BY_POSITION)
SUITES = {
    "smoke": (*TABLE_1, *TABLE_2, "dcformer_synthetic", "niah_multikey_2", "niah_single_1", "perplexity_by_position"),
    "ruler": BY_LENGTH,
    "reasoning": TABLE_1,
    "paper": (*TABLE_1, *TABLE_2, "dcformer_synthetic", *BY_LENGTH),
}
# Defaults of options of the command line. The task decides on an option that is `None`.
DEFAULTS: dict[str, Any] = {"lengths": [4096, 8192, 16384]}
SMOKE_DEFAULTS = {"lengths": [512], "limit": 2, "samples": 2, "max_new_tokens": 8, "data": SMOKE}
