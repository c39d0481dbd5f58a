"""`tokens_per_micro_batch`: a batch trains in several forwards as in one, with the activations of one in memory."""

import functools
import weakref

import pytest
import torch

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import ROUTER_BALANCE
from liger_trainer.head import fused_loss
from liger_trainer.head.lm_head import without_adapters
from liger_trainer.packing import packed_row, packing
from liger_trainer.packing.packing import Packing
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.recompute import activation_memory
from liger_trainer.trainers import choose_packing
from liger_trainer.trainers.checks.out_of_memory import budgets
from tests.trainers.parity import HALF_TOLERANCE, TOLERANCE, assert_close_logs, assert_close_weights, build, lora
from tests.trainers.test_activation_offloading import Offload
from tests.trainers.tiny import llama, logged

pytestmark = pytest.mark.filterwarnings("ignore")
(current_graph_task_id,) = require(ROUTER_BALANCE)

SGD = {"optim": "sgd", "learning_rate": 0.1}  # the weights show the gradients
CHECKPOINTS = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
Z_LOSS = {"own": {"router_z_loss_coef": 0.1}, "model_init_kwargs": {"output_router_logits": True}}


class Forwards:
    """Watches the forwards of a model that have gradients.

    Attributes:
        tokens: The tokens of each forward; those that are computed again do not count.
        alive: How many forwards had activations in memory, at each layer of each forward.
    """

    def __init__(self, model):
        self.tokens, self.alive, self._results = [], [], []
        base = without_adapters(model)
        base.get_input_embeddings().register_forward_hook(self._begin)
        for layer in base.model.layers:
            layer.register_forward_hook(self._computed)

    def _begin(self, module, args, output):
        if torch.is_grad_enabled():
            self._results.append([])
            if current_graph_task_id() == -1:
                self.tokens.append(args[0].shape[1])

    def _computed(self, module, args, output):
        if torch.is_grad_enabled():
            self.see(output)

    def see(self, tensor):
        """Watches a tensor of the forward that runs."""
        self._results[-1].append(weakref.ref(tensor))
        self.alive.append(sum(any(each() is not None for each in results) for results in self._results))


def train(kind, folder, model, most=None, watch=True, **case):
    own = {"padding_free": None if most else False, "tokens_per_micro_batch": most, **case.pop("own", {})}
    balance = {"router_aux_loss_coef": 0.0} if "mixtral" in model else {}
    trainer = build(kind, True, folder, model, own=own, **{**SGD, **balance, **case})
    forwards = Forwards(trainer.model) if watch else None
    trainer.train()
    return trainer, forwards


@functools.cache
def whole(kind, folder, model, case=""):
    """A training with one forward for each padded batch."""
    return train(kind, folder, model, watch=False, **CASES.get(case, {}))[0]


def assert_same(trainer, expected, tolerance=TOLERANCE):
    assert_close_logs(logged(trainer), logged(expected), absolute=tolerance, relative=tolerance)
    assert_close_weights(trainer, expected, 0.1 * tolerance)


@pytest.mark.parametrize(
    ("kind", "model", "most", "forwards"),
    [
        ("DPO", "llama", 60, 4),
        ("DPO", "mixtral", 40, 5),
        ("DPO", "llama", 1, 16),
        ("KTO", "llama", 30, 4),
        ("KTO", "mixtral", 1, 8),
        ("GRPO", "llama", 30, 4),
        ("GRPO", "mixtral", 1, 8),
        ("ORPO", "llama", 45, 5),
        ("Reward", "llama", 40, 5),
    ],
)
def test_it_trains_as_one_forward(kind, model, most, forwards, folders, tmp_path, tmp_path_factory):
    trainer, seen = train(kind, tmp_path, folders[model], most)
    assert len(seen.tokens) == forwards  # of two steps
    assert max(seen.tokens) <= most or most == 1
    assert_same(trainer, whole(kind, tmp_path_factory.getbasetemp(), folders[model]))


CASES = {
    "checkpoints": CHECKPOINTS,
    "reentrant checkpoints": REENTRANT,
    "activation_memory": {**CHECKPOINTS, "own": {"activation_memory": "1MiB"}},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
    "lora": {"peft_config": lora()},
    "lora on the head": {"peft_config": lora("q_proj", "lm_head")},
    "lora, reentrant checkpoints": {"peft_config": lora(), **REENTRANT},
    "bf16": {"bf16": True},
}


@pytest.mark.parametrize("case", CASES)
def test_whatever_else_is_on(case, folders, tmp_path, tmp_path_factory):
    trainer, _ = train("DPO", tmp_path, folders["llama"], 40, watch=False, **CASES[case])
    expected = whole("DPO", tmp_path_factory.getbasetemp(), folders["llama"], case)
    assert_same(trainer, expected, HALF_TOLERANCE if case == "bf16" else TOLERANCE)


@pytest.mark.parametrize("case", [{}, {"peft_config": lora()}, CHECKPOINTS], ids=["full", "lora", "checkpoints"])
def test_activations_of_one_forward_are_in_memory(case, folders, tmp_path, monkeypatch):
    trainer = build("DPO", True, tmp_path, folders["llama"], own={"tokens_per_micro_batch": 20}, **case)
    forwards = Forwards(trainer.model)

    def watched(hidden, *args, **kwargs):
        if torch.is_grad_enabled():
            forwards.see(hidden)
        return log_probs_of_head(hidden, *args, **kwargs)

    log_probs_of_head = fused_loss.log_probs_of_head
    monkeypatch.setattr(fused_loss, "log_probs_of_head", watched)
    trainer.train()
    assert len(forwards.tokens) > 4
    assert max(forwards.alive) == 1


def test_layers_keep_results_where_a_backward_follows(folders, tmp_path, monkeypatch):
    keeping, rows = activation_memory.keeping_contexts, Packing.rows
    kept, forwards = [], []
    monkeypatch.setattr(activation_memory, "keeping_contexts", lambda calls: kept.append(calls) or keeping(calls))

    def counted(self, *args):
        found = rows(self, *args)
        if torch.is_grad_enabled():
            forwards.append(len(found))
        return found

    monkeypatch.setattr(Packing, "rows", counted)
    own = {"tokens_per_micro_batch": 40, "activation_memory": "1GiB"}
    trainer = build("DPO", True, tmp_path, folders["llama"], own=own, max_steps=5, **CHECKPOINTS)
    trainer.train()
    assert min(forwards) > 1
    assert len(kept) == 2 * sum(forwards[3:])  # two layers, from the fourth step on, whatever else computes them
    assert all(kept)


def test_dropout_is_drawn_once(folders, tmp_path, monkeypatch):
    case = {"peft_config": lora(lora_dropout=0.3), "disable_dropout": False}
    trainer, _ = train("DPO", tmp_path, folders["llama"], 40, **case)
    monkeypatch.setattr(packed_row, "checkpoint", lambda compute, row, **options: compute(row))
    kept, _ = train("DPO", tmp_path, folders["llama"], 40, **case)
    assert_same(trainer, kept)


def test_activation_offloading(folders, tmp_path, tmp_path_factory):
    trainer = build("DPO", True, tmp_path, folders["llama"], own={"tokens_per_micro_batch": 40}, **SGD)
    trainer.maybe_activation_offload_context = Offload(trainer.model)
    trainer.train()
    assert_same(trainer, whole("DPO", tmp_path_factory.getbasetemp(), folders["llama"]))
    assert trainer.maybe_activation_offload_context.shapes


@pytest.mark.parametrize(
    ("model", "case", "message"),
    [
        ("mixtral", {"router_aux_loss_coef": 0.1}, "the routers' loss of a whole batch is not the sum"),
        ("mixtral", Z_LOSS, "the routers' loss of a whole batch is not the sum"),
        ("llama", {"own": {"padding_free": False}}, "`padding_free` is false"),
        ("llama", {"own": {"liger_kernel_config": {"linear_cross_entropy": False}}}, "`linear_cross_entropy` is false"),
        ("llama", {"model_init_kwargs": {"attn_implementation": "eager"}}, "its attention is not ours"),
        ("llama", REENTRANT, "`tokens_per_micro_batch` is 40, but checkpoints are reentrant"),
    ],
)
def test_what_cannot_be_split_is_refused(model, case, message, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(choose_packing, "is_distributed", lambda: case is REENTRANT)
    with pytest.raises(ValueError, match=message):
        train("DPO", tmp_path, folders[model], 40, **case)


@pytest.mark.parametrize(("case", "advised"), [({}, True), (Z_LOSS, False), (REENTRANT, False)])
def test_out_of_memory_it_is_advised_where_it_is_not_refused(case, advised, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(choose_packing, "is_distributed", lambda: case is REENTRANT)
    own = {"padding_free": None, **case.get("own", {})}
    trainer, _ = train("DPO", tmp_path, folders["mixtral"], watch=False, **{**case, "own": own})
    tokens = trainer._packing.tokens_of_last_forward
    texts = [budget.text for budget in budgets(trainer)]
    assert (f"tokens_per_micro_batch: {tokens // 2}" in texts) == advised


def test_a_batch_with_holes_is_refused():
    ids = torch.ones(2, 4, dtype=torch.long)
    given = {"input_ids": ids, "attention_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])}
    model = llama()
    apply_liger_kernel(model)
    with pytest.raises(ValueError, match=r"`tokens_per_micro_batch` is 2, .* padding between its tokens"):
        Packing(share=False, most=2).rows(model, given, ids)
    with torch.no_grad():  # the model is used for something else
        assert Packing(share=False, most=2).rows(model, given, ids) is None


@pytest.mark.parametrize("size", [1, 2], ids=["whole", "split"])
def test_processes_agree_where_they_share_a_model(size, monkeypatch):
    asked = []
    monkeypatch.setattr(packing, "is_distributed", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda count, _: asked.append(int(count)))
    model = llama()
    apply_liger_kernel(model)
    monkeypatch.setattr(type(model), "tp_size", size, raising=False)
    ids = torch.arange(12).view(3, 4)
    assert len(Packing(share=False, most=4).rows(model, {"input_ids": ids}, ids)) == 3
    assert asked == ([3] if size > 1 else [])


def test_a_forward_of_one_sequence_is_not_advised_to_be_smaller():
    model = llama()
    apply_liger_kernel(model)
    ids = torch.arange(12).view(3, 4)
    for most, tokens in ((8, 8), (4, 0)):
        made = Packing(share=False, most=most)
        made.rows(model, {"input_ids": ids}, ids)
        assert made.tokens_of_last_forward == tokens


@pytest.mark.parametrize(
    ("rows", "lengths", "share", "packed"),
    [
        (3, (4, 4, 4), False, False),
        (3, (4, 4, 3), False, True),
        (1, (4,), True, False),
        (2, (4, 4), True, True),
    ],
)
def test_a_batch_that_has_nothing_to_save_stays_as_it_is(rows, lengths, share, packed, caplog):
    model = llama()
    apply_liger_kernel(model)
    ids = torch.arange(4).repeat(rows, 1)
    mask = (torch.arange(4) < torch.tensor(lengths)[:, None]).long()
    made = Packing(share=share)
    found = made.rows(model, {"input_ids": ids, "attention_mask": mask}, ids)
    assert (found is not None) == packed
    assert made.trained == sum(lengths)
    assert made.executed == (sum(lengths) if not share else 4)
    assert "padded" not in caplog.text
