"""Hold the modeling files to the rules of Transformers' maintainers (see transformers_rules.py)."""

from transformers_rules import main


def test_the_rules_of_transformers_hold():
    main()  # exits with what breaks a rule
