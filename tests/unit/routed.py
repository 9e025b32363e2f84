"""Tiny models with experts, with pairwise different sizes; see `tiny`.

E=5 experts, 3 of them for a token, M=14 width of an expert; gpt_oss: 4 layers in cycles of 2, window 5.
"""

MIXTRAL = {
  "decoder_block": "mixtral", "num_experts": 5, "num_experts_per_tok": 3, "base_moe_mlp_dim": 14,
  "norm_topk_prob": False, "base_num_decoder_layers": 2,
}  # fmt: skip
GPT_OSS = {
  "decoder_block": "gpt_oss", "num_experts": 5, "num_experts_per_tok": 3, "base_moe_mlp_dim": 14,
  "base_num_decoder_layers": 4, "inhomogeneous_layer_cycle_interval": 2, "attention_type": ("local_sliding", "global"),
  "sliding_window_size": 5, "attention_sink": True, "attention_bias": True, "mlp_bias": True,
  "mlp_activations": ("quick_gelu", "one_plus"), "mlp_activations_limit": 0.1, "rope_type": "yarn", "rope_factor": 6.0,
  "beta_fast": 8.0, "original_max_position_embeddings": 64, "rope_truncate": False,
}  # fmt: skip
FLOAT64 = {"dtype": "float64", "weight_dtype": "float64"}
