"""Test the plugin for Axolotl with Axolotl's own class if it is installed, else with its interface written down here.

Axolotl 0.19 pins Transformers 5.16.1, so `make test` does not install it.
"""

import sys
from importlib.util import find_spec
from types import ModuleType

import peft
import pytest
import torch
import yaml
from helpers import decoder

from iha.errors import ROOT
from modeling_iha import load_adapter
from modeling_iha.mixing_weights import mixing_parameters


class BasePlugin:
    """Stand in for axolotl.integrations.base.BasePlugin of Axolotl 0.19: the methods that our plugin has."""

    def get_input_args(self) -> str | None: ...

    def post_model_build(self, cfg, model): ...

    def post_train(self, cfg, model): ...


class Config(dict):
    """Stand in for axolotl.utils.dict.DictDefault, in which a missing key is `None`."""

    __getattr__ = dict.get


@pytest.fixture
def plugin(monkeypatch):
    """Return the plugin that axolotl.yaml names."""
    if find_spec("axolotl") is None:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["axolotl.integrations.base"].BasePlugin = BasePlugin
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.delitem(sys.modules, "axolotl_plugin", raising=False)
    module, name = SETTINGS["plugins"][0].split(".")
    return getattr(__import__(module), name)()


SETTINGS = yaml.safe_load((ROOT / "examples" / "axolotl.yaml").read_text(encoding="utf-8"))
TOKENS = torch.arange(3, 20)[None]


def test_the_plugin_interleaves_the_asked_layers_and_takes_its_keys(plugin):
    module, name = plugin.get_input_args().split(".")
    keys = getattr(sys.modules[module], name)
    taken = {key: value for key, value in SETTINGS.items() if key in keys.model_fields}
    assert taken == {"num_pseudo_heads": 2} and keys(**taken).interleaved_layers is None
    with pytest.raises(ValueError, match="num_pseudo_heads"):
        keys(num_pseudo_heads=1)
    model = decoder("llama").eval()
    with torch.no_grad():
        before = model(TOKENS[:, :8]).logits
        plugin.post_model_build(Config(num_pseudo_heads=2, interleaved_layers=[1], interleaved_window=8), model)
        assert model(TOKENS[:, :8]).logits == pytest.approx(before, abs=1e-5)
    assert [name for name, module in model.named_modules() if name.endswith("q_mix")] == [
        "model.layers.1.self_attn.q_mix"
    ]
    assert model.config.interleaved_window == 8


def test_an_adapter_is_saved_with_its_mixing(plugin, tmp_path):
    model, base = decoder("llama"), decoder("llama")
    base.load_state_dict(model.state_dict())
    plugin.post_model_build(Config(num_pseudo_heads=2), model)
    saved = SETTINGS["lora_modules_to_save"]
    trained = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", modules_to_save=saved)).eval()
    with torch.no_grad():
        for weight in mixing_parameters(trained):
            weight += 0.1 * torch.randn_like(weight)
    plugin.post_train(Config(adapter="lora", output_dir=str(tmp_path)), trained)
    with torch.no_grad():
        expected = trained(TOKENS).logits
        assert load_adapter(base, tmp_path).eval()(TOKENS).logits == pytest.approx(expected, abs=1e-6)
    plugin.post_train(Config(output_dir=str(tmp_path / "whole")), trained)
    assert not (tmp_path / "whole").exists()
