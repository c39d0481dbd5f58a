"""What `liger_trainer.nn` exports takes Liger's arguments and defaults, but for parts of hybrids, which it lacks."""

import inspect

import pytest

from liger_trainer import nn
from liger_trainer.kernels.documents import ROWS

NORM = "eps=1e-06, offset=0.0, casting_mode='llama', init_fn='ones'"
GEMMA = "eps=1e-06, offset=1.0, casting_mode='gemma', init_fn='zeros'"
GEMMA4 = "eps=1e-06, offset=0.0, casting_mode='gemma', init_fn='ones', in_place=False, with_scale=True"
LOSS = (
    "ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction='mean', softcap=None, return_z_loss=False"
)
RETURNS = "return_token_accuracy=False, return_predicted_tokens=False"
HEADS = "student_input, student_weight, teacher_input, teacher_weight"

SIGNATURES = {  # of a function, or of a class and, where it takes more than one argument, of its forward
    "config": "LigerBlockSparseTop2MLP LigerFalconH1MLP LigerFalconH1SwiGLUMLP LigerMLP LigerPhi3SwiGLUMLP "
    "LigerSwiGLUMLPForMuseGlimmer",
    "config, intermediate_size=None": "LigerGEGLUMLP LigerQwen3MoeSwiGLUMLP LigerSwiGLUMLP",
    "config, layer_idx=None": "LigerGEGLUMLPForGemma4",
    "config, layer_idx=None, is_shared_mlp=False": "LigerHunyuanV1SwiGLUMLP",
    "config, num_shards=None": "LigerTiledGEGLUMLP LigerTiledSwiGLUMLP",
    "config | hidden_states, top_k_index, top_k_weights": "LigerExperts",
    "args, kwargs": "LigerReLUSquared LigerSoftmax",
    "dim=-1": "LigerSparsemax",
    f"channels, kernel_size, bias=False, activation=None, residual=False | x, documents={ROWS}": "LigerShortConv",
    f"channels, kernel_size, bias=False | bcx, documents={ROWS}": "LigerGatedShortConv",
    "hidden_size, eps=1e-06, group_size=None, activation='silu', gate_first=False, casting_mode='llama' | "
    "hidden_states, gate": "LigerGatedRMSNorm",
    "in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, groups=1, bias=True, "
    "sparse=False": "LigerMultiTokenAttention",
    "num_embeddings, embedding_dim, padding_idx=None": "LigerEmbedding",
    f"hidden_size, {NORM}, in_place=True, row_mode=None, elementwise_affine=True": "LigerRMSNorm",
    f"hidden_size, {NORM}, in_place=False, row_mode=None": "LigerRMSNormForOlmo2 LigerRMSNormForGlm4",
    f"hidden_size, {NORM}, in_place=False | hidden_states, residual": "LigerFusedAddRMSNorm",
    f"hidden_size, {NORM}, in_place=True, elementwise_affine=True | hidden_states, scale, "
    "shift=None": "LigerModulatedRMSNorm",
    f"hidden_size, {GEMMA}, in_place=True, row_mode=None": "LigerRMSNormForGemma LigerRMSNormForGemma2 "
    "LigerRMSNormForQwen3Next LigerRMSNormForMuseGlimmerTextCentered",
    f"dim, {GEMMA}, in_place=False": "LigerRMSNormForGemma3",
    f"dim, {GEMMA4}": "LigerRMSNormForGemma4",
    f"dim=None, {GEMMA4}": "LigerRMSNormForMuseGlimmer",
    "hidden_size, eps=1e-06, bias=False, init_fn='ones', impl=None, mode=None, backend=None": "LigerLayerNorm",
    "num_channels, num_groups, eps=1e-06, bias=False, init_fn='ones'": "LigerGroupNorm",
    "eps=1e-06, in_place=True": "LigerPolyNorm",
    "hidden_size, beta=True, init_alpha=0.5": "LigerDyT",
    f"weight=None, {LOSS}, {RETURNS} | _input, target": "LigerCrossEntropyLoss",
    f"ce_weight=None, {LOSS}, accum_dtype=None, use_token_scaling=False, {RETURNS} | lin_weight, _input, target, "
    "bias=None": "LigerFusedLinearCrossEntropyLoss",
    "ignore_index=-100, label_smoothing=0.0, reduction='none', label_smoothing_formula='pytorch', "
    "label_smoothing_mode='global' | vocab_parallel_logits, target, tp_group=None": "LigerVocabParallelCrossEntropy",
    f"jsd_beta=0.5, ignore_index=-100, temperature=1.0, accum_dtype=None | {HEADS}, "
    "shift_labels=None": "LigerFusedLinearJSD",
    "reduction='batchmean', ignore_index=-100, temperature=1.0, eps=1e-10, accum_dtype=None | student_input, "
    "student_weight, target, shift_labels=None": "LigerFusedLinearKLDivLoss",
    "weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True, "
    f"chunk_size=1024, return_soft_hard_loss=False | {HEADS}, true_labels, student_bias=None, "
    "teacher_bias=None": "LigerFusedLinearCosineSimilarityLoss LigerFusedLinearJSDLoss",
    "beta=0.5, ignore_index=-100 | log_q, log_p, shift_labels=None": "LigerJSD",
    "eps=1e-10, args, kwargs | y_pred, y_true": "LigerKLDIVLoss",
    "reduction='batchmean', ignore_index=-100 | p, q, shift_labels=None": "LigerTVDLoss",
    "ignore_index=-100 | student_logits, teacher_logits, target": "LigerFusedCETVDLoss",
    "xq, xk, freqs_cis": "liger_llama4_text_rotary_pos_emb",
    "query, key, freqs_ci": "liger_llama4_vision_rotary_pos_emb",
    "q, k, cos, sin, mrope_section, unsqueeze_dim=1": "liger_multimodal_rotary_pos_emb",
    "q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None": "liger_rotary_pos_emb",
    "q, k, cos, sin": "liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision",
    "logits, old_logp, ref_logp, completion_ids, advantages, completion_mask=None, temperature=0.9, beta=0.04, "
    "eps_low=0.2, eps_high=0.4, inplace=False, loss_type='dapo', max_completion_length=None, "
    "importance_sampling_level='token', reduce=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, "
    "vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, num_items_in_batch=None, vespo_k_pos=2.0, "
    "vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0": "triton_grpo_loss",
}


def arguments(function) -> list[str]:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    return [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]


@pytest.mark.parametrize("name", nn.__all__)
def test_signatures_are_ligers(name):
    item = getattr(nn, name)
    signature = ", ".join(arguments(item.__init__ if inspect.isclass(item) else item))
    if inspect.isclass(item) and len(arguments(item.forward)) > 1:
        signature += " | " + ", ".join(arguments(item.forward))
    assert name in SIGNATURES[signature].split()
