from collections.abc import Iterator

import pytest
import torch

from liger_trainer.kernels.head.weight_gradient import launch_for
from liger_trainer.kernels.runtime import INTERPRETED


@pytest.fixture(params=["reference", pytest.param("kernel", marks=pytest.mark.kernel)])
def backend(request: pytest.FixtureRequest, device: str) -> tuple[str, torch.dtype]:
    """Device and dtype of a test that runs twice: plain torch in float64 on the CPU, and the kernels in fp32."""
    return ("cpu", torch.float64) if request.param == "reference" else (device, torch.float32)


@pytest.fixture
def _no_synchronisation() -> Iterator[None]:
    """For tests that make synchronisation an error."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def _block_floating_point(_no_synchronisation: None) -> None:
    """Likewise, where a weight gradient is summed as block floating point."""
    if not torch.cuda.is_available() or INTERPRETED or launch_for(torch.device("cuda", 0)) is None:
        pytest.skip("needs a GPU with a bulk copy engine (Hopper or later)")
