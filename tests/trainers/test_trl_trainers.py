"""What the trainers over TRL have in common: construction, the private hook, what is left as it was."""

import importlib
import inspect
import threading
import types
import warnings
from functools import partial

import pytest
import torch
import trl
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DogeConfig, DogeForCausalLM, TrainingArguments

import liger_trainer
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.trainers import fused_forward, trl_mixin
from liger_trainer.trainers.sft_trainer import OnePassModel
from tests.trainers.parity import BASE, KINDS, assert_parity, build, liger_trainer_of, lora
from tests.trainers.tiny import COMMON, SIZES, logged, mixtral, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")
EVERY = pytest.mark.parametrize("kind", KINDS)
MODULES = [importlib.import_module(f"trl.trainer.{kind.lower()}_trainer") for kind in KINDS]


@pytest.mark.parametrize(("kind", "case"), [*((kind, {}) for kind in KINDS), ("SFT", {"loss_type": "dft"})])
def test_no_logits_are_built(kind, case, tmp_path, folders, never_built):
    if kind != "RLOO":
        case = {**case, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    trainer = build(kind, True, tmp_path, folders["llama"], **case)
    trainer.train()
    assert trainer.state.global_step == 2


def test_no_logits_are_built_for_an_fp32_head(tmp_path, folders, never_built):
    trainer = build(
        "GRPO", True, tmp_path, folders["llama"],
        cast_lm_head_to_fp32=True, beta=0.1, model_init_kwargs={"dtype": "bfloat16"},
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 2


@EVERY
def test_globals_are_as_before(kind, tmp_path, folders, monkeypatch):
    before = [dict(vars(module)) for module in (*MODULES, trl.trainer.utils)]

    def unchanged():
        return all(
            vars(module).keys() == names.keys() and all(vars(module)[name] is names[name] for name in names)
            for module, names in zip((*MODULES, trl.trainer.utils), before)
        )

    build(kind, True, tmp_path, folders["llama"])
    assert unchanged()

    def fail(*args, **kwargs):
        assert not unchanged(), "the swap is on when the head is installed"
        raise RuntimeError("in the middle")

    monkeypatch.setattr(liger_trainer_of(kind), "_apply_kernels", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        build(kind, True, tmp_path, folders["llama"])
    assert unchanged()


def test_other_threads_keep_trls_head_and_guard():
    module, calls, adapter = types.ModuleType("fake"), [], BaseTunerLayer()
    module.add_fused_lm_head, module.BaseTunerLayer = lambda: calls.append("theirs"), BaseTunerLayer

    def look():
        module.add_fused_lm_head()
        calls.append(isinstance(adapter, module.BaseTunerLayer))

    with trl_mixin.own_fused_head(module, lambda: calls.append("ours")):
        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    look()
    assert calls == ["ours", False, "theirs", True, "theirs", True]


@EVERY
def test_arguments(kind, tmp_path, folders, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer_class, config_class = liger_trainer_of(kind), getattr(liger_trainer, f"Liger{kind}Config")
    dataset, further, settings = KINDS[kind]
    settings = {"output_dir": str(tmp_path), **BASE, **settings}

    def make(args, **kwargs):
        return trainer_class(
            folders["llama"], args=args, train_dataset=dataset(), processing_class=tokenizer(), **further, **kwargs
        )

    with monkeypatch.context() as without_gpu:  # the default is bf16 on an accelerator
        without_gpu.setattr(trainer_class, "config_class", partial(config_class, use_cpu=True, bf16=False))
        default = trainer_class._configured(None, folders["llama"] + "/")
    assert type(default) is config_class
    assert default.output_dir == f"llama-{kind}"

    args = TrainingArguments(output_dir=str(tmp_path), **{**COMMON, "learning_rate": 3e-4}, hub_token="secret")
    if kind == "SFT":  # TRL takes them over too
        plain = make(args)
        assert type(plain.args) is config_class
        assert plain.args.learning_rate == 3e-4
        assert plain.args.hub_token == "secret"
        assert plain.kernel_report.applied
    else:
        with pytest.raises(TypeError, match=f"takes a Liger{kind}Config, or TRL's {kind}Config"):
            make(args)

    args = getattr(trl, f"{kind}Config")(**settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        theirs = make(args)
    assert theirs.kernel_report.applied
    assert theirs.args.use_liger_kernel is True
    assert args.use_liger_kernel is False, "a stock trainer may be given them next"
    assert not [warning for warning in caught if "use_liger_kernel" in str(warning.message)]

    off = make(config_class(use_liger_kernel=False, **settings))
    assert off.kernel_report is None
    layers = {"linear_cross_entropy": False}
    layers_alone = make(config_class(liger_kernel_config=layers, **settings))
    assert layers_alone.kernel_report.applied
    for trainer in (off, layers_alone):
        assert trainer.model.forward.__func__.__code__.co_filename == trl.trainer.utils.__file__

    # The third positional argument of most is `args`.
    position = list(inspect.signature(getattr(trl, f"{kind}Trainer").__init__).parameters).index("args") - 2
    values = [further.get("reward_funcs")] if position else []
    positional = trainer_class(folders["llama"], *values, args, train_dataset=dataset(), processing_class=tokenizer())
    assert positional.args.learning_rate == args.learning_rate
    assert type(positional.args) is type(args)


@pytest.mark.parametrize("kind", ["DPO", "KTO", "GRPO", "RLOO"])
def test_the_reference_gets_the_same_kernels(kind, tmp_path, folders):
    trainer = build(kind, True, tmp_path, folders["llama"], beta=0.1)
    names = [{name for name, module in m.named_modules() if "forward" in vars(module)} for m in (
        trainer.model, trainer.ref_model
    )]  # fmt: skip
    assert names[0] == names[1]
    assert len(names[0]) > 5
    assert not any(
        parameter.requires_grad and parameter.grad is not None for parameter in trainer.ref_model.parameters()
    )
    trainer.train()
    fresh = AutoModelForCausalLM.from_pretrained(folders["llama"])
    assert all(map(torch.equal, trainer.ref_model.parameters(), fresh.parameters()))


def test_a_reference_model_of_the_caller(tmp_path, folders):
    def other():
        return AutoModelForCausalLM.from_pretrained(folders["llama"], tie_word_embeddings=False)

    references = []
    for _ in range(2):
        references.append(other())
        with torch.no_grad():
            references[-1].lm_head.weight.mul_(1.5)
    logs = []
    for ours, reference in enumerate(references):
        trainer = build("DPO", bool(ours), tmp_path / str(ours), folders["llama"], ref_model=reference)
        trainer.train()
        logs.append(logged(trainer))
    for left, right in zip(*logs):
        assert left == pytest.approx(right, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("fp32", [False, True])
def test_generation_and_names_are_those_of_the_model(kind, fp32, tmp_path, folders):
    """What vLLM is sent are the parameters by name; what generates is the forward without the flag."""
    case = {"cast_lm_head_to_fp32": True} if fp32 and kind == "GRPO" else {}
    stock, ours = (build(kind, ours, tmp_path / str(ours), folders["llama"], **case) for ours in (False, True))
    assert [name for name, _ in ours.model.named_parameters()] == [name for name, _ in stock.model.named_parameters()]
    assert ours.model.state_dict().keys() == stock.model.state_dict().keys()
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    for model in (stock.model, ours.model):
        model.eval()
    with torch.no_grad():
        outputs = [model(ids) for model in (stock.model, ours.model)]
    assert type(outputs[1].logits) is torch.Tensor
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits)
    drawn = []
    for model in (stock.model, ours.model):
        torch.manual_seed(5)
        drawn.append(model.generate(ids, max_new_tokens=6, do_sample=True))
    assert torch.equal(*drawn)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO"])
def test_metrics_of_an_evaluation_get_logits(kind, tmp_path, folders):
    shapes = []

    def compute_metrics(prediction):
        values = prediction.predictions
        values = values[0] if isinstance(values, tuple) else values
        shapes.append(values.shape)
        return {"mean": float(values.mean())}

    results = []
    for ours in (False, True):
        trainer = build(
            kind, ours, tmp_path / str(ours), folders["llama"], eval_strategy="no", compute_metrics=compute_metrics
        )
        results.append(trainer.evaluate())
    assert shapes[0] == shapes[1]
    assert results[1]["eval_mean"] == pytest.approx(results[0]["eval_mean"], abs=1e-5)
    assert results[1]["eval_loss"] == pytest.approx(results[0]["eval_loss"], abs=1e-5)


def _count_forwards(model):
    count = []
    model.get_decoder().register_forward_hook(lambda *_: count.append(1))
    return count


def plain_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def loss_in_place(outputs, labels, num_items_in_batch=None):
    outputs.logits.mul_(0.5)
    return plain_loss(outputs, labels, num_items_in_batch)


@pytest.mark.parametrize(
    "case", [{"label_smoothing_factor": 0.1}, {"compute_loss_func": plain_loss}, {"compute_loss_func": loss_in_place}]
)
def test_one_forward_for_sft(case, tmp_path, folders):
    assert_parity("SFT", tmp_path, folders["llama"], **case)
    counts = []
    for ours in (False, True):
        trainer = build("SFT", ours, tmp_path / f"count{ours}", folders["llama"], **case, max_steps=1)
        counts.append(_count_forwards(trainer.model))
        trainer.train()
    assert list(map(len, counts)) == [2, 1]


def test_a_second_forward_where_the_first_has_other_logits(tmp_path, folders):
    """A loss function that changes built logits in place, and the virtual tokens of prompt learning."""
    trainer = build("SFT", True, tmp_path, folders["llama"], label_smoothing_factor=0.1)
    calls = []

    class Logits:
        def __init__(self, logits):
            self.logits = logits

    def model(**kwargs):
        calls.append(kwargs.get("fused_lm_head", False))
        return Logits(torch.zeros(1, 4, 8))

    once = OnePassModel(model, trainer.model.config, trainer._statistics)
    labels = torch.tensor([[1, 2, 3, 4]])
    outputs = once(input_ids=labels)
    once(labels=labels, fused_lm_head=True)
    assert calls == [False]
    once(labels=labels[:, :3], fused_lm_head=True)
    assert calls == [False, True]
    outputs.logits.mul_(2.0)
    outputs.logits = outputs.logits.clone()  # which hides the change
    once(labels=labels, fused_lm_head=True)
    assert calls == [False, True, True]


def test_all_labels_ignored(tmp_path, folders):
    """A completion of no token gives a zero that backpropagates, with a plain head and with an adapter on it."""
    for config in (None, lora("lm_head")):
        trainer = build("DPO", True, tmp_path, folders["llama"], **({"peft_config": config} if config else {}))
        ids = torch.tensor([[5, 6, 7, 8]])
        output = trainer.model(input_ids=ids, labels=torch.full_like(ids, -100), fused_lm_head=True)
        assert output.loss == 0.0
        assert not output.label_mask.any()
        output.loss.backward()
        assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())


def test_shifted_labels_and_what_was_asked_for(tmp_path, folders):
    trainer = build("DPO", True, tmp_path, folders["llama"], use_weighting=True)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    labels = ids.masked_fill(ids == 6, -100)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    left = trainer.model(input_ids=ids, labels=labels, fused_lm_head=True)
    right = trainer.model(input_ids=ids, shift_labels=shifted, fused_lm_head=True)
    for name in ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask"):
        assert left[name].shape == (2, 3)
        assert torch.equal(left[name], right[name][:, :-1]), name
        assert not left[name][labels[:, 1:] == -100].any()
    assert left.aux_loss is None
    assert trainer.ref_model(input_ids=ids, labels=labels, fused_lm_head=True).entropy is None
    with pytest.raises(ValueError, match="neither was given"):
        trainer.model(input_ids=ids, fused_lm_head=True)


def test_the_loss_of_the_fused_head_has_the_auxiliary_loss_once():
    """TRL's trainers build their own loss of the statistics, so no training shows this one."""
    plain, fused = mixtral(), mixtral()
    plain.router_aux_loss_coef = fused.config.router_aux_loss_coef = 0.5
    apply_liger_kernel(fused)
    trl_mixin.install_fused_forward(fused, fused_forward.StatisticsOptions())
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]]), "output_router_logits": True}
    inputs["labels"] = inputs["input_ids"].masked_fill(inputs["input_ids"] == 6, -100)
    expected, found = plain(**inputs), fused(**inputs, fused_lm_head=True)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss)
    torch.testing.assert_close(found.loss, expected.loss)


def test_a_router_loss_that_the_model_does_not_compute_is_0(tmp_path, caplog):
    """TRL asks a dense Doge for one, since its configuration has a coefficient for those that are not."""
    torch.manual_seed(0)
    DogeForCausalLM(DogeConfig(**SIZES)).save_pretrained(tmp_path / "model")
    with pytest.raises(IndexError):
        build("DPO", False, tmp_path / "stock", str(tmp_path / "model")).train()
    runs = []
    for ours, case in ((False, {"router_aux_loss_coef": 0.0}), (True, {})):
        trainer = build("DPO", ours, tmp_path / str(ours), str(tmp_path / "model"), **case)
        trainer.train()
        runs.append([log["loss"] for log in logged(trainer) if "loss" in log])
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)
    assert [log["aux_loss"] for log in logged(trainer) if "loss" in log] == [0.0, 0.0]
    assert caplog.text.count("computes no auxiliary loss") == 1


def test_retain_logits_memory_is_a_size(tmp_path):
    for value, message in (("many", "retain_logits_memory"), (-1, "0 or more")):
        with pytest.raises(ValueError, match=message):
            liger_trainer.LigerDPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, retain_logits_memory=value)


def test_a_second_trainer_of_the_same_model(tmp_path, folders):
    """DPO replaces what SFT has left in the model."""
    model = build("SFT", True, tmp_path / "sft", folders["llama"]).model
    model.config._name_or_path = folders["llama"]
    ours = build("DPO", True, tmp_path / "dpo", model)
    ours.train()
    stock = build("DPO", False, tmp_path / "stock", folders["llama"])
    stock.train()
    for left, right in zip(logged(ours), logged(stock)):
        assert left == pytest.approx(right, abs=1e-5, rel=1e-5)


def test_no_warning_of_the_older_names_that_trl_uses(tmp_path, folders):
    """TRL switches checkpointing off for the reference by names that transformers has newer ones for."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FutureWarning)
        build("DPO", True, tmp_path, folders["llama"], gradient_checkpointing=True).train()
    assert not [str(warning.message) for warning in caught if "gradient_checkpointing" in str(warning.message)]
