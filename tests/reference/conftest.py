import mla_fusion  # noqa: F401  # before torch: it keeps `import torch` working beside a torch_npu without CANN

import torch  # isort: skip

torch.set_num_threads(1)
