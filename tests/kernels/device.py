"""Where kernels run in these tests: on a GPU, or, on machines without one, in Triton's interpreter, which is slow and
has no bfloat16."""

import os

import numpy as np
import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":  # read when triton is imported, as torch does
    pytest.exit("without a GPU these tests need TRITON_INTERPRET=1: `make test-kernels` sets it", returncode=1)

try:
    import triton
except ImportError:
    pytest.exit("these tests need triton: `make test-kernels` installs it", returncode=1)
if not CUDA and int(triton.__version__.split(".")[1]) < 7 and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
    pytest.exit("triton's interpreter needs triton 3.7 or numpy below 2.4 to run loops", returncode=1)
