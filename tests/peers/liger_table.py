"""Which of Liger's tests apply to liger_trainer, and which of those differ, each with its reason."""

from __future__ import annotations

import dataclasses
import re

VERSION = "0.8.5"

_TRANSFORMERS = (
    *("cross_entropy", "dyt", "embedding", "fused_add_rms_norm", "fused_ce_tvd", "fused_linear_cross_entropy"),
    *("fused_linear_jsd", "fused_linear_kl_div", "fused_moe", "geglu", "group_norm", "grpo_loss", "jsd", "kl_div"),
    *("layer_norm", "llama4_rope", "mlp", "modulated_rms_norm", "multi_token_attention", "poly_norm"),
    *("qwen2vl_mrope", "relu_squared", "rms_norm", "rope", "selective_log_softmax_strides", "softmax", "sparsemax"),
    *("swiglu", "tiled_mlp", "transformers", "tvd"),
)
FILES = (
    *(f"chunked_loss/test_{name}_loss.py" for name in ("cosine", "cpo", "dpo", "grpo", "jsd", "kto", "orpo", "simpo")),
    "ops/test_norm_lora_parity.py",
    *(f"transformers/test_{name}.py" for name in _TRANSFORMERS),
)

# Every other test file of Liger's: what is under this path does not apply, and why.
NOT_APPLICABLE = {
    "backends": "Liger's registry of backends",
    "convergence": "no unit tests: they compare whole trainings with models that Liger has rewritten",
    "cute": "Liger's CuTe kernels",
    "cutedsl": "Liger's CuTe DSL backend",
    "cutile": "Liger's cuTile backend",
    "megatron": "Megatron, which is no part of the Hugging Face stack",
    "ops": "dispatches among Liger's backends",
    "triton": "the cache manager of Liger's kernels",
    "transformers/test_attn_res.py": "attention over depth, which no supported model has",
    "transformers/test_auto_model.py": "mocks Liger's table of functions",
    "transformers/test_flex_attention.py": "torch's flex attention, without a name of Liger's",
    "transformers/test_fused_linear_scaled_cross_entropy.py": "chooses among Liger's backends",
    "transformers/test_fused_linear_selected_log_probs.py": "Liger's cuTile and CuTe DSL backends",
    "transformers/test_fused_neighborhood_attention.py": "neighbourhood attention, which no supported model has",
    "transformers/test_llama4.py": "asserts which objects Liger binds",
    "transformers/test_mhc.py": "hyper-connections, which no supported model has",
    "transformers/test_mm_int8int2.py": "an experimental matmul of 2-bit weights",
    "transformers/test_monkey_patch.py": "asserts which objects Liger binds",
    "transformers/test_muse_glimmer.py": "asserts which objects Liger binds",
    "transformers/test_trainer_integration.py": "a private name of Liger's",
    "transformers/test_utils.py": "how Liger finds the device",
}


# Single tests of `FILES` that do not apply.
TESTS_NOT_APPLICABLE = {
    "test_cosine_hard_loss_computed_only_when_used": "counts calls of torch's nll_loss",
    "test_jsd_hard_loss_computed_only_when_used": "counts calls of torch's nll_loss",
    "test_swiglu_blackwell_tiled_matches_original": "chooses among Liger's kernels",
    "test_dtensor_rms_norm": "needs 8 GPUs, and its processes would load Liger's own names",
    "test_misaligned_intermediate_size_not_supported": "Liger's TMA fails at that size, ours has none",
    "test_selective_logprob_backward_skips_frozen_params": "calls private functions of Liger's",
    "test_transformers_swiglu_preserves_legacy_function": "chooses among Liger's backends",
    "test_dtensor_liger_silumul": "needs 8 GPUs, and its processes would load Liger's own names",
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """A group of tests that fail on liger_trainer on purpose."""

    pattern: str
    reason: str
    device: str | None = None

    def matches(self, nodeid: str, device: str) -> bool:
        """Whether the test `nodeid`, run on `device`, is one of them."""
        return self.device in (None, device) and re.search(self.pattern, nodeid) is not None


DIFFERENCES = (
    Difference(
        r"test_(jsd.py::test_correctness.*dtype1-1e-07|cross_entropy.py::test_correctness_with_(softcap|weight).*dtype1-1e-08)",
        "fp32 within 6e-6, as exponentials and logarithms are approximate instructions; the tests allow 1e-6",
        device="cuda",
    ),
    Difference(
        "test_correctness_with_out_of_bounds_target", "a label out of range is NaN, not an error", device="cuda"
    ),
    Difference(
        "test_geglu.py::test_correctness.*dtype1",
        "the test rounds the product to bf16 before it multiplies on; a kernel of ours has 0.7 of that error",
        device="cuda",
    ),
    Difference(r"test_orpo_loss.py::test_correctness\[", "`nll_target` has to agree with `target` where both count"),
    Difference(
        "test_grpo_loss.py::test_functional_correctness", "passes False as a temperature of SAPO, which is refused"
    ),
    Difference(
        "test_ref_per_token_logps_preferred_over_ref_input", "they are preferred without a warning, as the docs say"
    ),
    Difference("test_(label_smoothing_validation|invalid_loss_type|invalid_reduction)$", "other words in a ValueError"),
    Difference("test_fused_ce_tvd.py::test_shape_validation", "takes any leading dimensions; other words"),
    Difference(
        "test_modulated_rms_norm.py::test_correctness.*dtype1",
        "the test sums its bf16 weight gradient in bf16, 0.28 from float64's; a kernel of ours rounds once",
    ),
    Difference(
        "test_(fused_add_)?rms_norm_lora_parity.*True-dtype1",
        "the test rounds every product of its bf16 weight gradient before the sum; ours rounds the sum once",
    ),
    Difference(
        "test_grpo_loss.py::test_correctness.*sequence-luspo-True",
        "the test counts the KL term of masked tokens; ours, as TRL's, does not",
    ),
    Difference(
        r"test_layer_norm.py::test_liger_layer_norm\[dtype1",
        "torch's bf16 weight gradient on the CPU is three to four times as far from float64's as ours",
        device="cpu",
    ),
    Difference(
        r"test_poly_norm.py::test_correctness\[dtype1",
        "the test computes in bf16 throughout; its weight gradient is 3 off at 50, ours 0.02",
        device="cpu",
    ),
    Difference(
        r"test_fused_linear_kl_div.py::test_amp\[",
        "the test rounds the logits to bf16; its gradient is 0.039 from float64's, ours 0.010",
        device="cpu",
    ),
    Difference("test_(triton_)?sequence_level_rejects_unsupported_loss_types", "other words in a ValueError"),
    Difference(
        "test_torch_compile_matches_eager", "plain torch, which the compiler may fuse and round otherwise", device="cpu"
    ),
)
