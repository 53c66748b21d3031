"""What training needs, made by a test: a tokenizer of bytes with a chat template, and a parquet file. No network, no model."""

from dataclasses import replace

from data.prepare_parquet import parse_args
from data.train_tiny_model import make_tokenizer
from data.verl_parquet import to_parquet


def save_chat_tokenizer(folder):
    """Save the tiny model's tokenizer to ``folder``, with the config AutoTokenizer needs; returns it."""
    from transformers import Qwen2Config

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    shape = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1)
    config = Qwen2Config(vocab_size=len(tokenizer), intermediate_size=64, max_position_embeddings=1024, **shape)
    config.save_pretrained(folder)
    return tokenizer


def parquet(rows, split, data_source="arithmetic", reward="integer") -> bytes:
    """The bytes of a file that prepare_parquet.py would write of these rows."""
    return to_parquet(rows, split, replace(parse_args(["arithmetic"]), data_source=data_source, reward=reward))
