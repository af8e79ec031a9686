"""Interleave the heads of a tiny random model of every type with a text decoder, and compare.

The types are those of AutoModelForCausalLM, and those of several media, of AutoModelForMultimodalLM. A type is exact
if its logits stay as they were: of a batch, of longer rows, of a left-padded batch, of packed rows where the base
keeps documents apart, of an image in a text where the model takes one, and of the tokens that `generate` adds on a
dynamic and on a static cache. Then the mixing is moved at random, which must change the logits. Those of generated
tokens must still be what they are without a cache, where this holds for the base. Windows, chunks and budgets of
attention are shorter than the input, so that they act.

At last the model is saved, and a clean process without this package does what a user does, by the library's defaults:
it loads the directory, calls it and generates, which must give the same logits, and takes four steps of AdamW, which
must lower the loss and reach every mixing matrix.

`interleave_heads` rejects every other type with the reason, or Transformers does not build it here. A type that fails
in another way is an error of this package, and the exit code is 1. Without --types the command writes
research/experiments/results/model_types.json and docs/MODEL_TYPES.md. A type takes about ten seconds of one core, all
of them the better part of an hour.

example: python -m research.experiments.model_types --types gemma3_text olmo2
"""

import dataclasses
import re
import tempfile
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from inspect import signature
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, logging
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from iha.errors import ROOT, UserError, run_cli
from iha.files import whole_file, write_json
from iha.processes import run_in_clean_process
from modeling_iha import interleave_heads
from modeling_iha.interleaved_attention import decoder_config
from modeling_iha.mixing_weights import mixing_parameters
from research.benchmarks.harness import environment
from research.experiments.options import RESULTS, StudyParser


PSEUDO_HEADS = 3
NEW_TOKENS = 8
IMAGE_TOKEN = 61
GREEDY = {
    **{"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0},
    **{"return_dict_in_generate": True, "output_logits": True},
}
EXACT = 2e-5
# The types that an Auto class knows, but for this package's. One of several media may have a class for text besides.
CAUSAL = "AutoModelForCausalLM"
MULTIMODAL = "AutoModelForMultimodalLM"
OTHER_CLASSES = [
    name
    for name, model_class in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items()
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name) != model_class
]
TYPES = {
    CAUSAL: [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not name.startswith(("iha", "interleaved"))],
    MULTIMODAL: [name for name in OTHER_CLASSES if not name.startswith("interleaved")],
}
# The sizes of tiny models, by the names that configurations use. Windows and budgets are shorter than the input.
NAMES = {
    128: "max_position_embeddings n_positions n_ctx max_seq_len rel_extent",
    64: "vocab_size vocab_size_per_layer_input shape_vocab_size pronunciation_vocab_size",
    48: """
        intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim dim_ff intermediate_size_mlp
        d_inner d_ff expert_ffn_hidden_size feed_forward_size
    """,
    32: """
        hidden_size d_model n_embd emb_dim word_embed_proj_dim embedding_size ffn_hidden_size lru_width
        ple_embed_dim out_hidden_size adapter_in_dim adapter_out_dim adapter_input_size
    """,
    16: """
        q_lora_rank kv_lora_rank moe_intermediate_size shared_expert_intermediate_size mamba_d_state
        mamba_d_head shared_intermediate_size router_hidden_size hc_lowrank
    """,
    12: "local_attention",
    8: """
        head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim swa_head_dim linear_key_head_dim
        linear_value_head_dim linear_head_dim attention_head_size index_head_dim hidden_size_per_layer_input
        dim_head d_head d_kv laurel_rank
    """,
    6: """
        sliding_window window_size attention_window_size sliding_window_size attention_chunk_size index_topk
        keep_window_size
    """,
    4: """
        num_attention_heads n_head n_heads num_heads decoder_attention_heads num_decoder_attention_heads
        num_encoder_attention_heads encoder_attention_heads attention_heads swa_num_attention_heads
        linear_num_heads conf_num_attention_heads num_experts num_local_experts n_routed_experts
        moe_num_experts ngram linear_num_key_heads linear_num_value_heads mamba_n_heads zero_expert_num
    """,
    2: """
        num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers
        num_decoder_layers depth num_blocks num_dense_layers num_key_value_heads num_kv_heads
        swa_num_key_value_heads num_experts_per_tok global_attn_every_n_layers index_n_heads
        num_experts_per_token moe_topk no_rope_layer_interval
    """,
    1: "n_group num_expert_group topk_group n_shared_experts first_k_dense_replace max_window_layers",
    0.2: "initializer_range init_std",
}
SIZES = {name: size for size, names in NAMES.items() for name in names.split()}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_sliding_window": True}
SIZES |= {"image_token_id": IMAGE_TOKEN, "image_token_index": IMAGE_TOKEN}
# Latent attention has a key and a value for each query head.
LATENT = {"num_key_value_heads": 4}
# The last two layers take the keys and values of the first two.
SHARED = {
    "layer_types": 2 * ["sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
}
# A BERT-like decoder: without this it is an encoder, which is rejected.
DECODER = {"is_decoder": True}
MROPE = ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm46v_text", "glm_ocr_text")
FIELDS = {
    "gemma3": {"mm_tokens_per_image": 4},
    "qwen2_5_vl_vision": {"window_size": 112},
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text"), LATENT),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"), LATENT),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), LATENT),
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "gemma4_unified_text"), SHARED),
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "num_experts_per_tok": 1},
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "num_hidden_layers": 3,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
        **{"indexer_budget": 4, "indexer_compress_ratio": 2},
    },
    **dict.fromkeys(("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie"), DECODER),
    **dict.fromkeys(("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"), DECODER),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl", "big_bird"), DECODER),
    "xmod": DECODER | {"default_language": "en_XX"},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        **{"index_block_size": 2, "index_topk_blocks": 2, "index_local_blocks": 1},
    },
    "minimax": {"sliding_window": None},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    **dict.fromkeys(("laguna", "mellum"), {"layer_types": ["full_attention", "sliding_attention"]}),
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "zamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 0, "mamba_dt_rank": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16},
    "mamba2": {"head_dim": 16, "n_groups": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "reformer": DECODER | {"axial_pos_embds_dim": [8, 24]},
    "": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},  # of DBRX's attention
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "blt": {"encoder_hash_byte_group_size": [3, 4], "encoder_hash_byte_group_vocab": 64},
    **dict.fromkeys(("blt_local_encoder", "blt_local_decoder"), {"hidden_size_global": 32}),
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None},
    },
    "dots3_note_vision_encoder": {"num_hidden_layers": 42},
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return the configuration of a tiny model of a type."""
    return _shrunk(AutoConfig.for_model(model_type))


def _shrunk(config: PreTrainedConfig) -> PreTrainedConfig:
    names = {field.name for field in dataclasses.fields(config)}
    sizes = names.union(config.attribute_map)
    fields = {name: size for name, size in SIZES.items() if name in sizes}
    kinds = list(dict.fromkeys(config.layer_types or ())) if "layer_types" in names else []
    if len(kinds) > 1:  # one layer of each
        fields |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type in MROPE or "mrope_section" in rope:  # time, height and width share half a head
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, **rope, "mrope_section": [2, 1, 1]}
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            fields[name] = _shrunk(getattr(config, name))
    return type(config)(**fields | FIELDS.get(config.model_type, {}))


def tiny_model(model_type: str, auto_class: str = CAUSAL) -> PreTrainedModel:
    """Return a random tiny model of a type, on SDPA where the type has it."""
    config = tiny_config(model_type)
    from_config = getattr(transformers, auto_class).from_config
    torch.manual_seed(0)
    try:
        return from_config(config, attn_implementation="sdpa").eval()
    except ValueError:
        return from_config(config, attn_implementation="eager").eval()


def try_type(model_type: str, auto_class: str, directory: Path) -> dict:
    """Return what became of a type: its verdict, and the largest differences or the reason.

    A model that is exact so far is saved in the directory, with moved weights and its outputs (see `load`)."""
    try:
        model = tiny_model(model_type, auto_class)
        before = outputs(model)
        error_of_cache = cache_error(model)
        trains = trains_twice(model)
        check_base(model, before, getattr(transformers, auto_class))
    except Exception as error:
        return {"verdict": "not built", "reason": one_line(error)}
    try:
        interleave_heads(model, PSEUDO_HEADS)
    except ValueError as error:
        return {"verdict": "rejected", "reason": one_line(error)}
    return compare(model, before, error_of_cache, trains, directory)


def compare(model: PreTrainedModel, before: dict, error_of_cache: float, trains: bool, directory: Path) -> dict:
    """Compare an interleaved model with its base, and with moved weights with itself from a cache; then save it."""
    after = outputs(model, before)
    differences = {name: difference(logits, after[name]) for name, logits in before.items()}
    generator = torch.Generator().manual_seed(2)
    for weight in mixing_parameters(model):
        weight.data += 0.3 / decoder_config(model).mixing_scale * torch.randn(weight.shape, generator=generator)
    moved = outputs(model, before.keys() & {"full", "greedy", "image"})
    control = difference(before["full"], moved["full"])
    if error_of_cache <= EXACT:
        differences["cached"] = cache_error(model)
    exact = "greedy" in before and max(differences.values()) <= EXACT < control
    if exact:
        model.save_pretrained(directory)
        images = image_inputs(model) if "image" in before else {}
        expected = {"inputs": {"input_ids": inputs()}, "images": images, "outputs": moved, "trains": trains}
        torch.save(expected, directory / "expected.pt")
    return {"verdict": "exact" if exact else "DIFFERS", **differences, "control": control}


# What a user does who has the directory and not this package: everything by the library's defaults.
LOAD = """
import torch
import transformers
transformers.logging.set_verbosity_error()
for place in request["places"]:
    expected = torch.load(f"{place}/expected.pt")
    inputs, images = expected["inputs"], expected["images"]
    try:
        model = getattr(transformers, request["auto_class"]).from_pretrained(place, trust_remote_code=True)
        answer = {"full": model(**inputs).logits.detach()}
        if images:
            answer["image"] = model(**images).logits.detach()
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, :4] = 0
        answer["greedy"] = torch.stack(model.generate(**inputs, attention_mask=mask, **request["options"]).logits)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        for _ in range(4 if expected["trains"] else 0):
            losses.append(model(**inputs, labels=inputs["input_ids"]).loss)
            losses[-1].backward()
            optimizer.step()
            gradients = [w.grad.abs().max() for name, w in model.named_parameters() if "_mix." in name]
            optimizer.zero_grad()
        if losses:
            answer["losses"], answer["gradient"] = torch.stack(losses).detach(), torch.stack(gradients).min()
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    torch.save(answer, f"{place}/answer.pt")
result = {}
"""


def load(rows: dict[Path, dict], auto_class: str) -> None:
    """Add to the exact rows, by directory, what a clean process makes of the saved models by library defaults."""
    rows = {directory: row for directory, row in rows.items() if row["verdict"] == "exact"}
    run_in_clean_process(LOAD, {"places": list(map(str, rows)), "auto_class": auto_class, "options": GREEDY})
    for directory, row in rows.items():
        answer = torch.load(directory / "answer.pt")
        if "error" in answer:
            row |= {"verdict": "DIFFERS", "reason": answer["error"]}
            continue
        expected = torch.load(directory / "expected.pt")["outputs"]
        row["loaded"] = max(difference(logits, answer[check]) for check, logits in expected.items())
        if (losses := answer.get("losses")) is not None:
            row |= {"learned": (losses[0] - losses[-1]).item(), "gradient": answer["gradient"].item()}
        if row["loaded"] > EXACT or not min(row.get("learned", 1), row.get("gradient", 1)) > 0:
            row["verdict"] = "DIFFERS"


def check_base(model: PreTrainedModel, before: dict[str, torch.Tensor], auto_class: type) -> None:
    """Raise a ValueError for a base model that computes something else once it was saved and loaded.

    Drop the check of images where that alone differs, as it does for GOT-OCR2."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        try:
            loaded = auto_class.from_pretrained(directory)
        except ValueError:  # of another Auto class: `interleave_heads` rejects it
            return
    after = outputs(loaded, before.keys() & {"full", "image"})
    if difference(before["full"], after["full"]) > EXACT:
        raise ValueError("the base model itself computes something else once it was saved and loaded")
    if "image" in before and difference(before["image"], after["image"]) > EXACT:
        del before["image"]


def trains_twice(model: PreTrainedModel) -> bool:
    """Return whether a second step runs: some models keep a state of the first."""
    try:
        for _ in range(2):
            model(input_ids=inputs(), labels=inputs()).loss.backward()
    except Exception:
        return False
    model.zero_grad()
    return True


@torch.no_grad()
def outputs(model: PreTrainedModel, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Return the logits of the named checks, or of all that the model takes."""
    tokens = inputs()
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    positions = torch.cat((torch.arange(6), torch.arange(7)))[None]  # two documents

    def logits(tokens: torch.Tensor, **options) -> torch.Tensor:
        return model(input_ids=tokens, use_cache=False, **options).logits

    def greedy(cache: str) -> torch.Tensor:
        return torch.stack(generate(model, tokens, attention_mask=mask, cache_implementation=cache).logits)

    checks = {
        "full": lambda: logits(tokens),
        "long": lambda: logits(long_inputs()),
        "padded": lambda: logits(tokens, attention_mask=mask)[mask.bool()],
        "greedy": lambda: greedy("dynamic"),
        "static": lambda: greedy("static"),
        "packed": lambda: logits(tokens[:1], position_ids=positions),
        "image": lambda: model(**image_inputs(model)).logits,
    }
    if names is not None:
        return {name: checks[name]() for name in names}
    found = {}
    for name, check in checks.items():
        try:
            found[name] = check()
        except Exception:
            if name in ("full", "long", "padded"):
                raise  # else the base model does not take this
    if "packed" in found and difference(logits(tokens[:1, 6:]), found["packed"][:, 6:]) > EXACT:
        del found["packed"]  # the base model does not keep documents apart
    return found


def inputs() -> torch.Tensor:
    return torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(1))


def long_inputs() -> torch.Tensor:
    """Return rows of more than 128 virtual tokens beyond a window of 6, so that `sdpa_in_blocks` takes blocks."""
    return torch.randint(3, 60, (2, 53), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def image_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a batch of one row of text with an image in the middle, padded on the left.

    Raise an exception where the model takes no image in the usual way."""
    config = model.config
    takes = signature(model.get_image_features).parameters
    vision = config.vision_config
    generator = torch.Generator().manual_seed(4)
    if "image_grid_thw" in takes:
        pixels = getattr(vision, "in_channels", 3) * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
        images = {"pixel_values": torch.randn(16, pixels, generator=generator)}
        images["image_grid_thw"] = torch.tensor([[1, 4, 4]])
    else:
        size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
        images = {"pixel_values": torch.randn(1, 3, size, size, generator=generator)}
        if "image_sizes" in takes:
            images["image_sizes"] = torch.tensor([[size, size]])
        if "pixel_attention_mask" in takes:  # several images in each row
            images["pixel_values"] = images["pixel_values"][None]
    features = model.get_image_features(**images)
    features = getattr(features, "pooler_output", features)
    count = sum(len(each) for each in features) if isinstance(features, (list, tuple)) else features[..., 0].numel()
    image = torch.full((1, count), IMAGE_TOKEN)
    text = inputs()[:1]
    tokens = torch.cat((torch.zeros(1, 2, dtype=torch.long), text[:, :5], image, text[:, 5:]), dim=1)
    places = (tokens == IMAGE_TOKEN).int()
    names = {"token_type_ids", "mm_token_type_ids"} & signature(model.forward).parameters.keys()
    mask = torch.ones_like(tokens).index_fill(1, torch.arange(2), 0)
    return {"input_ids": tokens, "attention_mask": mask, **images, **dict.fromkeys(names, places)}


def generate(model: PreTrainedModel, tokens: torch.Tensor, **options) -> GenerateDecoderOnlyOutput:
    return model.generate(tokens, **GREEDY, disable_compile=True, **options)


@torch.no_grad()
def cache_error(model: PreTrainedModel) -> float:
    """Return the difference of logits of generated tokens from the cache and without one, of no cache infinity."""
    try:
        generated = generate(model, inputs()[1:])
    except Exception:
        return float("inf")
    whole = model(input_ids=generated.sequences[:, :-1], use_cache=False).logits
    return difference(whole[:, -NEW_TOKENS:], torch.stack(generated.logits, dim=1))


def difference(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest value."""
    if before.shape != after.shape:
        return float("inf")
    return ((before - after).abs().max() / before.abs().max()).nan_to_num(torch.inf).item()


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


# Mark of an exact type -> the check that its base model does not take, or "image", which it does; and what this means.
MARKS = {
    "¹": ("static", "takes no static cache"),
    "²": ("packed", "does not keep packed documents apart by their positions"),
    "³": ("learned", "keeps a state that ends a second training step, or takes no labels"),
    "⁴": ("cached", "does not compute the same with and without a cache"),
    "⁵": ("image", "compared with an image in the batch too"),
}


def document(tables: dict[str, dict[str, dict]], setting: dict) -> str:
    """Return the tables of the Auto classes as Markdown: the exact types in one list, and the others by reason."""
    given = "".join(_marks(row) for table in tables.values() for row in table.values() if row["verdict"] == "exact")
    marks = "; ".join(f"{mark} {about}" for mark, (_, about) in MARKS.items() if mark in given)
    parts = [
        "# Model types",
        "This page lists what `interleave_heads` does with a tiny random model of each type. "
        f"`{setting['command']}` writes it, "
        f"and its docstring says what is compared ({setting['machine']}, torch {setting['torch']}, transformers "
        f"{setting['transformers']}). The [record](../research/experiments/results/model_types.json) has the "
        "differences of the exact types, which are rounding errors, and why a type was not built here. Marks "
        f"describe the base model: {marks}.",
    ]
    for auto_class, table in tables.items():
        exact = [name for name, row in table.items() if row["verdict"] == "exact"]
        parts += [
            f"## {auto_class}: {len(exact)} of {len(table)} types are exact",
            ", ".join(name + _marks(table[name]) for name in exact) + ".",
        ]
        reasons = defaultdict(list)
        for name, row in table.items():
            if row["verdict"] != "exact":
                reasons[_reason(row)].append(name)
        parts += [f"{reason[0].upper()}{reason[1:]}: {', '.join(names)}." for reason, names in sorted(reasons.items())]
    return "\n\n".join(part if part.startswith("#") else _wrapped(part) for part in parts) + "\n"


def _marks(row: dict) -> str:
    return "".join(mark for mark, (check, _) in MARKS.items() if (check in row) == (check == "image"))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False)


def _reason(row: dict) -> str:
    """Return why a type is not exact, the same words for types of one reason."""
    if row["verdict"] == "not built":
        return "not built here"
    reason = re.sub(r"^.*cannot be interleaved: \w+", "its attention", row.get("reason", "differs"))
    reason = re.sub(r"^\w+ is not a class", "its class is not one", reason)
    noise = (r"^\S+ (?=does not )", r"( \(.*)?(, and is left as it was|: docs/MODEL_TYPES).*$")
    noise += (r", so its heads.*$", r": a saved .*$")
    reason = re.sub("|".join(noise), "", reason)
    return f"{row['verdict']}, {reason.rstrip('.')}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = StudyParser("research.experiments.model_types", description=__doc__)
    parser.set_defaults(study="model_types")
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="some types only, printed and not written")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    known = {name for names in TYPES.values() for name in names}
    if unknown := set(args.types or ()) - known:
        raise UserError(f"--types {', '.join(sorted(unknown))}: expected names that docs/MODEL_TYPES.md lists.")
    tables: dict[str, dict[str, dict]] = {}
    for auto_class, names in TYPES.items():
        print(auto_class)
        tables[auto_class] = {name: measured(name, auto_class) for name in args.types or names if name in names}
        counts = Counter(row["verdict"] for row in tables[auto_class].values())
        print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    if args.types is None:
        setting = environment(args.command)
        write_json(RESULTS / "model_types.json", {**setting, "types": tables})
        with whole_file(ROOT / "docs" / "MODEL_TYPES.md") as path:
            path.write_text(document(tables, setting), encoding="utf-8")
    rows = [(name, row) for table in tables.values() for name, row in table.items()]
    if errors := [name for name, row in rows if row["verdict"].isupper()]:
        raise UserError(f"Neither exact nor rejected: {', '.join(errors)}.")


def measured(name: str, auto_class: str) -> dict:
    """Return the row of a type, and print it."""
    try:
        with tempfile.TemporaryDirectory() as directory:
            row = try_type(name, auto_class, Path(directory))
            if row["verdict"] == "exact":
                load({Path(directory): row}, auto_class)
    except Exception as error:
        row = {"verdict": "FAILS", "reason": one_line(error)}
    print(f"{name:24}", *(f"{v:.0e}" if isinstance(v, float) else v for v in row.values()), flush=True)
    return row


if __name__ == "__main__":
    run_cli(main)
