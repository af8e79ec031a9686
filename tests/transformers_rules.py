"""Hold the modeling files to the rules of Transformers' maintainers, as their linter (mlinter) checks them.

`make lint` runs this: python tests/transformers_rules.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
# Rule -> why it is off here. Any other rule has to hold. Two of these could hold, and are off by choice.
OFF = {
    "TRF028": "a choice: the two lines of the SPDX form are enough, because a checkpoint ships every file",
    "TRF035": "a choice: only Transformers needs these imports, because it copies the files that they name",
    "TRF051": "cannot hold: which inputs an attention function takes decides which ones are errors",
    "TRF057": 'cannot hold: in remote code @auto_docstring finds no model, and writes "The None Model"',
}


def findings() -> list[dict]:
    """Return what mlinter finds in `modeling_iha`."""
    # mlinter has no option that turns a rule off, so its report is read instead.
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        arguments = ["modeling_iha", "--no-cache", "--no-progress", "--output-json", report]
        subprocess.run([sys.executable, "-m", "mlinter", *arguments], cwd=ROOT, capture_output=True, check=False)
        return json.loads(report.read_text())["findings"]


def main() -> None:
    """Print what breaks a rule, and exit with 1 if anything does. A rule that is off must be broken somewhere."""
    found = findings()
    problems = [f"{each['path']}:{each['line']}: {each['message']}" for each in found if each["rule"] not in OFF]
    problems += [f"{rule} holds now: take it out of OFF." for rule in OFF.keys() - {each["rule"] for each in found}]
    if problems:
        sys.exit("\n".join(sorted(problems)))


if __name__ == "__main__":
    main()
