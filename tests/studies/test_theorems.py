"""Test the constructions of Theorems 2 and 4, and that the command runs in small."""

import json

import pytest

from research.experiments import theorems


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theorems")
    with pytest.MonkeyPatch.context() as patches:
        for name, value in {"PSEUDO_HEADS": (1, 2, 3), "LENGTHS": (4, 5), "SEQUENCES": 4}.items():
            patches.setattr(theorems, name, value)
        theorems.main(["--seeds", "0", "1", "--output", str(folder), "--results", str(folder)])
    assert (folder / "theorems.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "theorems.json").read_text())


def test_every_p_contains_multi_head_attention_where_the_last_pseudo_head_is_selected(table):
    for row in table["theorem_2"]:
        assert row["selected"]["last"] < 1e-14
        assert row["more_parameters"] == 4 * theorems.HEADS**2 * row["pseudo_heads"]
        if row["pseudo_heads"] > 1:
            assert row["selected"]["first"] > 0.1 and row["selected"]["last, RoPE at n P + p"] > 0.1


def test_the_inclusion_is_strict_from_p_2_on_by_the_values_of_section_4_1_alone(table):
    for row in table["theorem_2"]:
        assert row["largest_nonlinearity_of_appendix"] < 1e-14
        least = row["least_nonlinearity_of_section"]
        assert least < 1e-14 if row["pseudo_heads"] == 1 else least > 0.1


def test_three_constructions_count_pairs_exactly_at_the_length_they_are_built_for(table):
    for row in table["theorem_4"]:
        assert row["heads"] == {"iha": 2 + (row["tokens"] > 4), "mha": row["tokens"], "mha, 2 heads": 2}
        heads, width = row["heads"]["iha"], row["tokens"] + 1  # a token's value next to its one-hot position
        head_dim = row["tokens"] + row["tokens"] % 2
        mixing = 3 * heads**3 + heads**3  # P = H
        assert row["parameters"]["iha"] == 3 * heads * head_dim * width + mixing
        assert row["parameters"]["mha"] == 3 * row["tokens"] * head_dim * width
        assert row["error"].pop("iha, a token less") >= 1
        assert max(row["error"].values()) < 1e-9


def test_counts_are_those_of_the_papers_example():
    # x = (1, 2, 3), G = 10, M = 4: 1 + 10 * 1 + 1, 1 + 10 * 2 + 3 and 1 + 10 * 3 + 1 are multiples of 4.
    for count in (theorems.residue_count, lambda *task: theorems.proof_count("iha", 3, *task)):
        with theorems.torch.no_grad():
            assert count([1, 2, 3], 10, 4).tolist() == pytest.approx([3, 1, 3])
