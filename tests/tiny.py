"""Tiny random models of every supported family: seconds to make, no download, no tokenizer."""

import torch
import transformers as t

SHAPE = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256
)


def tiny_config(family: str):
    match family:
        case "llama":
            return t.LlamaConfig(**SHAPE)
        case "qwen2":
            return t.Qwen2Config(**SHAPE, use_sliding_window=False)
        case "qwen3":  # head_dim is not hidden_size / num_attention_heads
            return t.Qwen3Config(**{**SHAPE, "num_attention_heads": 8}, head_dim=12)
        case "mistral":
            return t.MistralConfig(**SHAPE, sliding_window=6)
        case "gemma2":
            return t.Gemma2Config(**SHAPE, head_dim=12, query_pre_attn_scalar=12, sliding_window=6, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
        case "gemma3":
            return t.Gemma3TextConfig(
                **SHAPE,
                head_dim=12,
                query_pre_attn_scalar=12,
                sliding_window=6,
                layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            )
        case "gpt2":
            return t.GPT2Config(vocab_size=97, n_embd=32, n_layer=4, n_head=4, n_positions=256)
    raise KeyError(family)


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt2")


def tiny_hf(family: str, seed: int = 0, dtype: torch.dtype = torch.float32):
    """A random model with weights large enough that heads matter (the default init of 0.02 leaves effects near rounding)."""
    torch.manual_seed(seed)
    model = t.AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="eager").eval()
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.05))
    return model.to(dtype)
