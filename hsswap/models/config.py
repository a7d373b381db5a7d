"""The hyper-parameters of a Llama or a Gemma 3, from the metadata of its GGUF file."""

from __future__ import annotations

from dataclasses import dataclass

from hsswap.errors import ModelError
from hsswap.models.gguf_file import GgufFile

SUPPORTED_ARCHITECTURES = ("llama", "gemma3")

# What llama.cpp (src/llama-model.cpp) fixes for Gemma 3, whose files do not say it: every sixth
# layer sees all tokens, and the others' RoPE has a base of its own.
_GEMMA3_GLOBAL_EVERY = 6
_GEMMA3_LOCAL_ROPE_BASE = 10000.0
_GEMMA3_27B_LAYERS = 62
"""Of the one whose logits have another scale."""

# Metadata that changes the arithmetic in a way the forward pass does not do, with the value that
# changes nothing. Refused otherwise: to ignore one would give another model's answers.
_NEUTRAL: tuple[tuple[str, int | float | bool], ...] = (
    ("expert_count", 0),
    ("attention.causal", True),
    ("attention.clamp_kqv", 0.0),
    ("attention.max_alibi_bias", 0.0),
    ("attention.scale", 0.0),
    ("embedding_scale", 0.0),
    ("logit_scale", 0.0),
    ("residual_scale", 0.0),
    ("use_parallel_residual", False),
    ("attn_logit_softcapping", 0.0),
    ("final_logit_softcapping", 0.0),
)
_ROPE_SCALINGS = ("none", "linear")


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of a Llama model.

    ``rope_dims`` is the count of leading dims of a head that are rotated, in adjacent pairs.
    ``rope_factor`` divides positions (linear scaling; 1 is none). ``context_tokens`` is the longest
    sequence. ``tied_embeddings``: the embedding is the output matrix too. ``is_gemma3``: norms of
    queries and keys and behind both halves of a layer, GELU, embeddings times the root of the
    width; layers but every sixth see the last ``window`` tokens, with a RoPE of their own.
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
    is_gemma3: bool = False
    window: int | None = None

    def window_of(self, layer: int) -> int | None:
        """The last tokens that a layer sees, its own row's included; None: all."""
        is_global = (layer + 1) % _GEMMA3_GLOBAL_EVERY == 0
        return None if is_global else self.window

    def rope_of(self, layer: int) -> tuple[float, float]:
        """Base of a layer's RoPE, and what divides positions."""
        if self.window_of(layer) is None:
            return self.rope_base, self.rope_factor
        return _GEMMA3_LOCAL_ROPE_BASE, 1.0


def read_config(file: GgufFile) -> LlamaConfig:
    """The hyper-parameters in ``file``.

    Raises ``ModelError`` if the architecture is not supported, if a hyper-parameter is missing or
    impossible, or if one asks for what is not supported (it is named).
    """
    arch = file.get_str("general.architecture")
    if arch not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"{file.path} has the architecture {arch!r}, and only "
            f"{' and '.join(map(repr, SUPPORTED_ARCHITECTURES))} are supported; name such a GGUF"
        )
    is_gemma3 = arch == "gemma3"
    _refuse_unsupported(file, arch)
    window = file.get_int(f"{arch}.attention.sliding_window", 0)
    if (window > 0) != is_gemma3:
        raise _unsupported(file, f"{arch}.attention.sliding_window", window)
    width = _positive(file, f"{arch}.embedding_length")
    q_heads = _positive(file, f"{arch}.attention.head_count")
    kv_heads = _positive(file, f"{arch}.attention.head_count_kv", q_heads)
    head_dim = _positive(file, f"{arch}.attention.key_length", max(width // q_heads, 1))
    if _positive(file, f"{arch}.attention.value_length", head_dim) != head_dim:
        raise _impossible(file, "attention.value_length differs from attention.key_length")
    if q_heads % kv_heads:
        raise _impossible(file, f"{q_heads} query heads do not divide by {kv_heads} KV heads")
    rope_dims = _positive(file, f"{arch}.rope.dimension_count", head_dim)
    if rope_dims % 2 or rope_dims > head_dim or (is_gemma3 and rope_dims != head_dim):
        raise _impossible(file, f"{rope_dims} RoPE dims do not fit heads of {head_dim}")
    rms_eps = file.get_float(f"{arch}.attention.layer_norm_rms_epsilon")
    rope_base = file.get_float(f"{arch}.rope.freq_base", 10000.0)
    if not (0.0 < rms_eps < 1.0 and 1.0 < rope_base < float("inf")):
        raise _impossible(file, f"rms epsilon {rms_eps}, RoPE base {rope_base}")
    embedding = file.tensors.get("token_embd.weight")
    layers = _positive(file, f"{arch}.block_count")
    if is_gemma3 and layers == _GEMMA3_27B_LAYERS:
        raise _unsupported(file, f"{arch}.block_count", layers)
    return LlamaConfig(
        layers=layers,
        width=width,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_width=_positive(file, f"{arch}.feed_forward_length"),
        rope_base=rope_base,
        rope_dims=rope_dims,
        rope_factor=_rope_factor(file, arch),
        rms_eps=rms_eps,
        context_tokens=_positive(file, f"{arch}.context_length"),
        vocab_size=_positive(file, f"{arch}.vocab_size", embedding.shape[0] if embedding else None),
        tied_embeddings="output.weight" not in file.tensors,
        is_gemma3=is_gemma3,
        window=window or None,
    )


def _refuse_unsupported(file: GgufFile, arch: str) -> None:
    for name, neutral in _NEUTRAL:
        value = file.metadata.get(f"{arch}.{name}", neutral)
        if value != neutral:
            raise _unsupported(file, f"{arch}.{name}", value)


def _unsupported(file: GgufFile, key: str, value: object) -> ModelError:
    return ModelError(f"{file.path}: {key} = {value} is not supported; name another model")


def _rope_factor(file: GgufFile, arch: str) -> float:
    kind = file.get_str(f"{arch}.rope.scaling.type", "none")
    if kind not in _ROPE_SCALINGS:
        raise ModelError(
            f"{file.path}: RoPE scaling {kind!r} is not supported, only "
            f"{', '.join(_ROPE_SCALINGS)} and rope_freqs.weight; name another model"
        )
    # Files written before llama.cpp had scaling types carry linear scaling under this older key.
    factor = file.get_float(f"{arch}.rope.scale_linear", 1.0)
    if kind == "linear":
        factor = file.get_float(f"{arch}.rope.scaling.factor", factor)
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
