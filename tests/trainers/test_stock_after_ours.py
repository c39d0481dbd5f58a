"""A stock trainer of TRL gives bitwise the same logs and weights before and after one of ours in the same process."""

import pytest

from liger_trainer.patching.binding import bound_modules
from tests.trainers.parity import KINDS, OTHER_KINDS, assert_close_weights, build
from tests.trainers.tiny import llama, logged

pytestmark = pytest.mark.filterwarnings("ignore")

EVERY_KIND = (*KINDS, *OTHER_KINDS)


def trained(kind, ours, folder, tmp_path):
    # TRL's own loading for these two splits the model over the devices.
    trainer = build(kind, ours, tmp_path, llama() if kind in ("ORPO", "CPO") else folder)
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_stock_trainer_stays_as_it_was(kind, folders, tmp_path):
    before = trained(kind, False, folders["llama"], tmp_path / "before")
    ours = trained(kind, True, folders["llama"], tmp_path / "ours")
    after = trained(kind, False, folders["llama"], tmp_path / "after")
    assert ours.kernel_report.applied
    first, second = (
        [{k: v for k, v in log.items() if k != "step_time"} for log in logged(trainer)] for trainer in (before, after)
    )
    assert first == second
    assert_close_weights(after, before, tolerance=0)
    assert not any(any(bound_modules(stock.model)) for stock in (before, after))
    assert all("liger_trainer" not in type(module).__module__ for module in after.model.modules())
    assert [name for name, module in after.model.named_modules() if "forward" in vars(module)] == [
        name for name, module in before.model.named_modules() if "forward" in vars(module)
    ]
