"""A tokenizer of bytes with a chat template, saved where a test wants it: no network, no model."""

from data.train_tiny_model import make_tokenizer


def save_chat_tokenizer(folder):
    """Save the tiny model's tokenizer to ``folder``, with the config AutoTokenizer needs; returns it."""
    from transformers import Qwen2Config

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    shape = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1)
    config = Qwen2Config(vocab_size=len(tokenizer), intermediate_size=64, max_position_embeddings=1024, **shape)
    config.save_pretrained(folder)
    return tokenizer
