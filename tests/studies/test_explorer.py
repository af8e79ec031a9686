"""Test that the attention explorer's page holds what the model computes, and works in a browser.

The browser is the Chromium that fetch_chromium.py installs, or one that the variable CHROMIUM names.
"""

import base64
import gzip
import json
import os
import re
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from fetch_chromium import CHROMIUM
from helpers import EVERY_KIND, HYBRID, LLAMA, command, last_line, random_ids, random_model, small_config
from tiny_training import byte_tokenizer
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from modeling_iha import IHAForCausalLM
from research.experiments import explore_attention
from research.experiments.explore_attention import LayerShape, Recorded, page, token_limit


EXPECTED_SKIPS = ["no Chromium"]
PROMPT = "a <b>\né"
# One byte each, but for the two of "é", which are no whole character alone.
LABELS = ["a", "␣", "<", "b", ">", "↵", "Ã", "©"]
CONFIGS = {
    "per_head": small_config(vocab_size=300),
    "all_heads": small_config(vocab_size=300, pseudo_collapse="all_heads", num_pseudo_heads=3),
    "every_kind": small_config(vocab_size=300, num_key_value_heads=4, **EVERY_KIND),
    "llama": LlamaConfig(**{**LLAMA, "vocab_size": 300, "bos_token_id": None}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Write a checkpoint of each config, and "tuned", which is another of "per_head"."""
    directory = tmp_path_factory.mktemp("checkpoints")
    models = {
        name: random_model(config, LlamaForCausalLM if name == "llama" else IHAForCausalLM)
        for name, config in CONFIGS.items()
    }
    models["tuned"] = random_model(CONFIGS["per_head"], seed=1)
    for name, model in models.items():
        model.save_pretrained(directory / name)
        byte_tokenizer().save_pretrained(directory / name)
    return directory, models


def explored(checkpoints, tmp_path, *arguments):
    """Return the data and the codes inside the page that the command writes."""
    directory, _ = checkpoints
    paths = [str(directory / argument) if (directory / argument).is_dir() else argument for argument in arguments]
    explore_attention.main([*paths, "--output", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len(text) < 10e6 and "{{" not in text
    contents = re.findall(r'id="packed-(data|codes)">([^<]*)<', text)
    parts = {name: gzip.decompress(base64.b64decode(content)) for name, content in contents}
    return json.loads(parts["data"]), parts["codes"]


def decoded(data, codes, checkpoint, layer, tokens=len(LABELS)):
    """Return the weights [H, N * P, N * P] of a layer, or `None`."""
    entry, shape = data["checkpoints"][checkpoint]["layers"][layer].get("codes"), data["layers"][layer]
    if entry is None:
        return None
    size = tokens * shape["pseudo_heads"]
    dtype, levels = (torch.int8, 127) if entry["signed"] else (torch.uint8, 255)
    count = shape["heads"] * size**2
    roots = torch.frombuffer(bytearray(codes), dtype=dtype, count=count, offset=entry["start"]).float() / levels
    return (entry["largest"] * roots * roots.abs()).reshape(-1, size, size)


def attentions(model):
    model.set_attn_implementation("eager")
    ids = byte_tokenizer()(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return [weights[0] for weights in model(ids, output_attentions=True, use_cache=False).attentions]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_page_holds_what_the_model_computes(name, checkpoints, tmp_path):
    data, codes = explored(checkpoints, tmp_path, name, PROMPT)
    assert data["tokens"] == LABELS and "change" not in data
    model, layers = checkpoints[1][name], data["checkpoints"][0]["layers"]
    kinds = getattr(model.config, "attention_kinds", ["llama"] * 2)
    assert [layer["kind"] for layer in data["layers"]] == kinds
    signs = set()
    for i, expected in enumerate(attentions(model)):
        weights = decoded(data, codes, 0, i)
        # Half a step of the square root's codes, at the largest weight.
        signed = layers[i]["codes"]["signed"]
        assert (weights - expected).abs().max() <= 1.01 * expected.abs().max() / (127 if signed else 255)
        signs.add(signed)
        modules = dict(model.base_model.layers[i].self_attn.named_modules())
        assert set(layers[i]["mixing"]) == ({"q_mix", "k_mix", "v_mix", "collapse"} if kinds[i] == "iha" else set())
        for matrix, rows in layers[i]["mixing"].items():
            torch.testing.assert_close(torch.tensor(rows), modules[matrix].weight.detach(), rtol=5e-4, atol=0)
    assert signs == ({False, True} if name == "every_kind" else {False})


def test_attentions_in_tokens():
    """Read whole and cached attentions as clients do: each token has a row that sums to 1; others stay."""
    model = random_model(small_config(**HYBRID, sliding_window=3, num_pseudo_heads=3))
    model.set_attn_implementation("eager")
    ids, cache = random_ids(2, 7), DynamicCache(config=model.config)
    for part in (ids[:, :6], ids[:, 6:]):
        output = model(part, past_key_values=cache, output_attentions=True)
        maps = model.token_attentions(output.attentions, part.shape[1])
        for kind, virtual, weights in zip(model.config.attention_kinds, output.attentions, maps, strict=True):
            assert weights.shape[:3] == (2, 4, part.shape[1])
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
            if kind == "mha":
                assert torch.equal(weights, virtual)
            for n, m in product(range(weights.shape[2]), range(weights.shape[3]) if kind == "iha" else ()):
                expected = sum(virtual[..., 3 * n + p, 3 * m + r] for p, r in product(range(3), repeat=2)) / 3
                torch.testing.assert_close(weights[..., n, m], expected)


def test_comparison_and_chosen_layers(checkpoints, tmp_path):
    models = checkpoints[1]
    data, codes = explored(checkpoints, tmp_path, "per_head", PROMPT, "--compare", "tuned", "--layers", "1")
    assert [layer["index"] for layer in data["layers"]] == [1]
    assert [checkpoint["name"] for checkpoint in data["checkpoints"]] == ["A: per_head", "B: tuned"]
    before, after = (attentions(models[name])[1] for name in ("per_head", "tuned"))
    for index, expected in enumerate((before, after)):
        assert (decoded(data, codes, index, 0) - expected).abs().max() < 0.01
    expected = [sum((a - b).abs().sum() / 2 for a, b in zip(*heads)) / 16 for heads in zip(before, after)]
    assert data["change"][0] == pytest.approx([value.item() for value in expected], rel=1e-3)
    data, _ = explored(checkpoints, tmp_path, "per_head", PROMPT, "--compare", "per_head")
    assert data["change"] == [[0] * 4] * 2


@pytest.mark.parametrize(("checkpoints_shown", "pseudo_heads"), [(1, 4), (2, None)])
def test_the_longest_prompt_fits_however_the_weights_compress(pseudo_heads, checkpoints_shown):
    """Show 30 layers of SmolLM2's heads with weights that are noise: the page takes most of 10 MB, and no more."""
    collapse = None if pseudo_heads is None else "per_head"
    shapes = [LayerShape(9, 3, pseudo_heads, collapse)] * 30
    tokens = token_limit(shapes * checkpoints_shown)
    generator, size = torch.Generator().manual_seed(0), tokens * (pseudo_heads or 1)
    noise = torch.rand(30, 9, size, size, generator=generator).square().tril()
    sizes = {"q_mix": (9, 9), "k_mix": (3, 3), "v_mix": (3, 3), "collapse": (9,)} if pseudo_heads else {}
    mixing = [{name: torch.randn(*shape, 4, generator=generator) for name, shape in sizes.items()}] * 30
    models = {str(i): Recorded(list(noise), mixing) for i in range(checkpoints_shown)}
    kinds = dict.fromkeys(range(30), "mha" if pseudo_heads is None else "iha")
    assert 8e6 < len(page(["token"] * tokens, kinds, shapes, models)) < 10e6


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["IN/per_head", "a" * 300], r"The prompt has 300 tokens, .* room for 256 with 2 layers of 1 checkpoint:"),
        (["IN/per_head", "a", "--layers", "0", "2"], "--layers 0 2: expected numbers from 0 to 1"),
        (["IN/per_head", "a", "--compare", "IN/all_heads"], "all_heads has other layers, heads or pseudo-heads"),
        (["IN/per_head", "a", "--compare", "IN/other_tokens"], "other_tokens splits the prompt into other tokens"),
    ],
)
def test_mistakes_are_named_in_one_line(arguments, message, checkpoints, tmp_path, monkeypatch, capsys):
    directory, _ = checkpoints
    if not (directory / "other_tokens").exists():
        shutil.copytree(directory / "tuned", directory / "other_tokens")
        byte_tokenizer(special=("<|im_start|>",)).save_pretrained(directory / "other_tokens")
    monkeypatch.setattr(explore_attention, "load_model", None)  # no mistake is found after the work
    replaced = [argument.replace("IN", str(directory)) for argument in arguments]
    output = ("--output", tmp_path / "page.html")
    code, _, stderr = command(monkeypatch, capsys, explore_attention, *replaced, *output)
    assert code == 1 and re.search(message, last_line(stderr))
    assert list(tmp_path.iterdir()) == []


# In the browser


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="no Chromium: Playwright is not installed")
    path = os.environ.get("CHROMIUM", CHROMIUM)
    if not Path(path).is_file():
        pytest.skip(f"no Chromium: {path} does not exist")
    with sync_api.sync_playwright() as playwright:
        # Without its own sandbox, which root and containers do not allow; it opens nothing but our page.
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Opened:
    """Hold a page in the browser."""

    def __init__(self, browser, path, **screen):
        self.problems, self.requests = [], []
        self.tab = browser.new_page(**screen)
        self.tab.set_default_timeout(300_000)  # a busy machine takes long to unpack and compile Plotly
        self.tab.on("pageerror", lambda error: self.problems.append(str(error)))
        self.tab.on("console", lambda message: self.problems.append(message.text))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(path.as_uri())
        self.tab.wait_for_function("document.querySelector('#status').textContent.startsWith('Layer')")

    def status(self):
        return self.tab.text_content("#status")

    def rows(self, table):
        return [row.locator("th, td").all_text_contents() for row in self.tab.locator(f"#{table} tbody tr").all()]

    def chosen(self, *names):
        return [self.tab.input_value(f"#{name}") for name in names]

    def click_cell(self, chart, x, y):
        """Click the middle of a cell of a heat map."""
        place = self.tab.evaluate(
            """([id, x, y]) => {
              const chart = document.getElementById(id), {xaxis, yaxis, _size} = chart._fullLayout;
              chart.scrollIntoView({block: "center"});
              const box = chart.getBoundingClientRect();
              return [box.left + _size.l + xaxis.d2p(x), box.top + _size.t + yaxis.d2p(y)];
            }""",
            [chart, x, y],
        )
        self.tab.mouse.move(*place)
        self.tab.mouse.click(*place)


def strongest(weights, query=None):
    """Return (query token, key token, weight) of the largest entry of [N, N], of one query or all but the first."""
    rows = weights[1:] if query is None else weights[query : query + 1]
    row, column = divmod(rows.abs().argmax().item(), weights.shape[1])
    return row + (1 if query is None else query), column, rows[row, column].item()


def test_in_a_browser(browser, checkpoints, tmp_path):
    """Show what two models compute at every choice, without any network."""
    explored(checkpoints, tmp_path, "per_head", PROMPT, "--compare", "tuned")
    opened = Opened(browser, tmp_path / "page.html")
    tab = opened.tab
    # [layer][checkpoint] [H, N, P, N, P]
    both = zip(*(attentions(checkpoints[1][name]) for name in ("per_head", "tuned")))
    weights = [[w.unflatten(2, (8, 2)).unflatten(1, (8, 2)) for w in layer] for layer in both]

    def assert_shows(expected, query=None):
        n, m, value = strongest(expected, query)
        [first, *_] = opened.rows("strongest")
        assert first[:2] == [f"“{LABELS[n]}” ({n + 1})", f"“{LABELS[m]}” ({m + 1})"]
        shown = {"A": first[2], "B": first[3], "difference": first[4]}[tab.input_value("#shown")]
        assert float(shown) == pytest.approx(value, abs=0.01)
        assert f"is {shown}, from query" in opened.status()

    # First, all pseudo-heads together, as anybody reduces the model's attentions.
    model, ids = checkpoints[1]["per_head"], byte_tokenizer()(PROMPT, return_tensors="pt")["input_ids"]
    output = model(ids, output_attentions=True, use_cache=False)
    assert_shows(model.token_attentions(output.attentions, ids.shape[1])[0][0, 0].detach())
    tab.select_option("#query", "0")
    assert_shows(weights[0][0][0, :, 0].sum(-1))
    tab.select_option("#layer", "1")
    tab.select_option("#head", "2")
    tab.select_option("#query", "1")
    tab.select_option("#key", "0")
    assert_shows(weights[1][0][2, :, 1, :, 0])
    tab.select_option("#shown", "B")
    assert_shows(weights[1][1][2, :, 1, :, 0])
    tab.select_option("#shown", "difference")
    assert_shows((weights[1][1] - weights[1][0])[2, :, 1, :, 0])

    # Clicks: a tile, a row of the pattern, a cell of the heads that changed.
    opened.click_cell("tiles", 9 + 1, 4)
    assert opened.chosen("query", "key") == ["0", "1"]
    opened.click_cell("pattern", 3, 5)
    assert opened.chosen("token") == ["5"]
    assert_shows((weights[1][1] - weights[1][0])[2, :, 0, :, 1], query=5)
    opened.click_cell("change", 3, 0)
    assert opened.chosen("layer", "head", "query") == ["0", "3", "0"]
    most = max(w.item() for layer in weights for w in (layer[1] - layer[0]).abs().sum((3, 4)).mean((1, 2)) / 2)
    assert float(opened.rows("changed")[0][2]) == pytest.approx(most, abs=1e-3)

    assert opened.problems == [] and opened.requests == [(tmp_path / "page.html").as_uri()]
