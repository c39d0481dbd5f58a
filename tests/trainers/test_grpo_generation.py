"""Generation in LigerGRPOTrainer and LigerRLOOTrainer: what vLLM is sent and what `generate` gives is as in TRL.

The server and the engine are fakes (`fake_vllm`); NCCL, vLLM's own loading of the weights and its sampler are
not covered here.
"""

import logging

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.generation.vllm_generation import VLLMGeneration

import liger_trainer
from tests.tiny_models import TINY_MODELS
from tests.trainers.fake_vllm import VLLMServer, colocate, satisfy_import_gates
from tests.trainers.parity import assert_same_logs
from tests.trainers.tiny import COMMON, WORDS, logged, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

ARGUMENTS = {
    **COMMON, "max_steps": 2, "bf16": False, "gradient_checkpointing": False, "max_completion_length": 6,
    "num_generations": 4, "adam_epsilon": 1e-2, "beta": 0.0,
}  # fmt: skip

GRPO = (GRPOTrainer, GRPOConfig, liger_trainer.LigerGRPOTrainer, liger_trainer.LigerGRPOConfig)
RLOO = (RLOOTrainer, RLOOConfig, liger_trainer.LigerRLOOTrainer, liger_trainer.LigerRLOOConfig)

MODELS = {
    "full": {},
    "tied": {"model": "gemma2"},
    "moe": {"model": "qwen3_moe"},
    "lora": {"peft": {"target_modules": ["q_proj", "v_proj"]}},
    "saved_head": {"peft": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}},
}


def distinct_tokens(completions, **kwargs):
    return [float(len(set(text))) for text in completions]


def build(trainer_class, config_class, folder, model="llama", peft=None, **options):
    more = {"peft_config": LoraConfig(r=4, lora_dropout=0.0, **peft)} if peft else {}
    args = config_class(output_dir=str(folder), **{**ARGUMENTS, **options})
    data = Dataset.from_list([{"prompt": words} for words in WORDS])
    return trainer_class(
        TINY_MODELS[model](), args=args, reward_funcs=distinct_tokens, train_dataset=data,
        processing_class=tokenizer(), **more,
    )  # fmt: skip


def on_server(trainer_class, config_class, folder, monkeypatch, model="llama", **options):
    """Two steps against a server of its own; the trainer and the server."""
    with VLLMServer(TINY_MODELS[model]()).running() as server, monkeypatch.context() as patch:
        satisfy_import_gates(patch, server)
        vllm = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
        trainer = build(trainer_class, config_class, folder, model, **vllm, **options)
        trainer.train()
        trainer.vllm_generation.vllm_client.close_communicator()
    return trainer, server


@pytest.mark.parametrize(
    ("kind", "name"), [*((GRPO, name) for name in MODELS), (RLOO, "lora")], ids=[*MODELS, "rloo-lora"]
)
def test_server_is_sent_what_trl_sends(kind, name, tmp_path, monkeypatch):
    stock, stock_server = on_server(*kind[:2], tmp_path / "stock", monkeypatch, **MODELS[name])
    ours, server = on_server(*kind[2:], tmp_path / "ours", monkeypatch, **MODELS[name])
    assert ours.kernel_report.applied
    assert len(server.updates) == 2  # before each step's generation
    assert server.updates == stock_server.updates
    assert server.requests == stock_server.requests
    assert_same_logs(stock, ours)


@pytest.mark.parametrize("name", ["full", "lora", "lora_head"])
def test_server_holds_the_weights_that_are_trained(name, tmp_path, monkeypatch):
    case = MODELS.get(name, {"peft": {"target_modules": ["q_proj", "lm_head"]}})  # on the head TRL refuses an adapter
    trainer, server = on_server(*GRPO[2:], tmp_path, monkeypatch, **case)
    names = [name for name, parameter in TINY_MODELS["llama"]().named_parameters()]
    assert [[name for name, *_ in update] for update in server.updates] == [names, names]
    differences = [log["sampling/sampling_logp_difference/max"] for log in logged(trainer)[:2]]
    assert max(differences) < 1e-5  # between the server's log-probabilities and the trainer's
    before = TINY_MODELS["llama"]().state_dict()
    assert any(not torch.equal(value, before[name]) for name, value in server.model.state_dict().items())


BASES = {
    "lora": {"peft": {"target_modules": "all-linear"}},
    "dora": {"peft": {"target_modules": ["q_proj", "down_proj"], "use_dora": True}},
    "embedding": {"peft": {"target_modules": ["embed_tokens", "v_proj"]}, "model": "gemma2"},
    "biases": {"peft": {"target_modules": ["q_proj", "k_proj"], "bias": "lora_only"}, "model": "qwen2"},
    "experts": {
        "peft": {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        "model": "qwen3_moe",
    },
}


@pytest.mark.parametrize("name", BASES)
def test_a_base_in_bf16_keeps_its_bits_over_syncs_that_send_what_trl_sends(name, tmp_path, monkeypatch):
    case = BASES[name]
    colocate(monkeypatch, VLLMServer(TINY_MODELS[case.get("model", "llama")]()))
    trainer = build(*GRPO[2:], tmp_path, use_vllm=True, vllm_mode="colocate", **case)
    model, vllm = trainer.model.to(torch.bfloat16), trainer.vllm_generation
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        with torch.no_grad():
            for key, value in model.named_parameters():
                if "lora_" in key:
                    value += 0.01 * torch.randn(value.shape, generator=generator).to(value.dtype)
        broken_off = vllm._iter_named_params()
        next(broken_off)
        broken_off.close()
        sent = dict(vllm._iter_named_params())  # all of them at once: what was sent stays as it was sent
        assert not any(layer.merged for layer in model.modules() if isinstance(layer, BaseTunerLayer))
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items() if "lora_" not in key)
    plain = TINY_MODELS[case.get("model", "llama")]().to(torch.bfloat16)
    assert any(not torch.equal(sent[key], value) for key, value in plain.named_parameters())
    stock = {key: value.clone() for key, value in VLLMGeneration._iter_named_params(vllm)}  # exact the first time
    assert list(sent) == list(stock)
    assert all(torch.equal(sent[key], value) for key, value in stock.items())


@pytest.mark.parametrize("name", ["full", "lora", "saved_head"])
def test_engine_in_the_process_loads_what_trl_loads(name, tmp_path, monkeypatch):
    def run(trainer_class, config_class, folder):
        engines = colocate(monkeypatch, VLLMServer(TINY_MODELS["llama"]()))
        options = {"use_vllm": True, "vllm_mode": "colocate"}
        trainer = build(trainer_class, config_class, folder, **options, **MODELS[name])
        trainer.train()
        return trainer, engines[0].loaded

    stock, expected = run(*GRPO[:2], tmp_path / "stock")
    ours, loaded = run(*GRPO[2:], tmp_path / "ours")
    assert loaded == expected
    assert_same_logs(stock, ours)


@pytest.mark.parametrize(
    ("kind", "name"), [*((GRPO, name) for name in [*MODELS, "lora_head"]), (RLOO, "full")],
    ids=[*MODELS, "lora_head", "rloo"],
)  # fmt: skip
def test_generate_gives_the_tokens_of_the_model_alone(kind, name, tmp_path):
    case = MODELS.get(name, {"peft": {"target_modules": ["q_proj", "lm_head"]}})
    ids = torch.tensor([[5, 6, 7, 8], [0, 9, 10, 11]])
    options = {"attention_mask": (ids != 0).long(), "max_new_tokens": 12, "pad_token_id": 0}

    def generated(model, **sampling):
        torch.manual_seed(1)
        return model.eval().generate(ids, **options, **sampling)

    alone = TINY_MODELS[case.get("model", "llama")]()
    alone.config.output_router_logits = False  # with it, a mixture's forward takes no mask longer than its input
    greedy, sampled = generated(alone, do_sample=False), generated(alone, do_sample=True)
    logits = alone(ids).logits
    trainer = build(*kind[2:], tmp_path, **case)  # adapters start as the identity
    trainer.model.config.output_router_logits = False
    assert torch.equal(generated(trainer.model, do_sample=False), greedy)
    assert torch.equal(generated(trainer.model, do_sample=True), sampled)
    got = trainer.model(ids).logits
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, logits, rtol=1e-5, atol=1e-5)


def test_generate_after_training_gives_the_tokens_of_its_weights(tmp_path):
    trainer = build(*GRPO[2:], tmp_path)
    trainer.train()
    alone = TINY_MODELS["llama"]().eval()
    before = alone.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=12, do_sample=False)
    alone.load_state_dict(trainer.model.state_dict())
    expected = alone.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=12, do_sample=False)
    got = trainer.model.eval().generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=12, do_sample=False)
    assert torch.equal(got, expected)
    assert not torch.equal(expected, before)


# Whether probabilities of all tokens are divided by those of the kept ones, and what is named then.
VLLM = {"use_vllm": True, "vllm_mode": "colocate"}
TRUNCATED = {
    "correction": (GRPO, {**VLLM, "top_p": 0.9}, ["top_p=0.9", "top_p=1.0", "importance_sampling_correction=False"]),
    "further_arguments": (GRPO, {**VLLM, "generation_kwargs": {"top_k": 20}}, ["top_k=20", "top_k=0"]),
    "mask": (
        GRPO,
        {**VLLM, "min_p": 0.1, "vllm_importance_sampling_correction": False, "off_policy_mask_threshold": 0.5},
        ["min_p=0.1", "min_p=None", "off_policy_mask_threshold=None"],
    ),
    "overruled": (GRPO, {**VLLM, "top_p": 0.9, "generation_kwargs": {"top_p": 1.0}}, []),
    "all_tokens": (GRPO, {**VLLM, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.1}, []),
    "no_correction": (GRPO, {**VLLM, "top_p": 0.9, "vllm_importance_sampling_correction": False}, []),
    "no_vllm": (GRPO, {"top_p": 0.9, "off_policy_mask_threshold": 0.5}, []),
    "rloo": (RLOO, {**VLLM, "top_p": 0.9}, []),
}


@pytest.mark.parametrize("name", TRUNCATED)
def test_truncated_sampling_is_warned_of_where_log_probs_of_vllm_are_used(name, tmp_path, monkeypatch, caplog):
    kind, options, named = TRUNCATED[name]
    colocate(monkeypatch, VLLMServer(TINY_MODELS["llama"]()))
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        build(*kind[2:], tmp_path, **options)
    warnings = [record.getMessage() for record in caplog.records if "normalised over" in record.getMessage()]
    assert len(warnings) == bool(named)
    assert all(word in warnings[0] for word in named)
