"""The hyper-parameters of a Llama model, from the metadata of its GGUF file."""

from __future__ import annotations

from dataclasses import dataclass

from hsswap.errors import ModelError
from hsswap.models.gguf_file import GgufFile

SUPPORTED_ARCHITECTURE = "llama"

# Metadata that changes the arithmetic in a way the forward pass does not do, with the value that
# changes nothing. Refused otherwise: to ignore one would give another model's answers.
_NEUTRAL: tuple[tuple[str, int | float | bool], ...] = (
    ("expert_count", 0),
    ("attention.causal", True),
    ("attention.clamp_kqv", 0.0),
    ("attention.max_alibi_bias", 0.0),
    ("attention.scale", 0.0),
    ("attention.sliding_window", 0),
    ("embedding_scale", 0.0),
    ("logit_scale", 0.0),
    ("residual_scale", 0.0),
    ("use_parallel_residual", False),
)
_ROPE_SCALINGS = ("none", "linear")


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of a Llama model.

    ``rope_dims`` is the count of leading dims of a head that are rotated, in adjacent pairs.
    ``rope_factor`` divides positions (linear scaling; 1 is none). ``context_tokens`` is the longest
    sequence. ``tied_embeddings``: the embedding is the output matrix too.
    """

    layers: int
    width: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    rope_base: float
    rope_dims: int
    rope_factor: float
    rms_eps: float
    context_tokens: int
    vocab_size: int
    tied_embeddings: bool


def read_config(file: GgufFile) -> LlamaConfig:
    """The hyper-parameters in ``file``.

    Raises ``ModelError`` if the architecture is not ``llama``, if a hyper-parameter is missing or
    impossible, or if one asks for what is not supported (it is named).
    """
    arch = file.get_str("general.architecture")
    if arch != SUPPORTED_ARCHITECTURE:
        raise ModelError(
            f"{file.path} has the architecture {arch!r}, and only {SUPPORTED_ARCHITECTURE!r} is "
            "supported; name a Llama-architecture GGUF"
        )
    _refuse_unsupported(file)
    width = _positive(file, "llama.embedding_length")
    q_heads = _positive(file, "llama.attention.head_count")
    kv_heads = _positive(file, "llama.attention.head_count_kv", q_heads)
    head_dim = _positive(file, "llama.attention.key_length", max(width // q_heads, 1))
    if _positive(file, "llama.attention.value_length", head_dim) != head_dim:
        raise _impossible(file, "attention.value_length differs from attention.key_length")
    if q_heads % kv_heads:
        raise _impossible(file, f"{q_heads} query heads do not divide by {kv_heads} KV heads")
    rope_dims = _positive(file, "llama.rope.dimension_count", head_dim)
    if rope_dims % 2 or rope_dims > head_dim:
        raise _impossible(file, f"{rope_dims} RoPE dims do not fit heads of {head_dim}")
    rms_eps = file.get_float("llama.attention.layer_norm_rms_epsilon")
    rope_base = file.get_float("llama.rope.freq_base", 10000.0)
    if not (0.0 < rms_eps < 1.0 and 1.0 < rope_base < float("inf")):
        raise _impossible(file, f"rms epsilon {rms_eps}, RoPE base {rope_base}")
    embedding = file.tensors.get("token_embd.weight")
    return LlamaConfig(
        layers=_positive(file, "llama.block_count"),
        width=width,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_width=_positive(file, "llama.feed_forward_length"),
        rope_base=rope_base,
        rope_dims=rope_dims,
        rope_factor=_rope_factor(file),
        rms_eps=rms_eps,
        context_tokens=_positive(file, "llama.context_length"),
        vocab_size=_positive(file, "llama.vocab_size", embedding.shape[0] if embedding else None),
        tied_embeddings="output.weight" not in file.tensors,
    )


def _refuse_unsupported(file: GgufFile) -> None:
    for name, neutral in _NEUTRAL:
        value = file.metadata.get(f"llama.{name}", neutral)
        if value != neutral:
            raise ModelError(
                f"{file.path}: llama.{name} = {value} is not supported; name another model"
            )


def _rope_factor(file: GgufFile) -> float:
    kind = file.get_str("llama.rope.scaling.type", "none")
    if kind not in _ROPE_SCALINGS:
        raise ModelError(
            f"{file.path}: RoPE scaling {kind!r} is not supported, only "
            f"{', '.join(_ROPE_SCALINGS)} and rope_freqs.weight; name another model"
        )
    # Files written before llama.cpp had scaling types carry linear scaling under this older key.
    factor = file.get_float("llama.rope.scale_linear", 1.0)
    if kind == "linear":
        factor = file.get_float("llama.rope.scaling.factor", factor)
    if not 0.0 < factor < float("inf"):
        raise _impossible(file, f"RoPE scaling factor {factor}")
    return factor


def _positive(file: GgufFile, key: str, default: int | None = None) -> int:
    if isinstance(file.metadata.get(key), list):
        raise ModelError(
            f"{file.path}: {key} differs between layers, which is not supported; name another model"
        )
    value = file.get_int(key, default)
    if value <= 0:
        raise _impossible(file, f"{key} = {value}")
    return value


def _impossible(file: GgufFile, what: str) -> ModelError:
    return ModelError(f"{file.path}: {what}, which is not supported; name another model")
