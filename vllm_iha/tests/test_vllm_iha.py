"""Compare vLLM with `generate`: greedy tokens are equal, and log-probabilities are as close to float64's."""

import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

# This comes before vLLM, whose settings it makes.
from serving import (
    GREEDY,
    LENGTHS,
    LOGPROBS,
    SIZES,
    WORDS,
    assert_equal,
    assert_tokens_equal,
    distances,
    engine,
    load,
    random_base,
    random_tokens,
    save_iha,
    save_interleaved,
    serve,
    word_tokenizer,
)
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    AutoTokenizer,
    CLIPImageProcessorPil,
    LlavaProcessor,
    PreTrainedModel,
)
from vllm import ModelRegistry, SamplingParams
from vllm.model_executor.models.transformers.base import Base
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler

import vllm_iha
from conversion_scripts import convert_llama_to_iha
from iha.checkpoints import smollm2_gguf
from iha.errors import ROOT
from iha.kinds import companion_of
from modeling_iha import IHAConfig, pair_heads
from modeling_iha.modeling_iha import ATTENTION_CLASSES
from modeling_iha.modeling_interleaved import interleaved_class, interleaved_config_class, models_by_auto_class
from vllm_iha.checks import KINDS
from vllm_iha.model import VirtualAttention


TYPES = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
LOCAL = {"sliding_window": 9, "layer_types": TYPES}
EXPERTS, LOCAL_EXPERTS = ({name: 4, "num_experts_per_tok": 2} for name in ("num_experts", "num_local_experts"))
PAPER = {"layers": "paper", "sliding_window": 7}
# Model type of the base, fields of its config, and options of `interleave_heads`, where P = 2 unless it says another.
BASES = {
    "llama": ("llama", {}, {"num_pseudo_heads": 3}),
    "llama_all_heads": ("llama", {}, {"num_pseudo_heads": 4, "collapse": "all_heads"}),
    "llama_paper": ("llama", {}, {"num_pseudo_heads": 4, **PAPER}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3_windows": ("qwen3", {}, {"sliding_window": 33}),
    "gemma2": ("gemma2", {**LOCAL, "attn_logit_softcapping": None, "query_pre_attn_scalar": 64}, {}),
    "gemma3": ("gemma3_text", {**LOCAL, "query_pre_attn_scalar": 64}, {"num_pseudo_heads": 3, "layers": [0, 1]}),
    "olmo2": ("olmo2", {}, {}),
    "olmo3": ("olmo3", LOCAL, {}),
    "mistral": ("mistral", {"sliding_window": 9}, {"num_pseudo_heads": 3, "layers": [0, 2, 4]}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "moe_intermediate_size": 64}, {}),
    "mixtral": ("mixtral", LOCAL_EXPERTS, {}),
    "olmoe": ("olmoe", EXPERTS, {}),
    "gpt_oss": ("gpt_oss", {**LOCAL, **LOCAL_EXPERTS}, {}),
    "phi3": ("phi3", {}, {}),
    "smollm3": ("smollm3", {}, {}),
    "granite": ("granite", {"attention_multiplier": 0.1, "logits_scaling": 8.0}, {}),
    "cohere2": ("cohere2", LOCAL, {}),
    "starcoder2": ("starcoder2", {}, {}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4}, {}),
    "opt": ("opt", {"ffn_dim": 192, "word_embed_proj_dim": 128, "num_key_value_heads": 4}, {}),
    "stablelm": ("stablelm", {}, {}),
    "glm4": ("glm4", {}, {}),
}
SCHEDULE = {
    "num_hidden_layers": 5,
    "attention_kinds": ["iha"] * 4 + ["mha"],
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 7,
}
WINDOWS = {"layer_types": "sliding_attention", "sliding_window": 7}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
# Fields of an `IHAConfig`.
CASES = {
    "one_pseudo_head": {"num_pseudo_heads": 1},
    "window_of_two_tokens": {**WINDOWS, "sliding_window": 2, "num_pseudo_heads": 3},
    "schedule": SCHEDULE,
    "schedule_shared": {**SCHEDULE, "pseudo_positions": "shared", "num_pseudo_heads": 4, "sliding_window": 32},
    "paper": {
        **SCHEDULE,
        **{"num_attention_heads": 20, "num_key_value_heads": 20, "num_pseudo_heads": 20, "sliding_window": 10},
        **{"gated_mlp": False, "hidden_act": "gelu", "tie_word_embeddings": True},
    },
    "all_heads_no_groups": {"pseudo_collapse": "all_heads", "num_key_value_heads": 4, "num_pseudo_heads": 4},
    "one_group": {"num_key_value_heads": 1, "num_pseudo_heads": 5, "head_dim": 80},
    "qk_norm_biases": {**SCHEDULE, "use_qk_norm": True, "attention_bias": True, "mlp_bias": True},
    "two_matrix_ffn_prelu": {"gated_mlp": False, "mlp_bias": True, "hidden_act": "prelu", "mixing_scale": 1.0},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "llama3_rope": {"rope_parameters": LLAMA3},
    "yarn_rope": {"rope_parameters": YARN},
    "both_kinds_with_windows": {**WINDOWS, "attention_kinds": ["iha", "mha"], "use_qk_norm": True},
    "mha": {"attention_kinds": "mha"},
    "paired": {"attention_kinds": "paired_heads", "num_attention_heads": 8, "num_key_value_heads": 4},
    "paired_shared": {"attention_kinds": "paired_heads", "pseudo_positions": "shared", "use_qk_norm": True},
    "paired_schedule": {
        **{**SCHEDULE, "attention_kinds": ["paired_heads"] * 4 + ["mha"]},
        **{"num_attention_heads": 8, "num_key_value_heads": 8, "num_pseudo_heads": 4},
    },
    "paired_beside_iha": {**SCHEDULE, "attention_kinds": ["iha", "paired_heads", "paired_heads", "iha", "mha"]},
}
# Options of the engine.
ENGINES = {
    "small_chunks": {"max_num_batched_tokens": 16},
    "few_blocks": {"num_gpu_blocks_override": 24},
    "full_allocation": {"disable_hybrid_kv_cache_manager": True},
    "compiled": {"enforce_eager": False},
}


# Model type of the base, fields of its config, and options of `pair_heads`.
PAIRED_BASES = {
    "llama": ("llama", {"num_key_value_heads": 4}, {}),
    "llama_one_layer": ("llama", {}, {"layers": [0]}),
    "llama_windows": ("llama", {"num_key_value_heads": 4}, {"num_pseudo_heads": 4, **PAPER}),
    "gemma3": ("gemma3_text", {**LOCAL, "query_pre_attn_scalar": 64}, {"layers": [0, 1]}),
}


@pytest.fixture
def undecorated(monkeypatch):
    """Leave a decoder's class as it is: to compile it vLLM changes the class, which is that of the reference here."""
    monkeypatch.setattr(Base, "_decorate_for_torch_compile", lambda self: None)


@pytest.mark.parametrize("case", BASES)
def test_an_interleaved_decoder_equals_generate(case, tmp_path, undecorated):
    model_type, fields, options = BASES[case]
    model = save_interleaved(tmp_path, model_type, fields, **options)
    with engine(tmp_path) as llm:
        outputs = serve(llm, random_tokens(*LENGTHS))
    assert_equal(model, outputs)


@pytest.mark.parametrize("case", PAIRED_BASES)
def test_a_paired_decoder_equals_generate(case, tmp_path, undecorated):
    model_type, fields, options = PAIRED_BASES[case]
    model = pair_heads(random_base(model_type, **fields), **{"num_pseudo_heads": 2, **options})
    model.save_pretrained(tmp_path)
    model = load(tmp_path, cls=type(model))
    with engine(tmp_path) as llm:
        outputs = serve(llm, random_tokens(*LENGTHS))
    assert_equal(model, outputs)


@pytest.mark.parametrize("case", CASES)
def test_iha_equals_generate(case, tmp_path, undecorated):
    model = save_iha(tmp_path, **CASES[case])
    # The reference's P = 20 make rows of 20 N virtual tokens. The longest prompt still comes in two chunks.
    lengths = LENGTHS[:6] if case == "paper" else LENGTHS
    with engine(tmp_path, num_gpu_blocks_override=100) as llm:
        outputs = serve(llm, random_tokens(*lengths))
    assert_equal(model, outputs)


@pytest.mark.parametrize("case", ENGINES)
def test_options_of_the_engine(case, tmp_path):
    model = save_interleaved(tmp_path, "llama", {}, num_pseudo_heads=4, **PAPER)
    with engine(tmp_path, **ENGINES[case]) as llm:
        outputs = serve(llm, random_tokens(*LENGTHS))
    assert_equal(model, outputs)


def test_softcapped_scores(tmp_path, undecorated):
    """Compare with plain Gemma 2 too: the tanh of vLLM's kernel for CPUs is less exact than PyTorch's."""
    fields = {**LOCAL, "query_pre_attn_scalar": 64}
    model, base = save_interleaved(tmp_path / "interleaved", "gemma2", fields), tmp_path / "base"
    random_base("gemma2", **fields).save_pretrained(base)
    with engine(tmp_path / "interleaved") as llm:
        outputs = serve(llm, random_tokens(*LENGTHS))
    with engine(base, model_impl="transformers") as llm:
        plain, plain_ours = distances(load(base), serve(llm, random_tokens(*LENGTHS)))
    assert_tokens_equal(model, outputs)
    served, ours = distances(model, outputs)
    assert served / ours < 2 * plain / plain_ours


def save_processor(directory: Path) -> LlavaProcessor:
    """Save what turns an image of 28 x 28 pixels into four tokens."""
    size = {"height": 28, "width": 28}
    images = CLIPImageProcessorPil(size=size, crop_size=size)
    processor = LlavaProcessor(
        images, word_tokenizer("<image>"), patch_size=14, vision_feature_select_strategy="default"
    )
    processor.num_additional_image_tokens = 1
    processor.save_pretrained(directory)
    return processor


def test_images(tmp_path, undecorated):
    """Read an image in one request, and none in others at the same time."""
    processor = save_processor(tmp_path)
    image_token = processor.tokenizer.convert_tokens_to_ids("<image>")
    text = {**SIZES, "model_type": "llama", "vocab_size": len(processor.tokenizer)}
    vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, "num_hidden_layers": 2}
    vision |= {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    fields = {"text_config": text, "vision_config": vision, "image_token_index": image_token}
    model = save_interleaved(tmp_path, "llava", {**fields, "auto_class": AutoModelForImageTextToText}, **PAPER)
    image = Image.effect_noise((28, 28), 100).convert("RGB")
    prompts = [{"prompt": f"w1 <image> {' '.join(WORDS[:30])}", "multi_modal_data": {"image": image}}]
    prompts += [{"prompt": "w7"}, {"prompt": "w7 w8 w9"}]
    with engine(tmp_path, skip_tokenizer_init=False, limit_mm_per_prompt={"image": 1}) as llm:
        outputs = llm.generate(prompts, SamplingParams(**GREEDY, **LOGPROBS), use_tqdm=False)
    assert outputs[0].prompt_token_ids.count(image_token) == 4
    pixels = processor(images=image, text="<image>", return_tensors="pt")["pixel_values"]
    assert_equal(model, outputs[:1], pixel_values=pixels)
    assert_equal(model, outputs[1:])


@pytest.mark.parametrize("kind", ["interleaved", "iha"])
def test_bfloat16(kind, tmp_path, undecorated):
    """Compare log-probabilities alone: another token may win."""
    if kind == "iha":
        model = save_iha(tmp_path, torch.bfloat16, **{**SCHEDULE, "initializer_range": 0.02})
    else:
        model = save_interleaved(tmp_path, "llama", {"initializer_range": 0.02}, torch.bfloat16, **PAPER)
    with engine(tmp_path, dtype="bfloat16") as llm:
        outputs = serve(llm, random_tokens(*LENGTHS))
    served, ours = distances(model, outputs)
    assert served < 2 * ours


def after_shared_prefix(directory: Path) -> tuple[PreTrainedModel, list]:
    """Return a model and what vLLM writes after a prefix that it has in its cache.

    A block of a window layer holds 32 tokens. The first token after a block reaches one token into the block before
    the last one, through the W * P virtual tokens of its window."""
    model = save_interleaved(directory, "llama", {}, num_pseudo_heads=4, layers="paper", sliding_window=33)
    prefix, *ends = random_tokens(260, 1, 5, 40)
    with engine(directory) as llm:
        # A request for log-probabilities of its prompt reads no cached prefix.
        serve(llm, [prefix], prompt_logprobs=None)
        outputs = serve(llm, [[*prefix, *end] for end in ends], prompt_logprobs=None)
    assert all(output.num_cached_tokens == 256 for output in outputs)
    return model, outputs


def test_a_shared_prefix_is_cached(tmp_path):
    assert_equal(*after_shared_prefix(tmp_path))


def test_a_window_one_token_short_is_caught(tmp_path, monkeypatch):
    """Let the cache manager keep W tokens, as for a layer that is not interleaved: the check fails."""
    get_spec = VirtualAttention.get_kv_cache_spec

    def short_spec(*args):
        spec = get_spec(*args)
        return replace(spec, sliding_window=spec.sliding_window - 1)

    monkeypatch.setattr(VirtualAttention, "get_kv_cache_spec", short_spec)
    served, ours = distances(*after_shared_prefix(tmp_path))
    assert served > 100 * ours


def test_preempted_requests_go_on(tmp_path, monkeypatch):
    """Run six prompts on eight free blocks: each takes one block, and a second one for its new tokens."""
    preempted, preempt = [], Scheduler._preempt_request
    monkeypatch.setattr(
        Scheduler,
        "_preempt_request",
        lambda *args, **kwargs: preempted.append(args[1].request_id) or preempt(*args, **kwargs),
    )
    model = save_interleaved(tmp_path, "llama", {}, num_pseudo_heads=4)
    with engine(tmp_path, num_gpu_blocks_override=9, max_model_len=64) as llm:
        outputs = serve(llm, random_tokens(*[30] * 6))
    assert preempted
    assert_equal(model, outputs)


def test_forty_requests_at_once(tmp_path):
    model = save_interleaved(tmp_path, "gemma3_text", LOCAL)
    lengths = torch.randint(1, 300, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    with engine(tmp_path, max_num_seqs=40, num_gpu_blocks_override=400, max_num_batched_tokens=256) as llm:
        outputs = serve(llm, random_tokens(*lengths))
    assert_equal(model, outputs)


def test_a_converted_model(tmp_path, undecorated):
    converted, schedule = tmp_path / "iha", ["--num-pseudo-heads", "2", "--schedule", "hybrid", "--window", "32"]
    convert_llama_to_iha.main([str(smollm2_gguf()), str(converted), *schedule])
    # From random tokens beyond its windows the model makes a text in which rounding grows twentyfold at one place.
    text = AutoTokenizer.from_pretrained(converted)((ROOT / "LICENSE").read_text())["input_ids"]
    with engine(converted) as llm:
        outputs = serve(llm, [text[:5], text[:40], text[:130]])
    assert_equal(load(converted), outputs)


LATENT = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}
MIXTRAL = {**SIZES, **LOCAL_EXPERTS, "model_type": "mixtral"}
# Model type of the base, fields of its config, the task, and the message.
REFUSED_BASES = {
    "latent": ("deepseek_v3", LATENT, "ForCausalLM", "Multi-head latent attention"),
    "chunks": ("llama4_text", {"layer_types": ["chunked_attention"] * 5}, "ForCausalLM", "'chunked_attention', which"),
    "vision": ("gemma3", {}, "ForImageTextToText", "with llava alone, and this is gemma3"),
    "vision_and_experts": ("llava", {"text_config": MIXTRAL}, "ForImageTextToText", "A model of images with experts"),
    "sound": ("qwen2_audio", {}, "ForMultimodalLM", "InterleavedQwen2AudioForConditionalGeneration was not tested"),
    "classifier": ("llama", {}, "ForSequenceClassification", "LlamaForSequenceClassification was not tested"),
    "logits": ("llama", {"lm_head_multiplier": 0.5}, "ForCausalLM", "lm_head_multiplier=0.5 of the logits"),
}


@pytest.mark.parametrize("case", REFUSED_BASES)
def test_which_bases_are_refused(case, tmp_path):
    model_type, fields, task, message = REFUSED_BASES[case]
    base = CONFIG_MAPPING[model_type]
    config = interleaved_config_class(base)(**(fields if task != "ForCausalLM" else {**SIZES, **fields}))
    config.get_text_config().num_pseudo_heads = 2
    config.architectures = [interleaved_class(models_by_auto_class(base)[f"AutoModel{task}"], base).__name__]
    config.save_pretrained(tmp_path)
    with_images = task == "ForImageTextToText"
    if with_images:
        save_processor(tmp_path)
    with (
        pytest.raises(NotImplementedError, match=message) as error,
        engine(tmp_path, skip_tokenizer_init=not with_images),
    ):
        pass
    assert "\n" not in str(error.value)


CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
# Fields of the config, options of the engine, and the message.
REFUSED_MODELS = {
    "kind": ({"attention_kinds": ["iha", "diff"]}, {}, "'diff', and vLLM serves 'mha', 'iha', 'paired_heads'"),
    "mlp_gate_groups": ({"mlp_gate_groups": 4}, {}, "mlp_gate_groups=4"),
    "output_gate": ({"output_gate": "per_head"}, {}, "output_gate='per_head' is not served"),
    "exclusive_attention": ({"exclusive_attention": True}, {}, "exclusive_attention=True is not served"),
    "no_rope_layers": ({"no_rope_layers": [1, 0]}, {}, "no_rope_layers is not served"),
    "local_rope": (
        {
            **WINDOWS,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), YARN),
        },
        {},
        "rope_parameters of each layer type",
    ),
    "rope": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {}, "'dynamic'"),
    "head_dim": ({"head_dim": 16}, {}, "head_dim=16, .* takes 32, 64"),
    "wrong_number": ({}, {"hf_overrides": {"num_pseudo_heads": 0}}, "num_pseudo_heads=0 .* must be above 0"),
    "window_of_none": (WINDOWS, {"hf_overrides": {"sliding_window": 0}}, "sliding_window=None .* at least 2"),
    "rope_theta": ({}, {"hf_overrides": {"rope_theta": 500.0}}, "rope_theta=500.0 .* no effect"),
    "mixing_scale": ({}, {"hf_overrides": {"mixing_scale": 10.0}}, "mixing_scale belongs to the saved weights"),
}
REFUSED_OPTIONS = {
    "tensor_parallel": ({"tensor_parallel_size": 2}, "mixes all heads of a layer"),
    "quantization": ({"quantization": "fp8"}, "quantization='fp8'"),
    "lora": ({"enable_lora": True}, "serve the merged model"),
    "speculation": ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "--speculative-config"),
    "kv_cache_dtype": ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype"),
    "connector": ({"kv_transfer_config": CONNECTOR}, "--kv-transfer-config"),
    "offloading": ({"kv_offloading_size": 1.0}, "--kv-offloading-size"),
    "pooling": ({"runner": "pooling"}, "--runner"),
    "block_size": ({"block_size": 48}, "multiple of 32"),
    "weight_transfer": ({"weight_transfer_config": {"backend": "nccl"}}, "--weight-transfer-config"),
    "sleep": ({"enable_sleep_mode": True}, "--enable-sleep-mode"),
}


@pytest.mark.parametrize("case", [*REFUSED_MODELS, *REFUSED_OPTIONS])
def test_what_is_refused(case, tmp_path, monkeypatch):
    """Reject before weights are loaded: the directory holds none."""
    fields, options, message = REFUSED_MODELS.get(case, ({}, *REFUSED_OPTIONS.get(case, ({}, ""))))
    if case == "sleep":  # vLLM itself rejects it on a CPU
        monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda self: True)
    config = IHAConfig.from_preset("tiny", **{"hidden_size": 128, "head_dim": 32, **fields})
    config.architectures = ["IHAForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match=message) as error, engine(tmp_path, **options):
        pass
    assert "\n" not in str(error.value)


def test_the_kinds_that_cards_call_served_are_served():
    assert list(KINDS) == [kind for kind in ATTENTION_CLASSES if companion_of(kind).served_by_vllm]


def test_another_vllm_gets_no_models_and_goes_on(monkeypatch, caplog):
    """An exception would end every server of the environment, whatever it serves."""
    monkeypatch.setattr("vllm.__version__", "0.310.0")
    monkeypatch.setattr(ModelRegistry, "register_model", None)
    with caplog.at_level("WARNING", "vllm.plugins"):
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        vllm_iha.register()
    assert "made for vLLM 0.31 and 0.32, and this is 0.310.0" in caplog.text


def test_a_checkpoint_without_the_starts_of_its_mixing_is_refused(tmp_path):
    save_interleaved(tmp_path, "llama", {})
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.endswith("_start")}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(NotImplementedError, match="holds changes of the mixing and no starts"), engine(tmp_path):
        pass


def test_random_starts_are_refused(tmp_path):
    """Begin with vLLM's random weights, and send weights without starts as TRL's GRPO does."""
    save_interleaved(tmp_path, "llama", {})
    with (
        engine(tmp_path, load_format="dummy") as llm,
        pytest.raises(NotImplementedError, match="holds changes of the mixing and no starts"),
    ):
        llm.apply_model(lambda model: model.load_weights([]))


@pytest.mark.parametrize("case", ["llama", "gpt_oss"])  # the second has attention sinks
def test_new_weights_of_a_trainer_are_served(case, tmp_path, undecorated):
    """Send weights as TRL's GRPO does, to a server of the old ones."""
    model_type, fields, options = BASES[case]
    save_interleaved(tmp_path / "old", model_type, fields, **options)
    model = load(tmp_path / "old")
    names = ("self_attn.q_mix.weight", "self_attn.collapse.weight", "self_attn.sinks")
    weights = {name: weight for name, weight in model.named_parameters() if name.endswith(names)}
    for weight in weights.values():
        weight.data += 0.01 * torch.randn_like(weight)
    model.save_pretrained(tmp_path / "new")
    with engine(tmp_path / "old") as llm:
        serve(llm, random_tokens(40))
        llm.reset_prefix_cache()
        for name, weight in weights.items():
            llm.apply_model(lambda model, pair=(name, weight.data): model.load_weights([pair]))
        outputs = serve(llm, random_tokens(*LENGTHS[:6]))
    assert_equal(load(tmp_path / "new"), outputs)


@pytest.mark.parametrize("case", ["llama", "gpt_oss"])
def test_reloaded_weights_are_served(case, tmp_path, undecorated):
    """Change the mixing and the sinks in a running server, and reload the checkpoint."""
    model_type, fields, options = BASES[case]
    model = save_interleaved(tmp_path, model_type, fields, **options)

    def spoil(model):
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith((".sinks", ".weight_start", "q_mix.weight")):
                weight.data.add_(1)

    with engine(tmp_path) as llm:
        llm.apply_model(spoil)
        served, ours = distances(model, serve(llm, random_tokens(40)))
        assert served > 100 * ours
        llm.reset_prefix_cache()
        llm.collective_rpc("reload_weights")
        outputs = serve(llm, random_tokens(*LENGTHS[:6]))
    assert_equal(model, outputs)


def test_a_package_that_cannot_be_imported_registers_no_model(monkeypatch, caplog):
    monkeypatch.setattr(ModelRegistry, "register_model", None)
    monkeypatch.setattr("vllm_iha.find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "modeling_iha", None)
    with caplog.at_level("WARNING", "vllm.plugins"):
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        vllm_iha.register()
    assert "registers no model, because modeling_iha cannot be imported" in caplog.text
