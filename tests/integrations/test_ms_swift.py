"""The plug-in for ms-swift: a file of the user's that imports it, and the Trainer of transformers."""

import importlib.util

import transformers.trainer
from transformers import Trainer

from liger_trainer import stock_trainer
from tests.trainers.builders import causal


def test_the_trainer_runs_our_kernels_and_prints_the_report(swift, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(transformers.trainer, "DEFAULT_CALLBACKS", [*transformers.trainer.DEFAULT_CALLBACKS])
    stock_trainer.install()
    file = tmp_path / "liger_plugin.py"
    file.write_text("import liger_trainer.integrations.ms_swift\n")
    swift.import_external_file(file)
    assert importlib.util.find_spec("liger_kernel")  # which ms-swift asks for
    trainer = causal(tmp_path, trainer_class=Trainer, use_liger_kernel=True, max_steps=1)
    trainer.train()
    assert "forward" in vars(trainer.model.model.norm)
    assert capsys.readouterr().out.count("liger_trainer kernels in LlamaForCausalLM") == 1
