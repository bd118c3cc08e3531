"""A package, so that no module of it is imported under two names: an operator defined twice is gone
for the first.
"""

import os

# torch_npu lies beside a torch without CANN; activate() imports it where a test asks for it.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
