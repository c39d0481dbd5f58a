"""TRL's trainers with `torch_compile`: the numbers of TRL, no logits, and a backbone that is compiled."""

import pytest
from torch._dynamo.utils import counters

from tests.trainers.parity import assert_same_logs, build

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_compiler")]


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_compiled_trainer(kind, tmp_path, folders, never_built):
    case = {"beta": 0.1} if kind == "GRPO" else {}
    stock = build(kind, False, tmp_path / "stock", folders["llama"], **case)
    stock.train()
    ours = build(kind, True, tmp_path, folders["llama"], torch_compile=True, torch_compile_backend="eager", **case)
    ours.train()
    assert_same_logs(stock, ours)
    assert counters["stats"]["calls_captured"] > 40, "two layers have more operations"
