"""Tiny models, data and arguments shared by the trainer tests; everything is built here, offline."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from liger_trainer.trainers.trainer import LigerTrainer

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

COMMON = {
    "report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1,
    "max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "seed": 3,
}  # fmt: skip

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}"
)

WORDS = ["the cat sat on the mat", "a dog ran far away", "birds fly south in the cold", "we read books at night"]


def llama(**kwargs):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **kwargs}))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))


def gemma2():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, query_pre_attn_scalar=8, sliding_window=16))


def token_rows(n=16, length=10, vocab=128, seed=1):
    """Rows of ids, masks and labels; the labels of the first two positions and of the padding are ignored."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(n):
        ids = torch.randint(3, vocab, (length,), generator=generator)
        mask = torch.ones_like(ids)
        mask[length - index % 4 :] = 0
        labels = ids.masked_fill(mask == 0, -100)
        labels[:2] = -100
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


def tokenizer():
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = sorted(set("".join(WORDS)) | set("usrantm\n"))
    bpe = trainers.BpeTrainer(vocab_size=120, special_tokens=special, initial_alphabet=alphabet)
    raw.train_from_iterator(WORDS, bpe)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )


def text_dataset(n=16):
    return Dataset.from_list([{"text": " ".join(WORDS[(i + k) % 4] for k in range(1 + i % 3))} for i in range(n)])


def completion_dataset(n=16):
    return Dataset.from_list([{"prompt": WORDS[i % 4] + " ", "completion": WORDS[(i + 1) % 4]} for i in range(n)])


def chat_dataset(n=16):
    turns = [
        [{"role": "user", "content": WORDS[i % 4]}, {"role": "assistant", "content": WORDS[(i + 1) % 4]}]
        for i in range(n)
    ]
    return Dataset.from_list([{"messages": messages} for messages in turns])


def logged(trainer):
    """The numbers of the log that a stock trainer has too."""
    own = ("per_second", "mfu", "memory_gib", "activations_gib", "labelled_share", "runtime", "preparation_time")
    own = (*own, "shared_share", "shared_levels", "perplexity")
    if isinstance(trainer, LigerTrainer):
        own = (*own, "eval_mean_token_accuracy")  # which TRL's trainers log themselves
    return [{k: v for k, v in log.items() if not k.endswith(own)} for log in trainer.state.log_history]
