"""The kernel flags through Python, the command line, YAML, and the saved arguments."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import HfArgumentParser, TrainingArguments
from transformers.training_args import OptimizerNames
from trl import TrlParser

import liger_trainer
from liger_trainer.configs.flags import (
    KernelFlags,
    LigerTrainingArguments,
    activation_memory_of,
    kernel_config_of,
    retained_bytes_of,
)
from liger_trainer.configs.liger_adamw import liger_adamw_options
from liger_trainer.configs.trl_configs import (
    LigerDPOConfig,
    LigerGRPOConfig,
    LigerKTOConfig,
    LigerRLOOConfig,
    LigerSFTConfig,
)
from liger_trainer.run_report.report import changed_arguments
from liger_trainer.trainers.base import extended_config

CLASSES = [LigerTrainingArguments, LigerSFTConfig, LigerDPOConfig, LigerKTOConfig, LigerGRPOConfig, LigerRLOOConfig]

DIFFERENT = {LigerDPOConfig: ("padding_free",)}  # None is our default, and on


def make(cls, tmp_path, **kwargs):
    extra = {"bf16": False} if cls is not LigerTrainingArguments else {}
    return cls(output_dir=str(tmp_path), report_to="none", use_cpu=True, **extra, **kwargs)


@pytest.mark.parametrize("cls", CLASSES)
def test_defaults_are_on_and_the_base_defaults_stay(cls, tmp_path):
    args = make(cls, tmp_path)
    assert args.use_liger_kernel is True
    assert args.strict_kernels is False
    assert args.kernel_report is True
    assert args.kernel_config().logits_memory == 512 * 2**20
    assert retained_bytes_of(args) is None
    base = make(extended_config(cls), tmp_path)
    ours = ("use_liger_kernel", "logging_dir", "logging_nan_inf_filter", *DIFFERENT.get(cls, ()))
    for name in base.to_dict().keys() - set(ours):
        assert getattr(args, name) == getattr(base, name), name


@pytest.mark.parametrize("cls", CLASSES)
def test_retained_logits(cls, tmp_path):
    sizes = {"0": 0, 0: 0, "2GiB": 2**31}
    assert [retained_bytes_of(make(cls, tmp_path, retain_logits_memory=value)) for value in sizes] == [*sizes.values()]
    assert retained_bytes_of(make(extended_config(cls), tmp_path)) is None


@pytest.mark.parametrize("cls", CLASSES)
def test_activation_memory(cls, tmp_path):
    sizes = {"0": 0, 0: 0, "20GiB": 20 * 2**30, 2**30: 2**30, "auto": "auto", None: None}
    assert [activation_memory_of(make(cls, tmp_path, activation_memory=value)) for value in sizes] == [*sizes.values()]
    assert activation_memory_of(make(extended_config(cls), tmp_path)) is None
    options = f"--output_dir {tmp_path} --report_to none --use_cpu --bf16 false --activation_memory 1.5GiB"
    (args,) = HfArgumentParser(cls).parse_args_into_dataclasses(options.split())
    assert activation_memory_of(args) == 3 * 2**29


@pytest.mark.parametrize("cls", CLASSES)
def test_mapping_and_json_and_liger_names(cls, tmp_path):
    for value in ({"rms_norm": False}, '{"rms_norm": false}'):
        args = make(cls, tmp_path, liger_kernel_config=value)
        assert args.liger_kernel_config == {"rms_norm": False}
        assert args.kernel_config().rms_norm is False
        assert args.kernel_config().rope is True
    assert make(cls, tmp_path, liger_kernel_config="null").kernel_config().rope is True
    args = make(cls, tmp_path, liger_kernel_config={"fused_linear_cross_entropy": False})
    assert args.kernel_config().linear_cross_entropy is False


@pytest.mark.parametrize("cls", CLASSES)
def test_unknown_key_names_the_nearest(cls, tmp_path):
    with pytest.raises(ValueError, match=r"rms_nrom.*did you mean 'rms_norm'"):
        make(cls, tmp_path, liger_kernel_config={"rms_nrom": False})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"liger_kernel_config": "{not json"}, "not JSON"),
        ({"liger_kernel_config": "[1]"}, "give a mapping"),
        ({"liger_kernel_config": {"rope": "yes"}}, "must be true or false"),
        ({"logits_memory": "lots"}, "logits_memory"),
        ({"logits_memory": "0"}, "more than 0"),
        ({"logits_memory": "1.5"}, "bytes as an int"),
        ({"activation_memory": "20 GiBs"}, "`activation_memory` is '20 GiBs'; give bytes .* Or 'auto'"),
        ({"activation_memory": "max"}, "`activation_memory` is 'max'"),
        ({"activation_memory": -1}, "`activation_memory` is -1; it must be 0 or more bytes"),
        ({"activation_memory": True}, "`activation_memory` is True"),
        ({"non_finite": "maybe"}, "'stop', 'skip' or 'off'"),
        ({"use_liger_kernel": "no"}, "`use_liger_kernel` is 'no'; it must be true or false"),
        ({"strict_kernels": "yes"}, "`strict_kernels` is 'yes'"),
        ({"liger_kernel_config": {"ROPE": True}}, "no key 'ROPE'; did you mean 'rope'"),
        ({"liger_kernel_config": {"x": True}}, "no key 'x'. The keys are attention, recurrence"),
    ],
)
def test_bad_values(kwargs, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make(LigerTrainingArguments, tmp_path, **kwargs)


@pytest.mark.parametrize("cls", CLASSES)
def test_command_line(cls, tmp_path):
    (args,) = HfArgumentParser(cls).parse_args_into_dataclasses(
        [
            *f"--output_dir {tmp_path} --report_to none --use_cpu --bf16 false --logits_memory 1GiB".split(),
            *["--strict_kernels", "--kernel_report", "false", "--non_finite", "skip", "--liger_kernel_config"],
            '{"rms_norm": false}',
        ]
    )
    assert args.kernel_config().rms_norm is False
    assert args.kernel_config().logits_memory == 2**30
    assert args.strict_kernels is True
    assert args.kernel_report is False
    assert args.non_finite == "skip"
    (off,) = HfArgumentParser(cls).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--use_liger_kernel", "false"]
    )
    assert off.use_liger_kernel is False


@pytest.mark.parametrize("cls", CLASSES)
def test_yaml(cls, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\nlogits_memory: 1048576\n"
        "liger_kernel_config:\n  rope: false\n  linear_cross_entropy: true\n"
    )
    (args,) = TrlParser(cls).parse_args_and_config(["--config", str(path)])
    assert args.kernel_config().rope is False
    assert args.kernel_config().logits_memory == 2**20


@pytest.mark.parametrize("cls", CLASSES)
def test_help_renders_and_arguments_survive_saving(cls, tmp_path):
    assert "strict_kernels" in HfArgumentParser(cls).format_help()
    args = make(cls, tmp_path, liger_kernel_config={"rope": False}, logits_memory="1GiB")
    assert json.loads(args.to_json_string())["liger_kernel_config"] == {"rope": False}
    torch.save(args, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert loaded.kernel_config() == args.kernel_config()
    rebuilt = {key: value for key, value in args.to_dict().items() if not key.endswith("_token")}
    if "generation_batch_size" in rebuilt:  # TRL fills it in, and refuses both
        rebuilt.pop("steps_per_generation")
    assert cls(**rebuilt).kernel_config() == args.kernel_config()


@pytest.mark.parametrize("cls", CLASSES)
def test_our_optimizer(cls, tmp_path):
    """By every way to write it, and with what transformers does to its own names."""
    options = f"--output_dir {tmp_path} --report_to none --use_cpu --bf16 false --optim liger_adamw --optim_args seed=1"
    (parsed,) = HfArgumentParser(cls).parse_args_into_dataclasses(options.split())
    args = make(cls, tmp_path, optim="liger_adamw", optim_args="states=bf16, master=None")
    torch.save(args, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert [one.optim for one in (parsed, args, loaded)] == ["liger_adamw"] * 3
    assert json.loads(args.to_json_string())["optim"] == args.to_sanitized_dict()["optim"] == "liger_adamw"
    assert liger_adamw_options(parsed) == {"seed": 1}
    assert liger_adamw_options(loaded) == {"states": "bf16", "master": None, "seed": 42}
    assert make(cls, tmp_path, optim="sgd").optim is OptimizerNames.SGD


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"optim": "liger_adam"}, "`optim` is 'liger_adam'; it must be one of 'liger_adamw', 'adamw_torch', "),
        ({"optim_args": "states=4bit"}, "`optim_args` is 'states=4bit': `states` is '4bit'; it must be one of '8bit'"),
        ({"optim_args": "master=kahan"}, "`optim_args` is 'master=kahan': `master` is 'kahan'; it must be one of"),
        ({"optim_args": "seed=-1"}, "`optim_args` is 'seed=-1': `seed` is '-1'; it must be an integer from 0"),
        ({"optim_args": "states"}, "`optim_args` is 'states': `states` is ''"),
        ({"optim_args": "beta1=0.9"}, "`optim_args` is 'beta1=0.9'; `optim: liger_adamw` takes 'states', 'master' and"),
        ({"optim_args": {"states": "bf16"}}, "`optim_args` is {'states': 'bf16'}; `optim: liger_adamw` takes 'states'"),
        ({"optim_args": ","}, "`optim_args` is ','; `optim: liger_adamw` takes"),
    ],
)
def test_bad_optimizers(kwargs, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make(LigerTrainingArguments, tmp_path, **{"optim": "liger_adamw", **kwargs})
    assert "\n" not in str(error.value)


def test_our_optimizer_is_refused_with_deepspeed(tmp_path):
    pytest.importorskip("deepspeed")
    sharded = {"zero_optimization": {"stage": 2}}
    with pytest.raises(ValueError, match="DeepSpeed, which keeps fp32 weights of its own; set `optim: adamw_torch_f"):
        make(LigerTrainingArguments, tmp_path, optim="liger_adamw", deepspeed=sharded)


def test_config_of_stock_arguments(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, liger_kernel_config={"rope": False})
    assert kernel_config_of(args).rope is False
    assert kernel_config_of(args).logits_memory == 512 * 2**20


def test_size_inside_the_mapping_wins(tmp_path):
    args = make(LigerTrainingArguments, tmp_path, liger_kernel_config={"logits_memory": "1MiB"}, logits_memory="2MiB")
    assert args.kernel_config().logits_memory == 2**20


OF_TRL = [getattr(liger_trainer, f"Liger{name}Config") for name in liger_trainer._TRL_TRAINERS]


@pytest.mark.parametrize("cls", OF_TRL)
def test_bf16_follows_the_device_where_it_is_not_set(cls, tmp_path, monkeypatch):
    """TRL's default is bf16 whatever the device, which transformers refuses without a GPU that has it."""

    def bf16(available, **options):
        for module in ("liger_trainer.configs.flags", "transformers.training_args"):
            monkeypatch.setattr(f"{module}.is_torch_bf16_gpu_available", lambda: available)
        return cls(output_dir=str(tmp_path), report_to="none", **options).bf16

    assert bf16(False) is False
    assert bf16(True) is True
    assert bf16(True, use_cpu=True) is False
    assert bf16(True, bf16=False) is False
    assert bf16(False, use_cpu=True, bf16=True) is True
    with pytest.raises(ValueError, match="Your setup doesn't support bf16/gpu"):
        bf16(False, bf16=True)


@pytest.mark.parametrize("cls", [LigerTrainingArguments, *OF_TRL])
def test_bf16_that_a_gpu_emulates_is_refused(cls, tmp_path, monkeypatch):
    """torch and transformers say that a T4 supports it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(cls, "_setup_devices", torch.device("cpu"))
    monkeypatch.setattr(cls, "distributed_state", None, raising=False)
    with pytest.raises(ValueError, match=r"`bf16` is true, but Tesla T4 .*; set `bf16: false` and `fp16: true`"):
        cls(output_dir=str(tmp_path), report_to="none", bf16=True)
    assert cls(output_dir=str(tmp_path), report_to="none").bf16 is False
    assert cls(output_dir=str(tmp_path), report_to="none", fp16=True).fp16
    assert cls(output_dir=str(tmp_path), report_to="none", bf16=True, use_cpu=True).bf16


def test_fp16_wins_over_the_default(tmp_path, monkeypatch):
    for module in ("liger_trainer.configs.flags", "transformers.training_args"):
        monkeypatch.setattr(f"{module}.is_torch_bf16_gpu_available", lambda: True)
    assert LigerSFTConfig(output_dir=str(tmp_path), report_to="none", fp16=True).bf16 is False


def test_the_flags_alone():
    """As of a configuration of the user's own, which has nothing of Hugging Face's."""
    assert KernelFlags().kernel_config() == kernel_config_of(KernelFlags())


@pytest.mark.parametrize("cls", [LigerTrainingArguments, *OF_TRL])
def test_batches_are_copied_without_waiting(cls, tmp_path, monkeypatch):
    """On CUDA and from pinned memory, unless the user says otherwise; a report shows what the user has changed."""

    def made(cuda=True, **options):
        stub = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: cuda))
        monkeypatch.setattr("liger_trainer.configs.flags.torch", stub)
        args = cls(output_dir=str(tmp_path), report_to="none", bf16=False, **options)
        reported = "accelerator_config" in dict(changed_arguments(args))
        return args.accelerator_config.non_blocking, reported

    assert made() == (True, False)
    assert made(cuda=False) == (False, False)
    assert made(dataloader_pin_memory=False) == (False, False)
    assert made(use_cpu=True) == (False, False)
    assert made(accelerator_config={"split_batches": True}) == (True, True)
    assert made(accelerator_config='{"split_batches": true}') == (True, True)
    file = tmp_path / "accelerator.json"
    file.write_text('{"split_batches": true}')
    assert made(accelerator_config=str(file)) == (False, True)
    assert made(accelerator_config={"non_blocking": False}) == (False, True)
    assert made(cuda=False, accelerator_config={"non_blocking": True}) == (True, True)


@pytest.mark.parametrize("name", ["cuda_graphs", "packed_base"])
@pytest.mark.parametrize("given", [0, 1, "on", None, []])
def test_a_switch_is_no_number(name, given, tmp_path):
    with pytest.raises(ValueError, match=f"`{name}` is .*; it must be true, false or 'auto'"):
        LigerTrainingArguments(str(tmp_path), use_cpu=True, **{name: given})
