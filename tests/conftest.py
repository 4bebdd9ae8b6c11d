import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors gain nothing from threads, and two test processes share two cores."""
    torch.set_num_threads(1)
