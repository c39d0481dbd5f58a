"""`cuda_graphs` in every trainer: no bit of a training changes, and where it cannot run it is refused by name."""

import copy
import gc
import re
from unittest import mock

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from liger_trainer import LigerSFTConfig, LigerTrainer, LigerTrainingArguments, load_packed
from liger_trainer.configs import flags
from liger_trainer.graphs import calls
from liger_trainer.graphs.calls import LayerState
from liger_trainer.graphs.captured import _Forward
from liger_trainer.packing import packed_row
from liger_trainer.patching import fp8
from liger_trainer.trainers import cuda_graphs
from liger_trainer.trainers.base import LigerTrainerMixin
from liger_trainer.trainers.cuda_graphs import CudaGraphsMixin
from tests.attention.shared_layers import build as build_shared
from tests.forked import run
from tests.graphs.recorded import RecordedCaptures
from tests.packed_checkpoints import write_dense, write_mixture
from tests.trainers.builders import causal, dpo
from tests.trainers.parity import KINDS, build
from tests.trainers.test_activation_memory import assert_same, lora
from tests.trainers.test_parity_distillation import build as build_distillation
from tests.trainers.tiny import WORDS, llama, mixtral

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """Graphs of operators on a CPU, in the place of those of launches, which are still there after a training."""
    obstacles = cuda_graphs._obstacles

    def without_device(trainer):
        return (each for each in obstacles(trainer) if "training is on" not in each[0])

    monkeypatch.setattr(cuda_graphs, "_obstacles", without_device)
    monkeypatch.setattr(flags, "_check_device_of_graphs", lambda args: None)
    monkeypatch.setattr(LigerTrainerMixin, "_captures", lambda self: RecordedCaptures())
    monkeypatch.setattr(LigerTrainerMixin, "_free_graphs", lambda self: None)


def dropping():
    """A model with dropout in its adapters and in its attention."""
    return lora(0.1, lambda: llama(attention_dropout=0.2))


def both(build, **options):
    trainers = []
    for switch in ("true", False):
        trainers.append(build(cuda_graphs=switch, max_steps=6, **options))
        trainers[-1].train()
    assert_same(*trainers)
    return trainers[0]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("make", [llama, lora, mixtral, dropping])
def test_a_training_keeps_its_bits(make, checkpointing, tmp_path):
    trainer = both(lambda **options: causal(tmp_path, make(), **options), gradient_checkpointing=checkpointing)
    graphs = trainer._graphs
    assert graphs.captured == (0 if make is mixtral else 2), graphs.reasons
    remark = "0 of 2 layers run from graphs; 2 do not: " if make is mixtral else "2 of 2 layers run from graphs."
    assert remark in trainer.kernel_report.remarks[-1]
    assert graphs._captures.settled == 6  # once after every step


class TwoParts(LlamaForCausalLM):
    """Runs a row in two parts, of which the second sees the keys of the first."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        first = super().forward(input_ids=input_ids[:, :4], use_cache=True)
        kept = {name: first[name] for name in ("cache", "past_key_values") if name in first}  # the older name
        return super().forward(input_ids=input_ids[:, 4:], labels=labels[:, 4:], **kept)


def in_two_parts():
    model = llama()
    model.__class__ = TwoParts
    return model


def prefix_tuned():
    return get_peft_model(llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


@pytest.mark.parametrize("make", [in_two_parts, prefix_tuned])
def test_a_layer_that_is_not_checkpointed_keeps_its_cache(make, tmp_path):
    trainer = both(lambda **options: causal(tmp_path, make(), **options))
    (reason,) = trainer._graphs.reasons
    assert "such as a cache" in reason


def test_nothing_else_takes_the_model_for_checkpointed(tmp_path):
    """TRL would checkpoint it again after the forward of a reference, for good."""
    model = lora(0.0)
    trainer = dpo(tmp_path, model, cuda_graphs="true", max_steps=6)
    trainer.args.eval_strategy, trainer.args.eval_steps = IntervalStrategy.STEPS, 2
    trainer.eval_dataset = trainer.train_dataset
    hooks = {name for name, each in model.named_modules() if each._forward_hooks}
    trainer.train()
    assert not any(getattr(each, "gradient_checkpointing", False) for each in model.modules())
    assert {name for name, each in model.named_modules() if each._forward_hooks} == hooks
    assert len(trainer._graphs._of) == 2  # the layers have been looked at


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_copy_that_a_loss_makes_is_one_of_its_own(checkpointing, tmp_path):
    copies = []

    def loss(outputs, labels, num_items_in_batch=None):
        if not copies:
            copies.append(copy.deepcopy(trainer.model))
        return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

    options = {"gradient_checkpointing": checkpointing, "compute_loss_func": loss}
    trainer = causal(tmp_path, llama(), cuda_graphs="true", max_steps=6, **options)
    ids, before = torch.arange(3, 13)[None], copy.deepcopy(trainer.model)
    trainer.train()
    assert trainer._graphs.captured == 2
    (copied,) = copies
    assert not [each for each in copied.modules() if type(vars(each).get("forward")) is _Forward]
    with torch.no_grad():
        assert torch.equal(copied(input_ids=ids).logits, before(input_ids=ids).logits)
        torch._foreach_zero_([*trainer.model.parameters()])
        assert torch.equal(copied(input_ids=ids).logits, before(input_ids=ids).logits)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_that_share_keys(checkpointing, tmp_path):
    trainer = both(
        lambda **options: causal(tmp_path, build_shared("E2B"), **options), gradient_checkpointing=checkpointing
    )
    assert trainer._graphs.captured == 6, trainer._graphs.reasons


@pytest.mark.parametrize("model", [lambda: build_shared("E2B"), llama])
def test_layers_that_share_keys_run_on_labelled_tokens_where_the_device_is_busy(model, tmp_path):
    trainer = causal(tmp_path, model(), cuda_graphs="auto")
    layer, graphs = trainer.model.model.layers[-1], trainer._graphs
    before = layer.__dict__.get("forward")
    with trainer._from_graphs(graphs):
        assert layer.__dict__["forward"] is not before
    graphs.gains.busy_from.fill_(1 << 20)
    with trainer._from_graphs(graphs):
        assert (layer.__dict__.get("forward") is before) == (model is not llama)


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 3}, {"bf16": True}, {"optim": "liger_adamw"}])
def test_options_of_a_training(options, tmp_path):
    trainer = both(lambda **given: causal(tmp_path, llama(), **given), gradient_checkpointing=True, **options)
    assert trainer._graphs.captured == 2


def pairs_of_one_length(rows=16):
    return Dataset.from_list([{"prompt": WORDS[0], "chosen": WORDS[1], "rejected": WORDS[2]}] * rows)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_trainers_of_trl(kind, checkpointing, tmp_path, folders, monkeypatch):
    """Bit for bit, with packed rows as they are."""
    monkeypatch.setattr(packed_row, "filled", lambda layout: layout)
    options = {"gradient_checkpointing": checkpointing, "max_steps": 6}
    if kind == "DPO":
        options["data"] = pairs_of_one_length
    trainers = []
    for switch in ("true", False):
        own = {"cuda_graphs": switch}
        trainers.append(build(kind, True, tmp_path, folders["llama"], own=own, **options))
        trainers[-1].train()
    assert_same(*trainers)
    assert trainers[0]._graphs.captured == 2


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("option", [{"fp8": "rowwise"}, {"fp8": "tensorwise"}, {"fp8_base": True}], ids=str)
def test_products_in_fp8(option, checkpointing, monkeypatch, tmp_path):
    """Weights that are trained are cast in the graphs, at every step anew."""
    monkeypatch.setattr(fp8, "LEAST_ROWS", 16)
    monkeypatch.setattr(fp8, "LEAST_FEATURES", 16)
    components = {"fp8", "fp8_base"}

    def make(**options):
        model = llama(hidden_size=64, intermediate_size=128).to(torch.bfloat16)
        if "fp8_base" in option:
            torch.manual_seed(1)
            model = get_peft_model(model, LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False))
        return causal(tmp_path, model, bf16=True, learning_rate=1e-2, **options)

    further = {"liger_kernel_config": {"fp8_all_layers": True}} if "fp8" in option else {}
    trainer = both(make, gradient_checkpointing=checkpointing, **option, **further)
    assert sum(row.count for row in trainer.kernel_report.applied if row.component in components) == 14
    assert trainer._graphs.captured == 2, trainer._graphs.reasons


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("write", [write_dense, write_mixture])
def test_a_packed_base(write, checkpointing, tmp_path):
    """The codes of its layers are decoded in the graphs; experts whose rows the host counts run without."""
    write(tmp_path / "packed", "fp8 blocks")

    def make():
        torch.manual_seed(0)
        model = load_packed(str(tmp_path / "packed"), dtype=torch.float32)
        return get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))

    trainer = both(lambda **options: causal(tmp_path, make(), **options), gradient_checkpointing=checkpointing)
    assert trainer._graphs.captured == (2 if write is write_dense else 0), trainer._graphs.reasons


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("kind", ["DPO", "KTO", "GRPO", "RLOO"])
def test_packed_rows_are_filled_up(kind, adapted, tmp_path, folders):
    """Rows that share prompts, of other lengths in each batch, run from the graphs of a few; so does a reference."""
    options = {"learning_rate": 1e-3, "max_steps": 12, "per_device_train_batch_size": 4}
    if adapted:
        options["peft_config"] = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    losses = []
    for switch in ("true", False):
        trainer = build(
            kind, True, tmp_path, folders["llama"], own={"cuda_graphs": switch, "padding_free": True}, **options
        )
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        if switch:
            graphs = trainer._graphs
            assert graphs.captured == 2, graphs.reasons
            assert trainer._others["ref_model"].captured == (2 if kind in ("DPO", "KTO") and not adapted else 0)
            # KTO runs the policy without gradients too, and both share their shapes.
            states = max(len(each) for known in graphs._of.values() for each in known.graphs.values())
            assert states == (2 if kind == "KTO" and adapted else 1)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("kind", ["gkd", "distillation"])
def test_a_teacher_runs_from_graphs(kind, tmp_path):
    """Unless it is given a cache, as GKD's is."""
    losses = []
    for switch in ("true", False):
        trainer = build_distillation(kind, True, tmp_path, max_steps=12, liger={"cuda_graphs": switch})
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        if switch:
            teacher = trainer._others["teacher_model"]
            assert bool(teacher.captured) == (kind == "distillation"), teacher.reasons
            assert any("such as a cache" in reason for reason in teacher.reasons) == (kind == "gkd")
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


class CallsTheModel(LigerTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss


def test_a_loss_that_calls_the_model_itself_is_named(tmp_path):
    trainer = causal(tmp_path, llama(), CallsTheModel, cuda_graphs="auto")
    trainer.train()
    reason = "`CallsTheModel.compute_loss` does not call `super().compute_loss`"
    assert trainer.kernel_report.remarks.count(f"cuda_graphs: no layer runs from graphs, because {reason}.") == 1
    with pytest.raises(ValueError, match=re.escape(reason)):
        causal(tmp_path, llama(), CallsTheModel, cuda_graphs="true").train()


def test_a_default_device_and_the_backends_of_attention(tmp_path):
    """Graphs are valid for those that were set when they were captured."""
    backends = []

    class Changing(LigerTrainer):
        def compute_loss(self, *args, **kwargs):
            backends.append(SDPBackend.MATH if self.state.global_step > 4 else SDPBackend.FLASH_ATTENTION)
            with sdpa_kernel(backends[-1]), torch.device("cpu"):
                return super().compute_loss(*args, **kwargs)

    options = {"trainer_class": Changing, "kernel_report": False, "liger_kernel_config": {"attention": False}}
    trainer = both(lambda **given: causal(tmp_path, llama(), **given | {"max_steps": 9}, **options))
    assert trainer._graphs.captured == 2
    assert [len(known.graphs) for known in trainer._graphs._of.values()] == [2, 2]


def print_settings() -> None:
    torch.backends.fp32_precision = "tf32"
    print(*calls._settings())


def test_precision_by_its_newer_name():
    """As `tf32: true` sets it on a GPU, after which torch raises where an older name is read."""
    found = run(print_settings)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("tf32 tf32 ")


def test_a_mode_that_sees_all_operators_is_named(tmp_path):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Watching(LigerTrainer):
        def compute_loss(self, *args, **kwargs):
            with Mode():
                return super().compute_loss(*args, **kwargs)

    trainer = both(lambda **given: causal(tmp_path, llama(), trainer_class=Watching, **given))
    assert [*trainer._graphs.reasons] == ["a mode, a hook or a transform sees its operators"]


def test_weights_whose_memory_changes_at_every_step(tmp_path):
    class Moving(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            for each in model.parameters():
                each.data = each.data.clone()

    trainer = causal(tmp_path, llama(), cuda_graphs="true", max_steps=40, callbacks=[Moving()])
    trainer.train()
    assert [*trainer._graphs.reasons] == ["its attributes or the memory of its weights keep changing"]
    assert trainer._graphs._captures.count <= 2 * 2 * 5


def test_a_training_leaves_no_graphs(tmp_path, monkeypatch):
    monkeypatch.setattr(LigerTrainerMixin, "_free_graphs", CudaGraphsMixin.__dict__["_free_graphs"])
    trainer = causal(tmp_path, llama(), cuda_graphs="true", max_steps=6)
    trainer.train()
    assert "2 of 2 layers run from graphs." in trainer.kernel_report.remarks[-1]
    graphs = trainer._graphs
    assert (graphs.captured, len(graphs._held), graphs._memory.nbytes) == (0, 0, 0)
    layer = trainer.model.model.layers[0]  # whose weights a state of it would hold, wherever the model is moved
    assert not [each for each in gc.get_objects() if type(each) is LayerState and layer in each._parts]


def test_weights_on_another_device(tmp_path):
    model = llama()
    model.model.layers[1].to("meta")
    with mock.patch.object(LigerTrainer, "_move_model_to_device"):
        trainer = causal(tmp_path, model, cuda_graphs="auto", use_liger_kernel=False)
    reason = "weights of its layers are on meta, not on cpu"
    assert [found for found, holds in cuda_graphs._obstacles(trainer) if holds] == [reason]


@pytest.mark.parametrize(
    ("one", "other", "differ"), [("cuda:1", "cuda:0", True), ("cuda:0", "cuda", False), ("cuda:0", "cuda:0", False)]
)
def test_a_device_without_an_index_may_be_any(one, other, differ):
    assert cuda_graphs._differ(torch.device(one), torch.device(other)) == differ


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`cuda_graphs` is true, but `torch_compile`"):
        causal(tmp_path, llama(), cuda_graphs=True, torch_compile=True)
    trainer = causal(tmp_path, llama(), cuda_graphs="auto", torch_compile=True)
    assert "no layer runs from graphs, because" in trainer.kernel_report.remarks[-1]
    noisy = mixtral()
    noisy.model.layers[0].mlp.jitter_noise = 0.1
    with pytest.raises(ValueError, match="random numbers beside those of dropout"):
        causal(tmp_path, noisy, cuda_graphs=True)
    kwargs = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match="`use_reentrant: true`"):
        causal(tmp_path, llama(), cuda_graphs=True, **kwargs)
    adapted = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM"))
    for module in adapted.modules():
        if isinstance(module, LoraLayer):  # as PEFT leaves a whole module out, by a number of the host
            module.module_dropout = {"default": 0.3}
    with pytest.raises(ValueError, match="random numbers beside those of dropout"):
        causal(tmp_path, adapted, cuda_graphs=True)
    quantised = llama()
    quantised.model.layers[0].mlp.up_proj.weight = type("Params4bit", (torch.nn.Parameter,), {})(torch.ones(2, 2))
    with pytest.raises(ValueError, match="weights of its layers are of the class Params4bit"):
        causal(tmp_path, quantised, cuda_graphs=True, use_liger_kernel=False)
    without = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=128))
    without.transformer.h = torch.nn.ModuleList([torch.nn.Linear(16, 16)])
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no layers that transformers can checkpoint"):
        causal(tmp_path, without, cuda_graphs=True)
    with pytest.raises(ValueError, match="`cuda_graphs` is 'on'; it must be true, false or 'auto'"):
        causal(tmp_path, llama(), cuda_graphs="on")


def test_a_launch_that_compiles_the_model_turns_torch_compile_on(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")  # `accelerate launch --dynamo_backend`
    trainer = causal(tmp_path, llama(), cuda_graphs="auto")
    assert trainer.args.torch_compile
    assert "`torch_compile` is true" in trainer.kernel_report.remarks[-1]


def test_a_device_without_graphs_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.undo()
    message = "`cuda_graphs` is true, but training is on cpu, which has no CUDA graphs. Set it to 'auto' or to false"
    for config in (LigerTrainingArguments, LigerSFTConfig):
        for given in (True, "true"):
            with pytest.raises(ValueError, match=message):
                config(str(tmp_path), use_cpu=True, bf16=False, cuda_graphs=given)
        for given in (False, "auto"):
            config(str(tmp_path), use_cpu=True, bf16=False, cuda_graphs=given)
