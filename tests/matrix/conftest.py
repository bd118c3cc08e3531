"""The models are the spellings of ``tests/fusion``: one package holds both only where the root is on the path."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
