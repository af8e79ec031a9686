"""Compare the stock attention cores on a GPU with eager attention in float32, forward and gradients.

On a CPU `make test` covers eager, SDPA, FlexAttention (forward) and a dense stand-in for the flash kernels.
"""

import pytest
import torch
from helpers import set_core
from transformers.utils import is_flash_attn_2_available, is_flash_attn_4_available

from modeling_iha import IHAConfig, IHAForCausalLM
from modeling_iha.transformers_versions import CACHE


CORES = [
    "sdpa",
    "base",
    "flex_attention",
    pytest.param(
        "flash_attention_2",
        marks=pytest.mark.skipif(not is_flash_attn_2_available(), reason="the flash-attn package is not installed"),
    ),
    pytest.param(
        "flash_attention_4",
        marks=pytest.mark.skipif(not is_flash_attn_4_available(), reason="the flash-attn-4 package is not installed"),
    ),
]
GEOMETRIES = {
    "global": {"num_pseudo_heads": 2},
    "global, shared positions, P=3": {"num_pseudo_heads": 3, "pseudo_positions": "shared"},
    "window": {"num_pseudo_heads": 4, "layer_types": "sliding_attention", "sliding_window": 16},
    "paired heads": {
        "attention_kinds": "paired_heads",
        "num_pseudo_heads": 4,
        "layer_types": "sliding_attention",
        "sliding_window": 16,
    },
    "hybrid": {
        "num_pseudo_heads": 2,
        "num_hidden_layers": 4,
        "attention_kinds": ["iha", "mha"],
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 33,
    },
}
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.parametrize("geometry", GEOMETRIES),
    pytest.mark.parametrize("core", CORES),
]
# bfloat16 keeps 8 bits (2^-9 = 0.002 per rounding); the model rounds some tens of times between input and output.
BF16_ERROR = 0.03


def build(geometry, core, dtype=torch.bfloat16):
    """Build a model with the same weights for every core: drawn on the CPU in float32, rounded to bfloat16."""
    torch.manual_seed(0)
    config = IHAConfig.from_preset(
        "tiny", **{"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, **GEOMETRIES[geometry]}
    )
    model = IHAForCausalLM(config).to(torch.bfloat16).to("cuda", dtype)
    set_core(model, core)
    return model.train()


def error(out, reference):
    return ((out.float() - reference).norm() / reference.norm()).item()


def test_forward_and_gradients(core, geometry):
    input_ids = torch.randint(256, (2, 333), generator=torch.Generator().manual_seed(1)).cuda()
    reference, model = build(geometry, "eager", torch.float32), build(geometry, core)
    expected, out = reference(input_ids, labels=input_ids), model(input_ids, labels=input_ids)
    assert error(out.logits, expected.logits) < BF16_ERROR
    expected.loss.backward()
    out.loss.backward()
    for (name, parameter), target in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert error(parameter.grad, target.grad) < BF16_ERROR, name


def test_compiled_equals_eager(core, geometry):
    if core != "sdpa":
        pytest.skip("the windows of compiled code are those of SDPA")
    input_ids = torch.randint(256, (2, 333), generator=torch.Generator().manual_seed(1)).cuda()
    model, compiled = build(geometry, core), build(geometry, core)
    compiled.compile(fullgraph=True)
    expected, out = (each(input_ids=input_ids, labels=input_ids, use_cache=False) for each in (model, compiled))
    assert error(out.logits, expected.logits.float()) < BF16_ERROR
    expected.loss.backward()
    out.loss.backward()
    for (name, parameter), target in zip(compiled.named_parameters(), model.parameters(), strict=True):
        assert error(parameter.grad, target.grad.float()) < BF16_ERROR, name


def test_packed_equals_separate(core, geometry):
    """Pack as TRL's padding-free batches do: documents are found by position_ids, on flash cores by cu_seq_lens.

    By position_ids alone flash-attn-4 4.0.0b36 raises, also for a Llama: Transformers hands it the longest length as a
    tensor.
    """
    model = build(geometry, core).eval()
    lengths = (70, 1, 129)
    documents = [torch.randint(256, (1, n), generator=torch.Generator().manual_seed(n)).cuda() for n in lengths]
    packed = torch.cat(documents, dim=1)
    boundaries = {"position_ids": torch.cat([torch.arange(n, device="cuda") for n in lengths])[None]}
    if core.startswith("flash"):
        cu_seq_lens = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        boundaries |= {"cu_seq_lens_q": cu_seq_lens, "cu_seq_lens_k": cu_seq_lens}
        boundaries |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    with torch.no_grad():
        separate = torch.cat([model(document, use_cache=False).logits for document in documents], dim=1)
        out = model(packed, **boundaries, use_cache=False).logits
        leaking = model(packed, use_cache=False).logits
    assert error(out, separate.float()) < BF16_ERROR
    assert error(leaking, separate.float()) > 2 * BF16_ERROR


def test_left_padding_and_cache(core, geometry):
    model, reference = build(geometry, core).eval(), build(geometry, "eager", torch.float32).eval()
    rows = [torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)).cuda() for n in (60, 41)]
    input_ids = torch.stack([torch.nn.functional.pad(row, (60 - len(row), 0)) for row in rows])
    attention_mask = torch.stack([(torch.arange(60) >= 60 - len(row)).long() for row in rows]).cuda()
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        past, logits = None, []
        for start, end in [(0, 50)] + [(i, i + 1) for i in range(50, 60)]:
            out = model(
                input_ids[:, start:end],
                attention_mask=attention_mask[:, :end],
                position_ids=position_ids[:, start:end],
                **{CACHE: past},
                use_cache=True,
            )
            past = out[CACHE]
            logits.append(out.logits)
        logits = torch.cat(logits, dim=1)
        for i, row in enumerate(rows):
            assert error(logits[i, -len(row) :], reference(row[None]).logits[0]) < BF16_ERROR
