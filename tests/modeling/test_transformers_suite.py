"""Run Transformers' common tests of models, training, FSDP2 and tensor parallelism on all ways to interleaved heads.

They come from the source distribution of the installed version. A test that the model is expected to fail is
overridden in `CommonTests`, with the reason. One that is skipped for a reason not in `EXPECTED_SKIPS` fails.
"""

import contextlib
import functools
import re
import unittest
import unittest.mock

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)

from modeling_iha import (
    IHAConfig,
    IHAForCausalLM,
    IHAForQuestionAnswering,
    IHAForSequenceClassification,
    IHAForTokenClassification,
    IHAModel,
)
from modeling_iha.modeling_interleaved import interleaved_class, interleaved_config_class


pytest.importorskip("transformers_tests", reason="`python tests/fetch_transformers_tests.py` fetches them")

from transformers_tests import test_fsdp_mixin, test_modeling_common, test_tensor_parallel_mixin  # noqa: E402
from transformers_tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from transformers_tests.test_fsdp_mixin import FSDPTesterMixin  # noqa: E402
from transformers_tests.test_modeling_common import ModelTesterMixin, ids_tensor  # noqa: E402
from transformers_tests.test_tensor_parallel_mixin import TensorParallelTesterMixin  # noqa: E402
from transformers_tests.test_training_mixin import TrainingTesterMixin  # noqa: E402


# The distributed tests run for listed model types only.
test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None
# The tests know by these names which labels a class takes.
for mapping, task in {
    "MODEL_MAPPING_NAMES": "Model",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "ForCausalLM",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "ForSequenceClassification",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "ForTokenClassification",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": "ForQuestionAnswering",
}.items():
    names = {"iha": f"IHA{task}", "interleaved": f"InterleavedLlama{task}"}
    setattr(test_modeling_common, mapping, {**getattr(test_modeling_common, mapping), **names})
# What the tests say when they skip (the start is enough), and why that is right for this model or this machine.
EXPECTED_SKIPS = {
    "test requires": "an accelerator, several of them, MPS, DeepSpeed, or kernels that are not installed",
    "Need at least": "HSDP tests start 4 processes on as many cores",
    "test is slow": "flash kernels, again",
    "Test requires torchao": "an optional package",
    "No conversion found": "saved and loaded parameter names are the same",
    "has no _keep_in_fp32_modules": "no module is kept in float32",
    "class has no _keep_in_fp32_modules": "the same",
    "No `_keep_in_fp32_modules_strict` defined": "the same",
    "Not returning cache": "heads of tokens and of spans return none",
    "not composite": "one model, no sub-models",
    "Model is not a composite": "the same",
    "No subconfigs": "the same",
    "does not support SDPA": "the composite-model test says so of every model that is none",
    "no sparse experts": "no mixture of experts",
    "no `output_router_logits`": "the same",
    "Not an MoE model": "the same",
    "does not support grouped_mm": "the same",
    "token-dispatch expert parallel plan": "the same",
    "expert parallel plan": "the same",
    "No sequence-to-sequence": "a decoder",
    "partial rope": "the whole head is rotated",
    "Model does not have position embeddings": "rotary positions, no learned table",
    "no axial RoPE": "the same",
    "does not support sliding window mask": "asks for Qwen2's use_sliding_window; layer_types says it here",
    "does not support output_attentions": "asked of SDPA, which returns no weights",
    "Not a prioritized model": "a list inside Transformers",
    "saves a part alone": "which would load without interleaved heads, so it is refused (test_parts.py)",
    "asks for the name 'sdpa'": "the core over virtual tokens is called 'iha_sdpa_in_blocks'",
}


class IHAModelTester:
    base_model_class = IHAModel
    causal_lm_class = IHAForCausalLM

    def __init__(self, parent):
        self.parent = parent
        self.batch_size, self.seq_length, self.is_training = 2, 7, True
        self.vocab_size, self.hidden_size, self.num_hidden_layers, self.num_attention_heads = 99, 32, 2, 4

    def get_config(self):
        return IHAConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=37,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            num_pseudo_heads=2,
            attention_kinds=self.parent.attention_kinds,
            **getattr(self.parent, "additions", {}),
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=4,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )

    def prepare_config_and_inputs_for_common(self):
        input_ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size).clamp(min=3)
        return self.get_config(), {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}

    prepare_config_and_inputs = prepare_config_and_inputs_for_common


class InterleavedModelTester(IHAModelTester):
    base_model_class = interleaved_class(LlamaModel, LlamaConfig)
    causal_lm_class = interleaved_class(LlamaForCausalLM, LlamaConfig)

    def get_config(self):
        fields = super().get_config().to_dict()
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        names += ("num_key_value_heads", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
        layers = {f"layers.{index}.self_attn": [4, 2, 2] for index in range(self.num_hidden_layers)}
        mixing = {"num_pseudo_heads": 2, "pseudo_collapse": "per_head", "mixing_scale": 40.0}
        mixing |= {"interleaved_window": None, "virtual_heads": None}
        return interleaved_config_class(LlamaConfig).from_dict(
            {**{name: fields[name] for name in names}, **mixing, "interleaved_layers": layers}
        )


class CommonTests:
    all_model_classes = (
        IHAModel,
        IHAForCausalLM,
        IHAForSequenceClassification,
        IHAForTokenClassification,
        IHAForQuestionAnswering,
    )
    model_tester, make_tester = None, IHAModelTester

    def setUp(self):
        self.model_tester = self.make_tester(self)
        # Messages for comparisons that hold print the tensors too.
        torch.set_printoptions(threshold=0, edgeitems=1)
        self.addCleanup(torch.set_printoptions, profile="default")

    def test_attention_outputs(self):
        """Expect what the attention weights of three kinds are.

        Those of "iha" and "paired_heads" are between virtual tokens, the latter for H / P virtual heads, "diff_v2" has
        two softmaxes for each head, and those of "dcmha" do not sum to 1."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        config._attn_implementation = "eager"
        for model_class in self.all_model_classes:
            attentions = model_class(config).eval()(**inputs, output_attentions=True).attentions
            for kind, weights in zip(self.attention_kinds, attentions, strict=True):
                virtual = config.num_pseudo_heads if kind in ("iha", "paired_heads") else 1
                length = self.model_tester.seq_length * virtual
                heads = config.num_attention_heads * (2 if kind == "diff_v2" else 1)
                heads //= config.num_pseudo_heads if kind == "paired_heads" else 1
                self.assertEqual(weights.shape, (2, heads, length, length))
                if kind != "dcmha":
                    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


class InOneProcess(CommonTests, ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin):
    def subTest(self, *_, **__):
        """End a test at its first failure: to report thousands of subtests takes seconds."""
        return contextlib.nullcontext()

    def test_bc_cache_name_forward(self):
        """Leave out the model without a head: it takes both names of a cache without a warning (test_versions.py)."""
        self.all_model_classes = self.all_model_classes[1:]
        super().test_bc_cache_name_forward()


@pytest.mark.slow  # test_interleave.py and test_interleaved_classes.py have tests of their own
class InterleavedSuite(InOneProcess, unittest.TestCase):
    """Test a Llama whose heads are interleaved."""

    make_tester = InterleavedModelTester
    all_model_classes = tuple(
        interleaved_class(base, LlamaConfig)
        for base in (
            *(LlamaModel, LlamaForCausalLM, LlamaForSequenceClassification),
            *(LlamaForTokenClassification, LlamaForQuestionAnswering),
        )
    )
    attention_kinds = ["iha", "iha"]

    def test_init_weights_can_init_buffers(self):
        """Compare the starts of the mixing without their noise, which is drawn anew."""
        with unittest.mock.patch("torch.randn_like", torch.zeros_like):
            super().test_init_weights_can_init_buffers()

    def test_can_set_attention_dynamically(self):
        """Expect the name of the core over virtual tokens."""
        model = self.model_tester.causal_lm_class(self.model_tester.get_config())
        for core, name in (("eager", "iha_eager"), ("sdpa", "iha_sdpa_in_blocks"), ("iha_eager", "iha_eager")):
            model.set_attn_implementation(core)
            self.assertEqual(model.model.config._attn_implementation, name)

    def test_sdpa_can_dispatch_non_composite_models(self):
        self.skipTest("asks for the name 'sdpa'")

    def test_base_model_prefix_loads_base_weights(self):
        self.skipTest("saves a part alone")

    test_correct_missing_keys = test_base_model_prefix_loads_base_weights


def spared(test):
    """Return a test that `make test` leaves out."""
    return pytest.mark.slow(functools.wraps(test)(lambda self: test(self)))


class IHASuite(InOneProcess, unittest.TestCase):
    attention_kinds = ["iha", "mha"]


# `make test` compares the cores in float32 only here, and its other tests train models.
for name in dir(IHASuite):
    if re.match("test_eager_matches_sdpa_inference_.*(fp16|bf16)|test_training_overfit", name):
        setattr(IHASuite, name, spared(getattr(IHASuite, name)))


@pytest.mark.slow
class ShardedSuite(CommonTests, FSDPTesterMixin, TensorParallelTesterMixin, unittest.TestCase):
    """Run two processes for each test; `make test` has its own in test_distributed.py."""

    attention_kinds = ["iha", "mha"]


@pytest.mark.slow
class TalkingHeadsAndDiffSuite(IHASuite):
    """Run for other kinds what `make test` runs for "iha"; test_mechanisms.py has its own tests of every kind."""

    attention_kinds = ["talking_heads", "diff"]


@pytest.mark.slow
class PairedHeadsAndIHASuite(IHASuite):
    attention_kinds = ["paired_heads", "iha"]


@pytest.mark.slow
class DifferentialV2AndKnockingHeadsSuite(IHASuite):
    attention_kinds = ["diff_v2", "knocking_heads"]


@pytest.mark.slow
class DynamicallyComposableAndHyperFeatureSuite(IHASuite):
    attention_kinds = ["dcmha", "hyper_feature"]


@pytest.mark.slow
class GatedSuite(IHASuite):
    attention_kinds = ["paired_heads", "mha"]
    additions = {"output_gate": "elementwise", "exclusive_attention": True}


@pytest.mark.slow
class SimplicialAndHyperSuite(IHASuite):
    attention_kinds = ["simplicial", "hyper"]

    def test_retain_grad_hidden_states_attentions(self):
        """Expect no gradient of the attentions: nothing is computed from these sums of weights of pairs."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        config._attn_implementation = "eager"
        outputs = IHAModel(config)(**inputs, output_hidden_states=True)
        for hidden_states in outputs.hidden_states:
            hidden_states.retain_grad()
        outputs.last_hidden_state[0, 0, 0].backward()
        self.assertTrue(all(hidden_states.grad is not None for hidden_states in outputs.hidden_states))
