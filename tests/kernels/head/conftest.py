from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=["reference", pytest.param("kernel", marks=pytest.mark.kernel)])
def backend(request: pytest.FixtureRequest, device: str) -> tuple[str, torch.dtype]:
    """Device and dtype of a test that runs twice: plain torch in float64 on the CPU, and the kernels in fp32."""
    return ("cpu", torch.float64) if request.param == "reference" else (device, torch.float32)


@pytest.fixture
def _no_synchronisation() -> Iterator[None]:
    """For tests that make synchronisation an error."""
    yield
    torch.cuda.set_sync_debug_mode("default")
