"""liger_trainer: fast, small-memory fine-tuning inside the Hugging Face stack."""

import importlib as _importlib
from typing import TYPE_CHECKING, Any

from liger_trainer._version import __version__ as __version__
from liger_trainer.liger.model_types import ROWS as _ROWS

# Trainer of TRL -> the module of ours. Those of `trl.experimental` have their configurations in a file of their own.
_EXPERIMENTAL = {"CPO": "pair_trainers", "GKD": "gkd_trainer", "ORPO": "pair_trainers"}
_TRL_TRAINERS = {
    **dict.fromkeys(("DPO", "KTO"), "reference_trainers"),
    **dict.fromkeys(("GRPO", "RLOO"), "generation_trainers"),
    **{_name: f"{_name.lower()}_trainer" for _name in ("Distillation", "Reward", "SFT")},
    **_EXPERIMENTAL,
}

# Public name -> the module it comes from, imported on first use: `import liger_trainer` itself stays light.
_EXPORTS = {
    "AutoLigerKernelForCausalLM": "liger_trainer.liger.apply",
    "KernelConfig": "liger_trainer.configs.kernel_config",
    "KernelReport": "liger_trainer.patching.report",
    "KernelReportRow": "liger_trainer.patching.report",
    **{f"Liger{_name}Config": "liger_trainer.configs.trl_configs" for _name in _TRL_TRAINERS},
    **{f"Liger{_name}Config": "liger_trainer.configs.trl_experimental_configs" for _name in _EXPERIMENTAL},
    **{f"Liger{_name}Trainer": f"liger_trainer.trainers.{_file}" for _name, _file in _TRL_TRAINERS.items()},
    "LigerTrainer": "liger_trainer.trainers.trainer",
    "LigerTrainingArguments": "liger_trainer.configs.flags",
    "apply_liger_kernel": "liger_trainer.patching.apply",
    "load_packed": "liger_trainer.packed.loading",
    "quantize_experts": "liger_trainer.patching.moe.quantized_experts",
    "revert_liger_kernel": "liger_trainer.patching.apply",
    "set_stock_trainer_kernels": "liger_trainer.stock_trainer",
    "undo_liger_kernel": "liger_trainer.liger.apply",
    **{f"apply_liger_kernel_to_{_name}": "liger_trainer.liger.apply" for _name in _ROWS},
}
_SUBMODULES = ("functional", "losses", "nn", "optim", "rewards")

if TYPE_CHECKING:
    from liger_trainer.configs.flags import LigerTrainingArguments as LigerTrainingArguments
    from liger_trainer.configs.kernel_config import KernelConfig as KernelConfig
    from liger_trainer.configs.trl_configs import LigerDistillationConfig as LigerDistillationConfig
    from liger_trainer.configs.trl_configs import LigerDPOConfig as LigerDPOConfig
    from liger_trainer.configs.trl_configs import LigerGRPOConfig as LigerGRPOConfig
    from liger_trainer.configs.trl_configs import LigerKTOConfig as LigerKTOConfig
    from liger_trainer.configs.trl_configs import LigerRewardConfig as LigerRewardConfig
    from liger_trainer.configs.trl_configs import LigerRLOOConfig as LigerRLOOConfig
    from liger_trainer.configs.trl_configs import LigerSFTConfig as LigerSFTConfig
    from liger_trainer.configs.trl_experimental_configs import LigerCPOConfig as LigerCPOConfig
    from liger_trainer.configs.trl_experimental_configs import LigerGKDConfig as LigerGKDConfig
    from liger_trainer.configs.trl_experimental_configs import LigerORPOConfig as LigerORPOConfig
    from liger_trainer.liger.apply import AutoLigerKernelForCausalLM as AutoLigerKernelForCausalLM
    from liger_trainer.liger.apply import undo_liger_kernel as undo_liger_kernel
    from liger_trainer.packed.loading import load_packed as load_packed
    from liger_trainer.patching.apply import apply_liger_kernel as apply_liger_kernel
    from liger_trainer.patching.apply import revert_liger_kernel as revert_liger_kernel
    from liger_trainer.patching.moe.quantized_experts import quantize_experts as quantize_experts
    from liger_trainer.patching.report import KernelReport as KernelReport
    from liger_trainer.patching.report import KernelReportRow as KernelReportRow
    from liger_trainer.stock_trainer import set_stock_trainer_kernels as set_stock_trainer_kernels
    from liger_trainer.trainers.distillation_trainer import LigerDistillationTrainer as LigerDistillationTrainer
    from liger_trainer.trainers.generation_trainers import LigerGRPOTrainer as LigerGRPOTrainer
    from liger_trainer.trainers.generation_trainers import LigerRLOOTrainer as LigerRLOOTrainer
    from liger_trainer.trainers.gkd_trainer import LigerGKDTrainer as LigerGKDTrainer
    from liger_trainer.trainers.pair_trainers import LigerCPOTrainer as LigerCPOTrainer
    from liger_trainer.trainers.pair_trainers import LigerORPOTrainer as LigerORPOTrainer
    from liger_trainer.trainers.reference_trainers import LigerDPOTrainer as LigerDPOTrainer
    from liger_trainer.trainers.reference_trainers import LigerKTOTrainer as LigerKTOTrainer
    from liger_trainer.trainers.reward_trainer import LigerRewardTrainer as LigerRewardTrainer
    from liger_trainer.trainers.sft_trainer import LigerSFTTrainer as LigerSFTTrainer
    from liger_trainer.trainers.trainer import LigerTrainer as LigerTrainer

__all__ = ["__version__", *_EXPORTS, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        try:
            value = getattr(_importlib.import_module(_EXPORTS[name]), name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith(__name__):
                raise
            text = f"`{__name__}.{name}` needs {error.name}. `pip install 'liger-trainer[train]'` installs it."
            raise ModuleNotFoundError(text, name=error.name) from error
    elif name in _SUBMODULES:
        value = _importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


from liger_trainer.stock_trainer import install as _install  # noqa: E402

_install()
