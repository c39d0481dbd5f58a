"""Warnings of TRL name the line of the user's, as they do with TRL's own classes."""

import linecache
import threading
import warnings

import pytest
import torch
from trl import SFTConfig

from liger_trainer import LigerSFTTrainer
from liger_trainer.configs.caller_warnings import warnings_of_the_caller
from liger_trainer.configs.trl_configs import LigerSFTConfig
from tests.trainers.builders import sft
from tests.trainers.tiny import llama, text_dataset, tokenizer


def line_of(caught, words):
    """The source line that the one warning with these words names."""
    found = [warning for warning in caught if words in str(warning.message)]
    assert len(found) == 1
    assert found[0].filename == __file__
    assert issubclass(found[0].category, FutureWarning)
    return linecache.getline(found[0].filename, found[0].lineno)


@pytest.mark.parametrize("cls", [SFTConfig, LigerSFTConfig])
def test_of_a_configuration(cls, tmp_path):
    with pytest.warns(FutureWarning) as caught:
        cls(str(tmp_path), bf16=False, use_cpu=True, loss_type="chunked_nll")
    assert "cls(" in line_of(caught, "chunked_nll")


def test_of_a_construction(tmp_path):
    args = LigerSFTConfig(str(tmp_path), bf16=False, use_cpu=True)
    with pytest.warns(FutureWarning) as caught:
        LigerSFTTrainer(llama(), args, None, text_dataset(), processing_class=tokenizer(), compute_loss_func=print)
    assert "LigerSFTTrainer(" in line_of(caught, "compute_loss_func")


def test_of_a_loss_with_outputs(tmp_path):
    trainer = sft(tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    with pytest.warns(FutureWarning) as caught:
        trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert "trainer.compute_loss(" in line_of(caught, "return_outputs=True")


def test_of_a_subclass(tmp_path):
    class Mine(LigerSFTTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    trainer = sft(tmp_path, trainer_class=Mine)
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad(), pytest.warns(FutureWarning) as caught:
        trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert "super().compute_loss(" in line_of(caught, "return_outputs=True")


def test_other_warnings_filters_and_errors_stay():
    before = warnings.showwarning
    with pytest.warns(UserWarning, match="mine") as caught, warnings_of_the_caller():
        warnings.warn("mine", UserWarning, stacklevel=1)
    assert 'warnings.warn("mine"' in linecache.getline(caught[0].filename, caught[0].lineno)
    warnings.simplefilter("error")
    with pytest.raises(UserWarning, match="mine"), warnings_of_the_caller():
        warnings.warn("mine", UserWarning, stacklevel=1)
    assert warnings.showwarning is before


def test_threads_leave_the_users_function():
    before, inside = warnings.showwarning, threading.Event()

    def other():
        with warnings_of_the_caller():
            inside.set()

    with warnings_of_the_caller():
        thread = threading.Thread(target=other)
        thread.start()
        assert not inside.wait(0.1)
    thread.join()
    assert warnings.showwarning is before
