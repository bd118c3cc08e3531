# mla_fusion comes before torch: it keeps `import torch` working beside a torch_npu without CANN
import mla_fusion  # noqa: F401, I001

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

# helpers beside the tests are imported by their names from the root
ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
