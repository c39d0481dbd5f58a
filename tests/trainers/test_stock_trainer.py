"""The stock Trainer with `use_liger_kernel=True`."""

import logging
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch
import transformers.integrations.liger
import transformers.trainer
from transformers import Trainer
from trl import SFTTrainer

from liger_trainer import stock_trainer
from liger_trainer.callbacks.kernel_report import KernelReportCallback
from tests.trainers.builders import causal, sft
from tests.trainers.parity import assert_close_logs
from tests.trainers.tiny import logged


@pytest.fixture(autouse=True)
def _hook():
    stock_trainer.install()
    yield
    stock_trainer.set_stock_trainer_kernels("liger_trainer")
    stock_trainer.install()


def build(tmp_path, **options):
    return causal(tmp_path, trainer_class=Trainer, **options)


def test_stock_trainer_trains_with_our_kernels(tmp_path, caplog):
    stock = build(tmp_path)
    stock.train()
    trainer = build(tmp_path, use_liger_kernel=True)
    with caplog.at_level(logging.INFO, logger="liger_trainer"):
        trainer.train()
    assert "the kernels of liger_trainer run" in caplog.text
    assert "forward" in trainer.model.model.norm.__dict__
    assert_close_logs(logged(trainer), logged(stock))


def test_report_callback_prints_what_the_stock_trainer_runs(tmp_path, capsys):
    trainer = build(tmp_path, use_liger_kernel=True, max_steps=1)
    trainer.add_callback(KernelReportCallback())
    trainer.train()
    assert capsys.readouterr().out.count("liger_trainer kernels in LlamaForCausalLM") == 1
    plain = build(tmp_path, max_steps=1)
    plain.add_callback(KernelReportCallback())
    plain.train()
    assert "liger_trainer kernels" not in capsys.readouterr().out


def test_ligers_keys_are_understood(tmp_path):
    config = {"rms_norm": False, "fused_linear_cross_entropy": False, "cross_entropy": False}
    trainer = build(tmp_path, use_liger_kernel=True, liger_kernel_config=config)
    trainer.train()
    assert "forward" not in trainer.model.model.norm.__dict__
    assert "forward" not in trainer.model.lm_head.__dict__
    assert "forward" in trainer.model.model.layers[0].mlp.__dict__


@pytest.mark.filterwarnings("ignore")
def test_stock_sft_trainer_gets_the_layer_kernels(tmp_path):
    trainer = sft(tmp_path, trainer_class=SFTTrainer, use_liger_kernel=True)
    trainer.train()
    assert "forward" in trainer.model.model.norm.__dict__
    assert "trl" in trainer.model.forward.__func__.__code__.co_filename


def test_uninstall_gives_the_trainer_its_own_back(tmp_path):
    original = stock_trainer._original()
    assert transformers.trainer.apply_liger_kernel is stock_trainer.apply_for_trainer
    stock_trainer.uninstall()
    assert not stock_trainer.installed()
    assert transformers.trainer.apply_liger_kernel is original
    assert transformers.integrations.liger.apply_liger_kernel is original
    with pytest.raises(ImportError, match="liger-kernel"):
        build(tmp_path, use_liger_kernel=True).train()
    stock_trainer.install()
    assert stock_trainer.installed()
    build(tmp_path, use_liger_kernel=True, max_steps=1).train()


def test_with_liger_kernel_installed_the_setting_decides(tmp_path, monkeypatch, caplog):
    calls = []
    fake, submodule = types.ModuleType("liger_kernel"), types.ModuleType("liger_kernel.transformers")
    submodule._apply_liger_kernel_to_instance = lambda model, **kwargs: calls.append(kwargs)
    fake.transformers = submodule
    monkeypatch.setitem(sys.modules, "liger_kernel", fake)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", submodule)
    monkeypatch.setattr(stock_trainer, "liger_kernel_installed", lambda: True)
    monkeypatch.setattr(transformers.integrations.liger, "is_liger_kernel_available", lambda: True)

    trainer = build(tmp_path, use_liger_kernel=True, max_steps=1)
    trainer.train()
    assert calls == []
    assert "not those of the liger-kernel package" in caplog.text

    stock_trainer.set_stock_trainer_kernels("liger_kernel")
    caplog.clear()
    trainer = build(tmp_path, use_liger_kernel=True, max_steps=1, liger_kernel_config={"rope": False})
    trainer.train()
    assert calls == [{"rope": False}]
    assert "kernels of the liger-kernel package run" in caplog.text
    assert "forward" not in trainer.model.model.norm.__dict__


def test_settings_are_checked():
    with pytest.raises(ValueError, match="'liger_trainer' or 'liger_kernel'"):
        stock_trainer.set_stock_trainer_kernels("something")
    with pytest.raises(ImportError, match="pip install liger-kernel"):
        stock_trainer.set_stock_trainer_kernels("liger_kernel")


def test_data_parallel_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with torch.device("meta"):
        model = torch.nn.Linear(1, 1)
    assert not stock_trainer._data_parallel_is_next(model)
    monkeypatch.setattr(
        torch.nn.Linear, "parameters", lambda self: [types.SimpleNamespace(device=torch.device("cuda"))]
    )
    with pytest.raises(ValueError, match="accelerate launch"):
        stock_trainer.apply_for_trainer(model)


@pytest.mark.parametrize("first", ["import liger_trainer", "import transformers.trainer"])
def test_import_is_light_and_the_order_does_not_matter(first, tmp_path):
    code = f"""
        import sys
        {first}
        import liger_trainer
        from liger_trainer import stock_trainer
        light = {first!r} == "import liger_trainer"
        if light:
            assert not {{"torch", "transformers", "trl", "triton"}} & set(sys.modules), "the import is not light"
        import transformers.trainer
        assert transformers.trainer.apply_liger_kernel is stock_trainer.apply_for_trainer
        assert stock_trainer._original().__module__ == "transformers.integrations.liger"
        if not light:
            sys.exit()

        from transformers import Trainer, TrainingArguments
        from tests.trainers.tiny import COMMON, llama, token_rows
        args = TrainingArguments({str(tmp_path)!r}, use_liger_kernel=True, **{{**COMMON, "max_steps": 1}})
        trainer = Trainer(llama(), args, train_dataset=token_rows())
        trainer.train()
        assert "forward" in trainer.model.model.norm.__dict__

        stock_trainer.uninstall()
        assert transformers.trainer.apply_liger_kernel is stock_trainer._original()
    """
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120, cwd=root)
