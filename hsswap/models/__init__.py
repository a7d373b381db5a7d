"""Llama-architecture models in NumPy, whose attention is done by whoever holds the KV cache.

``open_gguf`` reads a file's header; ``Llama.from_gguf`` and ``Tokenizer.from_gguf`` make the model
and the tokenizer from it; :mod:`hsswap.models.torch_llama` has the same model in torch, for GPUs.
``PlainAttention`` is the baseline with everything in memory. Files are
read with the packages ``gguf`` and ``tokenizers`` (extra ``demo``), imported on first use.
"""

from hsswap.models.arrays import Arrays, HostArrays
from hsswap.models.config import LlamaConfig, read_config
from hsswap.models.gguf_file import GgufFile, default_model_path, open_gguf
from hsswap.models.llama import Attention, Llama, TokenIds
from hsswap.models.llama_weights import read_rope_factors
from hsswap.models.plain import PlainAttention
from hsswap.models.tokenizer import TextStream, Tokenizer

__all__ = [
    "Arrays",
    "Attention",
    "GgufFile",
    "HostArrays",
    "Llama",
    "LlamaConfig",
    "PlainAttention",
    "TextStream",
    "TokenIds",
    "Tokenizer",
    "default_model_path",
    "open_gguf",
    "read_config",
    "read_rope_factors",
]
