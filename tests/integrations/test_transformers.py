"""A model of transformers says the same with its cache in a swap."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from hsswap import ArgumentError, ConfigError, OutOfBlocks, TopK

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hsswap.integrations.transformers import dims_of, rope_of, swapped  # noqa: E402  (imports both)

PLACES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def model_of(device: str, **more: Any) -> Any:
    """Three layers, random weights."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **more}))
    return model.to(device=device, dtype=torch.bfloat16).eval()


def cache_name(model: Any) -> str:
    """What the argument is called in this version."""
    known = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in known else "past_key_values"


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("top_k", [None, TopK(8)])
@pytest.mark.parametrize("device", PLACES)
def test_it_says_what_it_says_without(
    device: str, top_k: TopK | None, own_stream: bool, tmp_path: Path
) -> None:
    if own_stream and device != "cpu":
        torch.cuda.set_stream(torch.cuda.Stream(device))
    model = model_of(device)
    ids = torch.randint(0, 128, (1, 600), device=device)
    store = tmp_path / "store"
    with torch.no_grad():
        wanted = model(ids).logits
        plain = model.generate(ids, max_new_tokens=12, do_sample=False)
        with swapped(
            model, 700, device_bytes=3 << 20, host_bytes=2 << 20, directory=store, top_k=top_k
        ) as cache:
            given = {cache_name(model): cache}
            assert store.is_dir()
            got = model(ids[:, :400], **given).logits
            rest = model(ids[:, 400:], **given).logits
            assert cache.get_seq_length() == 600
            both = torch.cat([got, rest], 1)
            error = (both.float() - wanted.float()).norm() / wanted.float().norm()
            assert error < 0.03
        with swapped(model, 700, device_bytes=3 << 20, host_bytes=2 << 20, top_k=top_k) as cache:
            made = model.generate(
                ids, max_new_tokens=12, do_sample=False, **{cache_name(model): cache}
            )
        assert made.shape == plain.shape
        if top_k is None:  # else blocks are left out, and greedy tokens may differ
            assert (made == plain).float().mean() > 0.99
        assert model.config._attn_implementation != "hsswap"
        assert not store.exists()


def test_what_cannot_be_swapped_is_refused() -> None:
    model = model_of("cpu")
    room: dict[str, Any] = {"device_bytes": 3 << 20, "host_bytes": 2 << 20}
    with (
        pytest.raises(ConfigError, match="device_bytes is 1000"),
        swapped(model, 700, device_bytes=1000, host_bytes=1000),
    ):
        pass
    with (
        pytest.raises(ArgumentError, match=r"load it with dtype=torch\.bfloat16"),
        swapped(model.float(), 700, **room),
    ):
        pass
    model = model.to(torch.bfloat16)
    with torch.no_grad(), swapped(model, 64, **room) as cache:
        given = {cache_name(model): cache}
        with pytest.raises(ArgumentError, match="a batch of 2"):
            model(torch.zeros(2, 5, dtype=torch.long), **given)
        with pytest.raises(ArgumentError, match="without the cache"):
            model(torch.zeros(1, 5, dtype=torch.long), use_cache=False)
        mask = torch.tensor([[0, 1, 1, 1, 1]])
        with pytest.raises(ArgumentError, match="padded"):
            model(torch.zeros(1, 5, dtype=torch.long), attention_mask=mask, **given)
        cache.reset()
        model.model.layers[1].self_attn.scaling = 0.5
        with pytest.raises(ArgumentError, match=r"layer 1 attends with scaling=0\.5"):
            model(torch.zeros(1, 5, dtype=torch.long), **given)
        model.model.layers[1].self_attn.scaling = model.model.layers[0].self_attn.scaling
        cache.reset()
        assert cache.get_seq_length() == 0
        with pytest.raises(OutOfBlocks):
            model(torch.zeros(1, 90, dtype=torch.long), **given)


@pytest.mark.parametrize("device", PLACES)
def test_windows(device: str) -> None:
    """A sequence longer than the window, in a model whose layers all have one."""
    torch.manual_seed(1)
    config = transformers.MistralConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=100,
    )
    model = transformers.MistralForCausalLM(config).to(device=device, dtype=torch.bfloat16).eval()
    ids = torch.randint(0, 128, (1, 500), device=device)
    with torch.no_grad():
        wanted = model(ids).logits.float()
        with swapped(model, 600, device_bytes=3 << 20, host_bytes=2 << 20) as cache:
            assert dims_of(model).groups[0].window == 100
            got = model(ids, **{cache_name(model): cache}).logits.float()
    assert (got - wanted).norm() / wanted.norm() < 0.03


def test_dims_and_rope_are_the_models() -> None:
    model = model_of("cpu", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    (group,) = dims_of(model).groups
    assert (group.layers, group.q_heads, group.kv_heads, group.head_dim) == (3, 4, 2, 32)
    assert group.rope is not None
    assert group.rope.base == 5e5
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    rope = rope_of(model_of("cpu", rope_parameters=scaled).config, 32)
    assert rope is not None
    assert rope.frequency_factors[0] == 1.0
    assert rope.frequency_factors[-1] == pytest.approx(8.0)
