"""Compare the greedy decoding of SmolLM2-135M-Instruct, converted to IHA with P = 2 in every layer, with its source's.

Both models decode in fp32 after a prompt of random tokens and must choose the same tokens.

example: python -m research.benchmarks.decode_model --tokens 512
"""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

from iha.checkpoints import load_model, smollm2_gguf
from iha.conversion.arguments import Layers
from iha.conversion.convert_llama_to_iha import convert_model, iha_config
from iha.errors import run_cli
from iha.model_cost import attention
from iha.sources import find_source
from modeling_iha.transformers_versions import CACHE
from research.benchmarks.harness import medians, ratios, reported, write
from research.benchmarks.options import arguments


PARSER = arguments(__doc__, [512])


PSEUDO_HEADS = 2
NEW_TOKENS = 24


def greedy(model: torch.nn.Module, prompt: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Decode greedily after the prompt, whose cache is filled here."""
    cache = DynamicCache()
    with torch.no_grad():
        first = model(input_ids=prompt, **{CACHE: cache}, logits_to_keep=1).logits.argmax(-1)

    @torch.no_grad()
    def run() -> torch.Tensor:
        tokens = [first]
        for _ in range(NEW_TOKENS):
            tokens.append(model(input_ids=tokens[-1], **{CACHE: cache}).logits.argmax(-1))
        cache.crop(-NEW_TOKENS)
        return torch.cat(tokens, dim=1)

    return run


def values_read(iha: PreTrainedModel, kind: str, tokens: int) -> int:
    """Count the weights and cached values that one more token reads if every layer of the model is of `kind`."""
    costs = [attention(iha.config, kind, layer_type, tokens) for layer_type in iha.config.layer_types]
    others = sum(parameter.numel() for name, parameter in iha.named_parameters() if "self_attn" not in name)
    return others + sum(cost.parameters + cost.cache for cost in costs)


def measure(llama: PreTrainedModel, iha: PreTrainedModel, tokens: int, repeats: int) -> dict:
    prompt = torch.randint(llama.config.vocab_size, (1, tokens))
    runs = {name: greedy(model, prompt) for name, model in (("iha", iha), ("llama", llama))}
    if not torch.equal(runs["iha"](), runs["llama"]()):
        raise RuntimeError("The converted model chooses other tokens than its source.")
    seconds = {name: value / NEW_TOKENS for name, value in medians(runs, repeats).items()}
    read = {"iha": values_read(iha, "iha", tokens), "llama": values_read(iha, "mha", tokens)}
    row = {"tokens": tokens, "pseudo_heads": PSEUDO_HEADS, "seconds": seconds}
    return {**row, "ratios": ratios(seconds, "llama"), "predicted": ratios(read, "llama")}


def main() -> None:
    args = PARSER.parse_args()
    logging.disable_progress_bar()
    llama = load_model(find_source(smollm2_gguf()), torch.float32)
    iha = convert_model(llama, iha_config(llama.config, Layers(PSEUDO_HEADS)))
    rows = reported(measure(llama, iha, tokens, args.repeats) for tokens in args.tokens)
    setting = {"new_tokens": NEW_TOKENS, "checkpoint": "SmolLM2-135M-Instruct"}
    predicted_by = "values of weights and cache that are read"
    write(args.out, "decode_model", rows, dtype="float32", **setting, predicted_by=predicted_by)


if __name__ == "__main__":
    run_cli(main)
