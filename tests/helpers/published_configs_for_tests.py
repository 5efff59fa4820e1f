"""The config.json of much used models of the families that weft reads, as their makers publish them, by name.

Retyped, without what says only where a file comes from (_name_or_path, transformers_version, torch_dtype), which are
added alike to all. `READ` has the models that weft reads with their number of parameters in millions, rounded to three
digits; `REFUSED` has the others with the part of the message that says why.
"""

from __future__ import annotations

from typing import Any

Table = dict[str, Any]
_SOURCE = {"_name_or_path": "model", "torch_dtype": "bfloat16", "transformers_version": "4.44.0", "use_cache": True}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
_HEADS = ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")


def _decoder(kind: str, model_type: str, eps: float, *sizes: int, **others: Any) -> Table:
    of_sizes = dict(zip((*_SIZES, *_HEADS), sizes, strict=True))
    common = {
        "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": eps, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    table = {"architectures": [f"{kind}ForCausalLM"], "model_type": model_type, **common, **of_sizes}
    return {**_SOURCE, **table, "tie_word_embeddings": False, **others}


def llama(*sizes: int, **others: Any) -> Table:
    given = {"pretraining_tp": 1, "rope_scaling": None, "attention_bias": False, "attention_dropout": 0.0}
    return _decoder("Llama", "llama", 1e-5, *sizes, **{**given, **others})


def llama_3(*sizes: int, factor: float = 8.0, **others: Any) -> Table:
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = {"rope_theta": 5e5, "rope_scaling": {"factor": factor, **scaling, "rope_type": "llama3"}}
    ends = {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "mlp_bias": False}
    return llama(*sizes, **{**rope, **ends, **others})


def mistral(*sizes: int, **others: Any) -> Table:
    return _decoder("Mistral", "mistral", 1e-5, *sizes, **{"sliding_window": None, "attention_dropout": 0.0, **others})


def mixtral(*sizes: int, **others: Any) -> Table:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
    given = {"sliding_window": None, "attention_dropout": 0.0, "output_router_logits": False, "rope_theta": 1e6}
    return _decoder("Mixtral", "mixtral", 1e-5, *sizes, **{**experts, **given, **others})


def qwen(kind: str, *sizes: int, **others: Any) -> Table:
    model_type = {"Qwen2": "qwen2", "Qwen3": "qwen3", "Qwen2Moe": "qwen2_moe", "Qwen3Moe": "qwen3_moe"}[kind]
    window = {"use_sliding_window": False, "sliding_window": sizes[-1], "max_window_layers": sizes[3]}
    given = {"attention_dropout": 0.0, "rope_theta": 1e6, "bos_token_id": 151643, "eos_token_id": 151645, **window}
    if kind.startswith("Qwen3"):
        given |= {"head_dim": 128, "attention_bias": False, "rope_scaling": None, "sliding_window": None}
    if kind.endswith("Moe"):
        given |= {"decoder_sparse_step": 1, "output_router_logits": False, "router_aux_loss_coef": 0.001}
    return _decoder(kind, model_type, 1e-6, *sizes, **{**given, **others})


def gpt2(n_embd: int, n_layer: int, n_head: int, **others: Any) -> Table:
    sizes = {"n_embd": n_embd, "n_layer": n_layer, "n_head": n_head, "n_ctx": 1024, "n_positions": 1024}
    drop = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "layer_norm_epsilon": 1e-5}
    summary = {"summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True}
    table = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new", **sizes}
    tokens = {"vocab_size": 50257, "bos_token_id": 50256, "eos_token_id": 50256, "initializer_range": 0.02}
    text = {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}
    return {
        **table, **drop, **summary, "summary_type": "cls_index", "summary_use_proj": True, **tokens, **text,
        **others,
    }  # fmt: skip


_LABELS = {"_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "gradient_checkpointing": False}
_SMOLLM2 = {"is_llama_config": True, "rope_interleaved": False, "rope_theta": 100000, "tie_word_embeddings": True}
_JS = {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}}
_TIED = {"tie_word_embeddings": True}
_BASE = {"use_mrope": False, "eos_token_id": 151643}
_CODER = {
    "qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0, "router_aux_loss_coef": 0.0,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "mlp_only_layers": [], "rope_theta": 1e7, "head_dim": 128,
}  # fmt: skip
_A3B = {
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "mlp_only_layers": [],
}  # fmt: skip
_GPTQ = {
    "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01,
    "dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128,
    "max_input_length": None, "model_seqlen": None, "module_name_preceding_first_block": None,
    "modules_in_block_to_quantize": None, "pad_token_id": None, "quant_method": "gptq", "sym": True,
    "tokenizer": None, "true_sequential": True, "use_cuda_fp16": False, "use_exllama": True,
}  # fmt: skip
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_CHUNKS = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
_LLAMA_8B = (128256, 4096, 14336, 32, 32, 8)
_QWEN_7B = (152064, 3584, 18944, 28, 28, 4)

READ: dict[str, tuple[float, Table]] = {
    "huggyllama/llama-7b": (
        6740,
        llama(32000, 4096, 11008, 32, 32, 32, 2048, rms_norm_eps=1e-6, max_sequence_length=2048, pad_token_id=0),
    ),
    "meta-llama/Llama-2-7b-hf": (6740, llama(32000, 4096, 11008, 32, 32, 32, 4096)),
    "meta-llama/Llama-2-13b-chat-hf": (13000, llama(32000, 5120, 13824, 40, 40, 40, 4096)),
    "meta-llama/Llama-2-70b-hf": (69000, llama(32000, 8192, 28672, 80, 64, 8, 4096)),
    "meta-llama/Meta-Llama-3-8B": (8030, llama(*_LLAMA_8B, 8192, rope_theta=5e5, eos_token_id=128001)),
    "meta-llama/Meta-Llama-3-70B-Instruct": (70600, llama(128256, 8192, 28672, 80, 64, 8, 8192, rope_theta=5e5)),
    "meta-llama/Llama-3.1-8B-Instruct": (8030, llama_3(*_LLAMA_8B, 131072)),
    "meta-llama/Llama-3.1-405B": (406000, llama_3(128256, 16384, 53248, 126, 128, 8, 131072)),
    "meta-llama/Llama-3.2-1B": (
        1240,
        llama_3(128256, 2048, 8192, 16, 32, 8, 131072, factor=32.0, head_dim=64, **_TIED),
    ),
    "meta-llama/Llama-3.2-3B-Instruct": (
        3210,
        llama_3(128256, 3072, 8192, 28, 24, 8, 131072, factor=32.0, head_dim=128, **_TIED),
    ),
    "meta-llama/Llama-3.3-70B-Instruct": (70600, llama_3(128256, 8192, 28672, 80, 64, 8, 131072, head_dim=128)),
    "unsloth/Llama-3.2-1B-Instruct": (
        1240,
        llama_3(
            *(128256, 2048, 8192, 16, 32, 8, 131072),
            **{"factor": 32.0, "head_dim": 64, "pad_token_id": 128004, "unsloth_fixed": True, **_TIED},
        ),
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": (8030, llama_3(*_LLAMA_8B, 131072, eos_token_id=128001)),
    "NousResearch/Hermes-3-Llama-3.1-8B": (8030, llama_3(*_LLAMA_8B, 131072, eos_token_id=128040)),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (1100, llama(32000, 2048, 5632, 22, 32, 4, 2048, rope_theta=10000.0)),
    "lmsys/vicuna-7b-v1.5": (6740, llama(32000, 4096, 11008, 32, 32, 32, 4096, pad_token_id=0)),
    "codellama/CodeLlama-7b-hf": (6740, llama(32016, 4096, 11008, 32, 32, 32, 16384, rope_theta=1000000)),
    "openlm-research/open_llama_3b_v2": (3430, llama(32000, 3200, 8640, 26, 32, 32, 2048, rms_norm_eps=1e-6)),
    "01-ai/Yi-1.5-6B-Chat": (6060, llama(64000, 4096, 11008, 32, 32, 4, 4096, rope_theta=5e6, rms_norm_eps=1e-6)),
    "01-ai/Yi-1.5-34B": (34400, llama(64000, 7168, 20480, 60, 56, 8, 4096, rope_theta=5e6, rms_norm_eps=1e-6)),
    "upstage/SOLAR-10.7B-v1.0": (10700, llama(32000, 4096, 14336, 48, 32, 8, 4096, rope_theta=10000.0)),
    "deepseek-ai/deepseek-llm-7b-base": (6910, llama(102400, 4096, 11008, 30, 32, 32, 4096, rms_norm_eps=1e-6)),
    "HuggingFaceTB/SmolLM-135M": (135, llama(49152, 576, 1536, 30, 9, 3, 2048, rope_theta=10000.0, **_TIED)),
    "HuggingFaceTB/SmolLM2-135M": (135, llama(49152, 576, 1536, 30, 9, 3, 8192, **_SMOLLM2)),
    "HuggingFaceTB/SmolLM2-360M-Instruct": (362, llama(49152, 960, 2560, 32, 15, 5, 8192, **_SMOLLM2, **_JS)),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (
        1710,
        llama(49152, 2048, 8192, 24, 32, 32, 8192, rope_theta=130000, tie_word_embeddings=True, **_JS),
    ),
    "mistralai/Mistral-7B-v0.1": (7240, mistral(32000, 4096, 14336, 32, 32, 8, 32768, sliding_window=4096)),
    "mistralai/Mistral-7B-Instruct-v0.2": (7240, mistral(32000, 4096, 14336, 32, 32, 8, 32768, rope_theta=1e6)),
    "mistralai/Mistral-7B-Instruct-v0.3": (7250, mistral(32768, 4096, 14336, 32, 32, 8, 32768, rope_theta=1e6)),
    "mistralai/Mistral-Nemo-Instruct-2407": (
        12200,
        mistral(131072, 5120, 14336, 40, 32, 8, 1024000, rope_theta=1e6, head_dim=128),
    ),
    "mistralai/Mistral-Small-24B-Instruct-2501": (
        23600,
        mistral(131072, 5120, 32768, 40, 32, 8, 32768, rope_theta=1e8, head_dim=128),
    ),
    "HuggingFaceH4/zephyr-7b-beta": (
        7240,
        mistral(32000, 4096, 14336, 32, 32, 8, 32768, sliding_window=4096, pad_token_id=2),
    ),
    "teknium/OpenHermes-2.5-Mistral-7B": (7240, mistral(32002, 4096, 14336, 32, 32, 8, 32768, sliding_window=4096)),
    "openchat/openchat-3.5-0106": (7240, mistral(32002, 4096, 14336, 32, 32, 8, 8192, sliding_window=4096)),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (46700, mixtral(32000, 4096, 14336, 32, 32, 8, 32768)),
    "mistralai/Mixtral-8x22B-v0.1": (141000, mixtral(32000, 6144, 16384, 56, 48, 8, 65536)),
    "Qwen/Qwen1.5-0.5B-Chat": (464, qwen("Qwen2", 151936, 1024, 2816, 24, 16, 16, 32768, **_TIED)),
    "Qwen/Qwen2-0.5B": (494, qwen("Qwen2", 151936, 896, 4864, 24, 14, 2, 131072, **_TIED)),
    "Qwen/Qwen2-7B-Instruct": (7620, qwen("Qwen2", *_QWEN_7B, 32768)),
    "Qwen/Qwen2.5-0.5B": (494, qwen("Qwen2", 151936, 896, 4864, 24, 14, 2, 32768, **_TIED, **_BASE)),
    "Qwen/Qwen2.5-0.5B-Instruct": (494, qwen("Qwen2", 151936, 896, 4864, 24, 14, 2, 32768, **_TIED)),
    "Qwen/Qwen2.5-1.5B": (1540, qwen("Qwen2", 151936, 1536, 8960, 28, 12, 2, 131072, **_TIED, **_BASE)),
    "Qwen/Qwen2.5-3B-Instruct": (3090, qwen("Qwen2", 151936, 2048, 11008, 36, 16, 2, 32768, **_TIED)),
    "Qwen/Qwen2.5-7B": (7620, qwen("Qwen2", *_QWEN_7B, 131072, **_BASE)),
    "Qwen/Qwen2.5-Coder-7B-Instruct": (7620, qwen("Qwen2", *_QWEN_7B, 32768)),
    "Qwen/Qwen2.5-Math-7B": (7620, qwen("Qwen2", *_QWEN_7B, 4096, rope_theta=10000)),
    "Qwen/Qwen2.5-72B-Instruct": (72700, qwen("Qwen2", 152064, 8192, 29568, 80, 64, 8, 32768)),
    "Qwen/QwQ-32B": (32800, qwen("Qwen2", 152064, 5120, 27648, 64, 40, 8, 40960, sliding_window=32768)),
    "Qwen/Qwen2.5-0.5B-Instruct-GPTQ-Int4": (
        494,
        qwen("Qwen2", 151936, 896, 4864, 24, 14, 2, 32768, **_TIED, quantization_config=_GPTQ),
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (
        1780,
        qwen("Qwen2", 151936, 1536, 8960, 28, 12, 2, 131072, sliding_window=4096, rope_theta=10000, use_mrope=False),
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        14300,
        qwen(
            *("Qwen2Moe", 151936, 2048, 5632, 24, 16, 16, 8192),
            num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408, norm_topk_prob=False,
            shared_expert_intermediate_size=5632,
        ),
    ),
    "Qwen/Qwen3-0.6B": (596, qwen("Qwen3", 151936, 1024, 3072, 28, 16, 8, 40960, **_TIED)),
    "Qwen/Qwen3-4B-Instruct-2507": (4020, qwen("Qwen3", 151936, 2560, 9728, 36, 32, 8, 262144, **_TIED)),
    "Qwen/Qwen3-8B": (8190, qwen("Qwen3", 151936, 4096, 12288, 36, 32, 8, 40960)),
    "Qwen/Qwen3-32B": (32800, qwen("Qwen3", 151936, 5120, 25600, 64, 64, 8, 40960)),
    "Qwen/Qwen3-30B-A3B": (30500, qwen("Qwen3Moe", 151936, 2048, 6144, 48, 32, 4, 40960, **_A3B)),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (30500, qwen("Qwen3Moe", 151936, 2048, 5472, 48, 32, 4, 262144, **_CODER)),
    "openai-community/gpt2": (124, gpt2(768, 12, 12)),
    "openai-community/gpt2-medium": (355, gpt2(1024, 24, 16, n_special=0, predict_special_tokens=True)),
    "openai-community/gpt2-xl": (1560, gpt2(1600, 48, 25, output_past=True)),
    "distilbert/distilgpt2": (81.9, gpt2(768, 6, 12, **_LABELS)),
    "microsoft/DialoGPT-medium": (355, gpt2(1024, 24, 16)),
    "uer/gpt2-chinese-cluecorpussmall": (102, gpt2(768, 12, 12, vocab_size=21128, tokenizer_class="BertTokenizer")),
}  # fmt: skip
REFUSED: dict[str, tuple[str, Table]] = {
    "deepseek-ai/deepseek-coder-6.7b-instruct": (
        "rope_scaling.rope_type = 'linear' is not supported",
        llama(32256, 4096, 11008, 32, 32, 32, 16384, rope_theta=1e5, rope_scaling={"factor": 4.0, "type": "linear"}),
    ),
    "unsloth/Llama-3.2-1B-bnb-4bit": (
        "quant_method = 'bitsandbytes' is not read",
        llama_3(128256, 2048, 8192, 16, 32, 8, 131072, factor=32.0, head_dim=64, **_TIED, quantization_config=_BNB),
    ),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": (
        "quant_method = 'awq' is not read",
        qwen("Qwen2", *_QWEN_7B, 32768, quantization_config=_AWQ),
    ),
    "Qwen/Qwen3-8B-FP8": (
        "quant_method = 'fp8' is not read",
        qwen("Qwen3", 151936, 4096, 12288, 36, 32, 8, 40960, quantization_config=_FP8),
    ),
    "Qwen/Qwen2.5-7B-Instruct-1M": (  # attention over chunks, which transformers leaves out
        "key 'dual_chunk_attention_config' = .* is unknown .* null is fine",
        qwen("Qwen2", *_QWEN_7B, 1010000, dual_chunk_attention_config=_CHUNKS),
    ),
    "cerebras/Cerebras-GPT-111M": (
        "activation_function = 'gelu' is not supported in architecture 'gpt2', only 'gelu_new'",
        gpt2(768, 10, 12, activation_function="gelu", n_inner=3072),
    ),
    "stanford-crfm/alias-gpt2-small-x21": (
        "scale_attn_by_inverse_layer_idx = True is not supported in architecture 'gpt2', only False",
        gpt2(768, 12, 12, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
    ),
    "deepseek-ai/DeepSeek-V3": (
        r"architectures = \['DeepseekV3ForCausalLM'\] is not supported; weft reads",
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "quantization_config": _FP8},
    ),
}
