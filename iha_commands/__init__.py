"""Bring the commands of a checkout into an installation: the console command `iha`, and functions in `api.py`.

A wheel holds the rooms of the checkout in this folder, because names such as `iha_io` belong to nobody's
site-packages. They are found behind everything else on the path.
"""

import sys
from pathlib import Path


HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE if (HERE / "conversion_scripts").is_dir() else HERE.parent))  # of a wheel, or of a checkout
