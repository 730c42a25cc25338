"""Every model class of mlx-lm, small, with random weights: sizes by the names of their fields, and what single ones need."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any, Final

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_map
from runs import loaded
from tiny import VOCAB

from detdiff.engines.mlx.model import LoadedModel

LAYERS: Final = 4
WINDOW: Final = 8

_SIZES: Final[dict[str, Any]] = {
    "hidden_size": 64, "num_hidden_layers": LAYERS, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "norm_eps": 1e-5, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_epsilon": 1e-5,
    "hidden_dim": 64, "num_layers": LAYERS, "num_heads": 4, "num_kv_heads": 2, "d_model": 64, "n_layers": LAYERS, "n_heads": 4,
    "model_dim": 64, "num_transformer_layers": LAYERS, "n_layer": LAYERS, "n_head": 4, "n_embd": 64, "n_positions": 512,
    "n_ctx": 512, "n_inner": 96, "num_vocab": VOCAB, "rotary_dim": 16,
    # mixtures of experts
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_shared_experts": 1, "num_local_experts": 4, "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2, "moe_top_k": 2, "share_expert_dim": 32,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_dense_layers": 1, "moe_router_topk": 2, "moe_topk": 2,
    "expert_ffn_hidden_size": 32, "ffn_hidden_size": 96, "zero_expert_num": 1, "zero_expert_type": "identity",
    "num_expert": 4, "moe_layer_freq": 1, "layer_group_size": 2, "group_norm_size": 1, "moe_num_shared_experts": 1,
    # latent attention
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "index_head_dim": 32, "index_n_heads": 2, "index_topk": 6,
    # windows
    "sliding_window": WINDOW, "sliding_window_size": WINDOW, "window_size": WINDOW, "attention_window_size": WINDOW,
    "sliding_window_pattern": 2, "attention_chunk_size": WINDOW, "conv_window": 2, "conv_L_cache": 3,
    # states
    "conv_kernel": 4, "ssm_state_size": 16, "state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16,
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_n_groups": 1,
    "mamba_step": 2, "n_groups": 1, "time_step_rank": 4, "conv_kernel_size": 4, "conv1d_width": 4,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "short_conv_kernel_size": 4, "full_attention_interval": 2, "mamba_expand": 2,
    "time_step_limit": (0.001, 100.0), "num_heads_mamba": 4,
    # switches and what else has no default
    "attention_bias": False, "mlp_bias": False, "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": False,
    "qk_norm": True, "use_qk_norm": True, "post_norm": False, "partial_rotary_factor": 0.5, "hidden_act": "silu",
    "rope_scaling": None, "use_qkv_bias": False, "mamba_proj_bias": False, "mup_base_width": 64, "moe_capacity": [],
    "query_pre_attn_scalar": 32, "rope_traditional": False, "interleave_moe_layer_step": 2,
}  # fmt: skip
"""Sizes by the names of fields, wherever a class has them."""

_ROPE: Final = {"rope_type": "default", "type": "default", "rope_theta": 10000.0}
_SCALED: Final = {**_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8, "factor": 1.0}
_MIXED: Final = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_HYBRID: Final = ["conv", "full_attention"] * (LAYERS // 2)
_GRANITE: Final = {
    "logits_scaling": 1.0, "attention_multiplier": 0.2, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
}  # fmt: skip
_KDA: Final = {
    "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4,
}  # fmt: skip
_WHOLE_HEADS: Final = {"head_dim": 16}
_OWN: Final[dict[str, dict[str, Any]]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": _MIXED},
    "baichuan_m1": {"sliding_window_layers": [0, 2]},
    "cohere2": _WHOLE_HEADS,
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}},
    "exaone": _WHOLE_HEADS,
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": _MIXED, "is_moe_layer": [False, True, False, True]},
    "gear": {"layer_types": _MIXED},
    "gemma3n": {
        "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB, "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": 30.0, "layer_types": _MIXED, "activation_sparsity_pattern": [0.0] * LAYERS,
        "hidden_size_per_layer_input": 16, "altup_num_inputs": 2, "altup_coef_clip": 120.0, "altup_correct_scale": True,
        "altup_active_idx": 0, "laurel_rank": 8,
    },
    "gemma4_text": {
        "global_head_dim": 32, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 2, "layer_types": _MIXED,
    },
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_parameters": _ROPE},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoehybrid": {**_GRANITE, "layer_types": ["mamba", "attention"] * (LAYERS // 2)},
    "hunyuan": {
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},"num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2},
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
    },
    "kimi_k3": {"linear_attn_config": _KDA, "num_experts": None, "hidden_act": "situ"},
    "kimi_linear": {"linear_attn_config": _KDA, "model_max_length": 512},
    "lfm2": {
        "conv_bias": False, "block_dim": 64, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False, "layer_types": _HYBRID,
    },
    "lfm2_moe": {"use_expert_bias": True, "conv_bias": False, "layer_types": _HYBRID},
    "lille-130m": {"block_size": 512, "n_kv_heads": 2},
    "llama4": {"intermediate_size_mlp": 96, "num_experts_per_tok": 1},
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {"attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "longcat_flash_ngram": {
        "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "ngram_vocab_size_ratio": 2,
    },
    "mellum": {"layer_types": _MIXED, "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE}},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0] * (LAYERS // 2), "moe_layer_freq": [0, 1, 1, 1], "topk_method": "noaux_tc",
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5, "swa_rope_theta": 10000.0, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "swa_head_dim": 32, "swa_v_head_dim": 32,
    },
    "minicpm": {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 1.0},
    "minicpm3": {
        "dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 1.0,
        "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "type": "longrope"},
    },
    "minimax_m3_vl": {
        "dense_intermediate_size": 96, "index_n_heads": 2, "index_head_dim": 32, "index_block_size": 4,
        "index_topk_blocks": 2, "moe_layer_freq": [0, 1, 1, 1], "sparse_attention_freq": [0, 1, 0, 1],
    },
    "ministral3": {"rope_parameters": _SCALED, "layer_types": _MIXED},
    "mistral4": {"rope_parameters": {**_SCALED, "mscale_all_dim": 0}},
    "muse_spark": {
        "post_norm_eps": 1e-5, "rope_parameters": _ROPE, "layer_rope_theta": [10000.0, 0] * (LAYERS // 2),
        "layer_types": _MIXED, "final_logit_softcapping": 20.0, "output_multiplier": 0.2, "moe_hidden_size": 64,
        "num_shared_experts": 0,
    },
    "nemotron-nas": {"block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}}] * LAYERS},
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "-", "M"]},
    "olmo_hybrid": {"linear_allow_neg_eigval": True, "layer_types": ["linear_attention", "full_attention"] * 2},
    "openelm": {
        "ffn_dim_divisor": 32, "num_query_heads": [4] * LAYERS, "num_kv_heads": [2] * LAYERS,
        "ffn_multipliers": [1.5] * LAYERS,
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2, "ff_intermediate_size": 96, "gegelu_limit": 20.0,
        "blocksparse_block_size": 32, "blocksparse_num_local_blocks": 2, "blocksparse_vert_stride": 2,
    },
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 16},
    "recurrent_gemma": {"logits_soft_cap": 30.0, "block_types": ["recurrent", "attention"]},
    "rwkv7": {"a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16, "decay_low_rank_dim": 16},
    "spark2_5": {"hidden_act": "gelu", "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE}, "layer_types": _MIXED},
    "step3p5": {"num_attention_groups": 2},
}  # fmt: skip
"""What single classes need beside or instead of the common sizes."""

_INSIDE: Final[dict[str, tuple[str, str]]] = {
    "gemma3": ("gemma3_text", "ModelArgs"), "gemma3n": ("gemma3n", "TextConfig"), "gemma4": ("gemma4_text", "ModelArgs"),
    "kimi_k25": ("kimi_k25", "TextConfig"), "kimi_k3": ("kimi_k3", "TextArgs"), "kimi_vl": ("kimi_vl", "TextArgs"),
    "lfm2-vl": ("lfm2", "ModelArgs"), "llama4": ("llama4", "TextArgs"), "minimax_m3_vl": ("minimax_m3_vl", "TextArgs"),
    "mistral3": ("llama", "ModelArgs"), "muse_spark": ("muse_spark", "TextArgs"), "pixtral": ("llama", "ModelArgs"),
    "qwen2_vl": ("qwen2", "ModelArgs"), "qwen3_5": ("qwen3_5", "TextModelArgs"),
    "qwen3_5_moe": ("qwen3_5", "TextModelArgs"), "qwen3_vl": ("qwen3", "ModelArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
}  # fmt: skip
"""Where the arguments of the language model are that a class wraps."""

NOT_BUILT: Final[dict[str, str]] = {
    "bitnet": "its linear layers have a kernel for Metal alone",
    "muse_spark": "it rotates queries and keys by a kernel for Metal alone",
    "olmo": "importing it ends the process where the package ai2-olmo is not installed",
    "phi3small": "with MLX 0.32.4 on a CPU mlx-lm's own runs of it, without detdiff, end the process by corrupting its memory",
    "prism_hadamard_qwen35": "it takes packs of 2-bit weights with their manifest alone, and has no form without",
}
"""Why a class is not built, in one line."""


def names() -> list[str]:
    """The modules of ``mlx_lm.models`` that have a model, in order."""
    found = []
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        try:
            have = vars(importlib.import_module(f"mlx_lm.models.{module.name}"))
        except (ImportError, SystemExit):
            found.append(module.name)
            continue
        if "Model" in have and "ModelArgs" in have:
            found.append(module.name)
    return sorted(found)


def config(name: str) -> dict[str, Any]:
    """The small configuration of a class: the common sizes of the fields that it has, and its own."""
    home, args = _INSIDE.get(name, (name, "ModelArgs"))
    fields = {
        f.name for f in dataclasses.fields(getattr(importlib.import_module(f"mlx_lm.models.{home}"), args))
    }
    sizes = {key: value for key, value in _SIZES.items() if key in fields}
    text = {**sizes, "model_type": home, **_OWN.get(home, {}), **_OWN.get(name, {})}
    return {"model_type": name, "vocab_size": VOCAB, "text_config": text} if name in _INSIDE else text


def build(name: str, seed: int = 0, **changes: Any) -> LoadedModel:
    """A small random model of the class in ``mlx_lm.models.name``; ``changes`` replace fields of its configuration."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    given = {**config(name), **changes}
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(given))
    # Larger than the default initialisation, as in tiny.py; float32, since some classes make parameters in other dtypes.
    model.update(tree_map(_spread, model.parameters()))
    return loaded(model, name, given)


def _spread(parameter: mx.array) -> mx.array:
    if not mx.issubdtype(parameter.dtype, mx.floating):
        return parameter
    parameter = parameter.astype(mx.float32)
    if not bool(mx.any(parameter)):
        return 0.3 * mx.random.normal(parameter.shape)  # what begins as zero would hide what it multiplies
    return parameter * 2.5 if parameter.ndim == 2 else parameter
