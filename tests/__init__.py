"""A package: imported under two names, a module would define operators twice, the first gone."""

import os

# torch_npu lies beside a torch without CANN; activate() imports it where a test asks for it.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
