"""Test the form of the answers by symptom, and run what they show."""

import re

import pytest
from helpers import ROOT


FAQ = (ROOT / "docs" / "FAQ.md").read_text(encoding="utf-8")
ANSWERS = {text.partition("\n")[0]: text for text in re.split(r"^### ", FAQ, flags=re.MULTILINE)[1:]}


@pytest.mark.parametrize("symptom", ANSWERS)
def test_an_answer_has_three_parts_and_links_to_the_whole_one(symptom):
    bullets = re.split(r"^- ", ANSWERS[symptom].partition("\n## ")[0], flags=re.MULTILINE)[1:]
    assert [re.match(r"\*\*(\w+):\*\*", bullet)[1] for bullet in bullets] == ["Reason", "Cure", "More"]
    assert "](" in bullets[-1]


def test_the_script_of_a_report_runs(capsys):
    [block] = re.findall(r"^```python\n(.*?)^```", FAQ, re.DOTALL | re.MULTILINE)
    exec(compile(block, "FAQ.md", "exec"), {})
    assert "grad_fn" in capsys.readouterr().out
