"""Multimodal models in the trainers, with pictures, against TRL's."""

import pytest

from tests.trainers.parity import assert_parity
from tests.trainers.vision import PROCESSORS

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = {
    "SFT": {"data": "pictured dialogues", "max_length": None},
    "DPO": {"data": "pictured pairs", "max_length": None},
    "GRPO": {"data": "pictured prompts", "beta": 0.1},
}


@pytest.mark.parametrize("family", PROCESSORS)
@pytest.mark.parametrize("kind", CASES)
def test_vision(kind, family, tmp_path, vision_folders):
    stock, ours = assert_parity(kind, tmp_path, vision_folders[family], processor=family, **CASES[kind])
    assert any(log.get("grad_norm", 0.0) > 0.0 for log in stock.state.log_history)
    assert any(row.component == "linear_cross_entropy" for row in ours.kernel_report.applied)
    before = dict(type(ours.model).from_pretrained(vision_folders[family]).named_parameters())
    changed = [name for name, p in ours.model.named_parameters() if "vis" in name and not p.equal(before[name])]
    assert changed, "the pictures have had a part in the loss"
