"""Which batches a trainer packs: what its flags, its model and the batch say, and what it says about it."""

import copy

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig
from trl import DPOConfig

import liger_trainer
from liger_trainer.packing import packing as packing_module
from liger_trainer.packing.packing import Packing, drops
from liger_trainer.trainers.checks.out_of_memory import budgets
from tests.attention.families import build as build_model
from tests.packing.training import DATA, assert_close_gradients, save_models, trained
from tests.trainers.parity import assert_close_logs, build, lora
from tests.trainers.tiny import COMMON, llama, logged, mixtral, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

CONFIGS = [f"Liger{name}Config" for name in ("DPO", "KTO", "GRPO", "RLOO", "ORPO", "CPO", "Reward")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("uneven"))


@pytest.fixture
def seen(monkeypatch):
    """Of each batch: whether it was packed, whether its model trained, and whether a token was of several rows."""
    found = []
    rows = Packing.rows

    def spy(packing, model, kwargs, *args):
        made = rows(packing, model, kwargs, *args)
        shared = made is not None and any(int(row.inputs["attention_mask"].max()) > 1 for row in made)
        found.append((made is not None, model.training, shared))
        return made

    monkeypatch.setattr(Packing, "rows", spy)
    return found


@pytest.fixture
def said(monkeypatch):
    """What was said once."""
    found = []
    monkeypatch.setattr(packing_module, "warn_once", lambda key, message, *args: found.append(message))
    return found


def dpo(folder, model=None, **case):
    model = llama() if model is None else model
    if "peft_config" not in case:
        case.setdefault("ref_model", copy.deepcopy(model))
    return build("DPO", True, folder, model, data=DATA["DPO"], max_steps=1, **case)


def rows_of(trainer):
    """The rows of the report about packing: whether it is applied, and what is said."""
    found = {row.component: row for row in trainer._packing_rows}
    return {name: row.kernel if row.applied else row.reason for name, row in found.items()}


ON = {"padding_free": "one row without padding", "share_prompt": "common beginnings once"}
SPLIT = {**ON, "padding_free": "rows of up to 60 tokens without padding"}
DROPS = "not in training: dropout, such as `lora_dropout`, is on, and would be the same for all that share a prompt"
FLAGS = {
    "default": ({}, ON, (True, True, True)),
    "asked for": ({"padding_free": True, "share_prompt": True, "strict_kernels": True}, ON, (True, True, True)),
    "off": ({"padding_free": False}, {}, None),
    "not shared": ({"share_prompt": False}, {"padding_free": ON["padding_free"]}, (True, True, False)),
    "split": ({"tokens_per_micro_batch": 60}, SPLIT, (True, True, True)),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name, tmp_path, models, seen):
    own, rows, batches = FLAGS[name]
    trainer, _ = trained("DPO", True, tmp_path, models["llama"], own=own, eval_strategy="steps", eval_steps=1)
    assert rows_of(trainer) == rows
    report = {row.component: row.kernel for row in trainer.kernel_report if row.component in ON}
    assert report == rows
    assert set(seen) == (set() if batches is None else {batches, (True, False, batches[2])})


@pytest.mark.parametrize("theirs", [{}, {"padding_free": False}, {"padding_free": True}])
def test_a_config_of_trl_has_the_defaults(theirs, tmp_path, seen, caplog):
    """`padding_free` is false by default there, and TRL warns of true."""
    options = {**COMMON, "bf16": False, "max_steps": 1, **theirs}
    args = DPOConfig(str(tmp_path), **options)
    trainer = liger_trainer.LigerDPOTrainer(
        llama(), llama(), args=args, train_dataset=DATA["DPO"](), processing_class=tokenizer()
    )
    assert "padding_free" not in caplog.text
    assert trainer.args.padding_free is theirs.get("padding_free", False)
    trainer.train()
    assert set(seen) == {(True, True, True)}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding_free": "yes"}, "`padding_free` is 'yes'; it must be true, false, or left out."),
        ({"share_prompt": 1}, "`share_prompt` is 1; it must be true, false, or left out."),
        (
            {"share_prompt": True, "padding_free": False},
            "`share_prompt` is true, but `padding_free` is false; leave one of the two out.",
        ),
        ({"tokens_per_micro_batch": 0}, "`tokens_per_micro_batch` is 0; it must be a whole number, 1 or more."),
        ({"tokens_per_micro_batch": 5.5}, "`tokens_per_micro_batch` is 5.5; it must be a whole number, 1 or more."),
        ({"tokens_per_micro_batch": True}, "`tokens_per_micro_batch` is True; it must be a whole number, 1 or more."),
        (
            {"tokens_per_micro_batch": 9, "padding_free": False},
            "`tokens_per_micro_batch` is 9, but `padding_free` is false; leave one of the two out.",
        ),
    ],
)
def test_configs_name_what_is_wrong(name, options, message, tmp_path):
    made = getattr(liger_trainer, name)
    if "share_prompt" in options and not hasattr(made, "share_prompt"):
        return  # KTO's completions are of different prompts
    with pytest.raises(ValueError, match="`") as error:
        made(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)
    assert str(error.value) == message


def virtual_tokens():
    return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)


LEFT_PADDED = {
    "compiled": ({"torch_compile": True}, "`torch_compile` is on"),
    "virtual tokens": ({"peft_config": virtual_tokens}, "PromptTuningConfig puts virtual tokens before the prompt"),
    "activated": (
        {"peft_config": lambda: lora(alora_invocation_tokens=[67, 68], task_type="CAUSAL_LM")},
        "its adapter begins at a token that it looks for in the padded batch",
    ),
    "noise": (
        {"neftune_noise_alpha": 5.0},
        "`neftune_noise_alpha` is set, whose noise depends on the length of the longest row",
    ),
    "eager": ({"model": lambda: llama(attn_implementation="eager")}, "its attention is not ours"),
    "bloom": ({"model": lambda: build_model("bloom")}, "its attention is not ours"),
    "dropout": (
        {"model": lambda: llama(attention_dropout=0.1)},
        "its attention has dropout, which takes a mask of all pairs of tokens",
    ),
}


@pytest.mark.parametrize("name", LEFT_PADDED)
def test_what_stays_padded_has_a_row_in_the_report(name, tmp_path):
    case, reason = LEFT_PADDED[name]
    made = {key: value() if callable(value) else value for key, value in case.items()}
    trainer = dpo(tmp_path, **made)
    assert trainer._packing is None
    assert rows_of(trainer) == {"padding_free": f"batches stay padded: {reason}"}
    assert any(row.reason == f"batches stay padded: {reason}" for row in trainer.kernel_report)


OFF = {
    "its attention is not ours": {"attention": False},
    "the head is not ours": {"linear_cross_entropy": False, "cross_entropy": False},
}


@pytest.mark.parametrize("reason", OFF)
@pytest.mark.parametrize("flag", ["padding_free", "share_prompt", "tokens_per_micro_batch"])
def test_what_is_asked_for_and_cannot_be_done_is_an_error(flag, reason, tmp_path):
    own = {flag: 60 if flag == "tokens_per_micro_batch" else True, "liger_kernel_config": OFF[reason]}
    with pytest.raises(ValueError, match=f"`{flag}` is .*, but .*{reason}") as error:
        dpo(tmp_path, own={**own, "strict_kernels": flag != "tokens_per_micro_batch"})
    assert "\n" not in str(error.value)


def with_router_logits():
    """A model whose routers may have a z-loss without the load-balancing loss."""
    model = mixtral()
    model.config.output_router_logits = True
    return model


@pytest.mark.parametrize("case", ["ours", "z-loss", "a config of TRL"])
def test_where_memory_runs_out_fewer_tokens_are_advised_if_they_would_be_taken(case, tmp_path):
    if case == "a config of TRL":
        args = DPOConfig(str(tmp_path), **{**COMMON, "bf16": False})
        data = {"train_dataset": DATA["DPO"](), "processing_class": tokenizer()}
        trainer = liger_trainer.LigerDPOTrainer(llama(), llama(), args=args, **data)
    else:
        own = {"router_z_loss_coef": 0.1} if case == "z-loss" else {}
        trainer = dpo(tmp_path, with_router_logits(), own=own, router_aux_loss_coef=0.0)
    trainer.model(**batch_of(trainer), fused_lm_head=True)
    advised = [budget.text for budget in budgets(trainer) if "tokens_per_micro_batch" in budget.text]
    assert advised == (["tokens_per_micro_batch: 9"] if case == "ours" else [])


def test_weights_of_routers_are_not_split(tmp_path):
    message = "`tokens_per_micro_batch` is 60, but the routers' loss of a whole batch is not the sum of its parts'."
    for own, coefficient in (({}, 0.1), ({"router_z_loss_coef": 0.1}, 0.0)):
        own = {"tokens_per_micro_batch": 60, **own}
        with pytest.raises(ValueError, match=message):
            dpo(tmp_path, with_router_logits(), own=own, router_aux_loss_coef=coefficient)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (llama(), False),
        (llama(attention_dropout=0.1), True),
        (build_model("starcoder2", residual_dropout=0.1), True),
        (build_model("mixtral", router_jitter_noise=0.1), True),
        (build_model("granite", attention_dropout=0.0), False),
    ],
)
def test_models_that_draw_random_numbers_are_known(model, expected):
    assert drops(model) is expected


@pytest.mark.parametrize(
    "case",
    [
        {
            "peft_config": lambda: LoraConfig(target_modules=["q_proj"], lora_dropout=0.1),
            "disable_dropout": False,
        },
    ],
)
def test_with_dropout_rows_share_in_evaluation_alone(case, tmp_path, seen):
    made = {name: value() if callable(value) else value for name, value in case.items()}
    trainer = dpo(tmp_path, **made, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert rows_of(trainer)["share_prompt"] == DROPS
    assert (True, True, False) in seen
    assert (True, False, True) in seen
    assert all(shared is not training for _, training, shared in seen)


def batch_of(trainer, **more):
    torch.manual_seed(0)
    ids = torch.randint(3, 100, (3, 9))
    ids[1, :6] = ids[0, :6]
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), **more}


def with_hole(batch):
    batch["attention_mask"][0, 4] = 0


BATCHES = {
    "packed": ({}, lambda batch: None, None),
    "a hole": ({}, with_hole, "a row has padding between its tokens"),
    "embeddings": (
        {}, lambda batch: batch.update(inputs_embeds=torch.randn(3, 9, 32), input_ids=None),
        "its forward is given inputs_embeds",
    ),
    "hidden states": ({"output_hidden_states": True}, lambda batch: None, "its forward is given output_hidden_states"),
    "a mask of queries": (
        {}, lambda batch: batch.update(attention_mask=torch.ones(3, 1, 9, 9).tril().bool()),
        "its mask or positions are not a number for each token",
    ),
    "a mask in floats": ({}, lambda batch: batch.update(attention_mask=batch["attention_mask"].float()), None),
    "no mask": ({}, lambda batch: batch.update(attention_mask=None), None),
    "positions": ({}, lambda batch: batch.update(position_ids=torch.arange(9) * torch.tensor([[1], [2], [3]])), None),
    "no labels": ({}, lambda batch: batch["labels"].fill_(-100), None),
    "positions of all rows": ({}, lambda batch: batch.update(position_ids=torch.arange(9)[None] + 2), None),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_other_batches_stay_padded_and_it_is_said(name, tmp_path, seen, said):
    """The statistics are those of a trainer that packs nothing."""
    more, change, reason = BATCHES[name]
    found = []
    for own in ({}, {"padding_free": False}):
        trainer = dpo(tmp_path, own=own)
        batch = batch_of(trainer, **more)
        change(batch)
        outputs = trainer.model(**batch, fused_lm_head=True)
        outputs.log_probs.float().square().sum().backward()
        found.append((outputs.log_probs, trainer.model.model.layers[0].self_attn.q_proj.weight.grad))
    assert [packed for packed, _, _ in seen] == [reason is None]
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert said == ([] if reason is None else [f"LlamaForCausalLM gets a padded batch: {reason}. (Shown once.)"])
    trainer = dpo(tmp_path, own={"tokens_per_micro_batch": 9})
    if reason is not None:
        with pytest.raises(ValueError, match=f"`tokens_per_micro_batch` is 9, but a batch cannot be packed: {reason}"):
            trainer.model(**batch, fused_lm_head=True)


def test_a_reference_of_another_kind_is_proved_too(tmp_path, seen):
    """With layers that mix tokens: here Llama 4, and attention of its own; the size gives it other weights.

    Rounding would decide which completion a reference equal to the policy has win.
    """
    attention_of_its_own = llama(attn_implementation="eager", intermediate_size=48)
    for reference in (build_model("llama4_text", no_rope_layers=[1, 0]), attention_of_its_own):
        logs = []
        for own in ({}, {"padding_free": False}):
            trainer = dpo(tmp_path, own=own, ref_model=copy.deepcopy(reference))
            trainer.train()
            logs.append(logged(trainer))
            if not own:
                assert [row.reason.split(":")[0] for row in trainer._packing_rows] == [
                    "",
                    "",
                    "its batches stay padded",
                ]
        assert_close_logs(*logs)
    assert all(packed for packed, _, _ in seen)
    assert len(seen) == 2


@pytest.mark.parametrize("whose", ["model", "ref_model"])
def test_under_another_attention_batches_stay_padded(whose, tmp_path, said):
    """Such as that of a reference which was loaded with it, or of a model after `set_attn_implementation`."""
    logs = []
    for own in ({}, {"padding_free": False}):
        trainer = dpo(tmp_path, own=own)
        getattr(trainer, whose).set_attn_implementation("sdpa")
        trainer.train()
        logs.append(logged(trainer))
    assert_close_logs(*logs, but=["rewards/accuracies"])
    assert said == ["LlamaForCausalLM gets a padded batch: its attention is not ours. (Shown once.)"]


def test_a_batch_that_was_changed_in_place_is_packed_anew(tmp_path):
    trainers = [dpo(tmp_path, own=own) for own in ({}, {"padding_free": False})]
    batch = batch_of(None)
    for step in range(3):
        one, other = (trainer.model(**batch, fused_lm_head=True).log_probs for trainer in trainers)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        batch["input_ids"][0, 3 + step] += 1
        batch["labels"][2, 4] = -100
        batch["attention_mask"][2, 8 - step] = 0
        batch["labels"][2, 8 - step] = -100


@pytest.mark.parametrize("bf16", [False, True])
def test_a_second_trainer_of_a_reward_model_has_its_own_flags(bf16, tmp_path, models, seen):
    model = trained("Reward", True, tmp_path, models["llama"], bf16=bf16)[0].model
    seen.clear()
    second, _ = trained("Reward", True, tmp_path, model, bf16=bf16, own={"padding_free": False})
    assert not seen
    assert rows_of(second) == {}
    third, _ = trained("Reward", True, tmp_path, second.model, bf16=bf16, own={"tokens_per_micro_batch": 60})
    assert rows_of(third) == SPLIT
    assert {each for each in seen if each[1]} == {(True, True, True)}  # the copy of the proof does not train


def test_inference_mode_leaves_nothing_behind(tmp_path):
    """Torch counts no changes of its tensors, and saves none of them for a backward."""
    trainers = [dpo(tmp_path, own=own) for own in ({}, {"padding_free": False})]
    batch = batch_of(None)
    with torch.inference_mode():
        trainers[0].model(**batch, fused_lm_head=True)
        changed = {name: each.clone() for name, each in batch.items()}
        for _ in range(2):
            one, other = (trainer.model(**changed, fused_lm_head=True).log_probs for trainer in trainers)
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
            changed["input_ids"][0, 3] += 1
        trainers[0].model(**batch, fused_lm_head=True)
    trainers[0].model(**batch, fused_lm_head=True).log_probs.sum().backward()


def test_what_follows_a_training_is_as_without_packing(tmp_path, models, seen):
    """Tokens that are generated, and a stock trainer of the same model."""
    ours, _ = trained("DPO", True, tmp_path, models["llama"])
    plain = type(ours.model).from_pretrained(models["llama"])
    plain.load_state_dict(ours.model.state_dict())
    ids = torch.randint(3, 100, (2, 5))
    made = [model.eval().generate(ids, max_new_tokens=6, do_sample=False) for model in (ours.model, plain)]
    assert torch.equal(*made)
    seen.clear()
    logs, gradients = [], []
    for model in (ours.model, plain):
        stock, found = trained("DPO", False, tmp_path, model, ref_model=copy.deepcopy(plain))
        logs.append(logged(stock))
        gradients.append(found)
    assert not seen
    assert_close_logs(*logs, but=["rewards/accuracies"])
    assert_close_gradients(*gradients)
