"""Settings for all tests: no network, one thread, no state carried from one test to the next."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import pytest  # noqa: E402
import torch  # noqa: E402

from easy_context.comm.mesh import reset_default_mesh  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_state():
    """Every test starts from one seed and leaves no default mesh, dtype or deterministic mode behind."""
    torch.manual_seed(0)
    yield
    reset_default_mesh()
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
