# mla_fusion comes before torch: it keeps `import torch` working beside a torch_npu without CANN
import mla_fusion  # noqa: F401, I001

import torch

torch.set_num_threads(1)
