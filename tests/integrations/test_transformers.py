"""A model of transformers says the same with its cache in a swap."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from hsswap import ArgumentError, ClosedError, ConfigError, OutOfBlocks, TopK

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


ROOM: dict[str, Any] = {"device_bytes": 3 << 20, "host_bytes": 2 << 20}


def random_ids(tokens: int, seed: int = 2) -> Any:
    """``[1, tokens]``."""
    return torch.randint(0, 128, (1, tokens), generator=torch.Generator().manual_seed(seed))


def relative(got: Any, wanted: Any) -> float:
    """How far two tensors are apart."""
    error: float = ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
    return error


def masks(kind: str, rows: int, tokens: int) -> Any:
    """What the last rows of some tokens see: ``[1, 1, rows, tokens]``."""
    key, own = torch.arange(tokens), torch.arange(tokens - rows, tokens)[:, None]
    causal = key <= own
    seen = {
        "causal": causal,
        "all": torch.ones(rows, tokens, dtype=torch.bool),
        "packed": causal & (key // 50 == own // 50),
        "one hole": causal & (key != 3),
        "windowed": causal & (key > own - 20),
    }
    return seen[kind][None, None]


def in_form(seen: Any, form: str) -> Any:
    """A mask as it is, or as what is added to scores."""
    if form == "bool":
        return seen
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    bias = {"lowest": torch.finfo(dtype).min, "infinite": -torch.inf, "float32": -1e9}[form]
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, bias)


@pytest.mark.parametrize("form", ["bool", "lowest", "infinite", "float32"])
def test_of_masks_with_four_dimensions_the_causal_one_is_taken(form: str) -> None:
    model, ids = model_of("cpu"), random_ids(101)
    with torch.no_grad(), swapped(model, 200, **ROOM) as cache:
        given = {cache_name(model): cache}

        def refused(kind: str, rows: int, tokens: int) -> None:
            mask = in_form(masks(kind, rows, tokens), form)
            with pytest.raises(ArgumentError, match=r"not layer 0's causal one.*leave it out"):
                model(ids[:, tokens - rows : tokens], attention_mask=mask, **given)
            assert cache.get_seq_length() == tokens - rows

        for kind in ("all", "packed", "one hole", "windowed"):
            refused(kind, 60, 60)
        parts = []
        for start, stop in ((0, 60), (60, 100), (100, 101)):
            mask = in_form(masks("causal", stop - start, stop), form)
            parts.append(model(ids[:, start:stop], attention_mask=mask, **given).logits)
            if stop == 60:
                refused("packed", 40, 100)
        cache.crop(-1)
        refused("one hole", 1, 101)
    with torch.no_grad():
        wanted = model(ids).logits
    assert relative(torch.cat(parts, 1), wanted) < 0.03


def test_masks_of_other_sizes_and_types_are_refused() -> None:
    model, ids = model_of("cpu"), random_ids(60)
    causal = masks("causal", 60, 60)
    bias = in_form(causal, "lowest")
    others = {
        "one row for all": causal[:, :, -1:],
        "too few rows": causal[:, :, 30:],
        "tokens that are not there": masks("causal", 60, 80),
        "whole numbers": causal.long(),
        "a weak bias": bias.clamp(min=-5),
        "a bias of what is seen": bias + 0.5,
    }
    with torch.no_grad(), swapped(model, 200, **ROOM) as cache:
        for mask in others.values():
            with pytest.raises(ArgumentError, match="not layer 0's causal one"):
                model(ids, attention_mask=mask, **{cache_name(model): cache})
        assert cache.get_seq_length() == 0


def test_a_mask_with_four_dimensions_replaces_the_window() -> None:
    """So one without it is refused where the window matters; by a layer after one that took it."""
    torch.manual_seed(1)
    config = transformers.Qwen2Config(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=20,
        layer_types=["full_attention", "sliding_attention"],
    )
    model = transformers.Qwen2ForCausalLM(config).to(dtype=torch.bfloat16).eval()
    ids = random_ids(60)
    with torch.no_grad():
        wanted = model(ids).logits
        with swapped(model, 200, **ROOM) as cache:
            given = {cache_name(model): cache}
            first = model(ids[:, :20], attention_mask=masks("causal", 20, 20), **given).logits
            with pytest.raises(ArgumentError, match="not layer 1's causal one"):
                model(ids[:, 20:], attention_mask=masks("causal", 40, 60), **given)
            assert [cache.get_seq_length(layer) for layer in (0, 1)] == [20, 20]
            both = {
                "full_attention": masks("causal", 40, 60),
                "sliding_attention": masks("windowed", 40, 60),
            }
            rest = model(ids[:, 20:], attention_mask=both, **given).logits
    assert relative(torch.cat([first, rest], 1), wanted) < 0.03


@pytest.mark.parametrize("hidden", [0, 30, 99])
@pytest.mark.parametrize("rows", [1, 7])
def test_holes_in_a_mask_are_refused(rows: int, hidden: int) -> None:
    model, ids = model_of("cpu"), random_ids(100 + rows)
    with torch.no_grad(), swapped(model, 200, **ROOM) as cache:
        given = {cache_name(model): cache}
        model(ids[:, :100], **given)
        mask = torch.ones(1, 100 + rows, dtype=torch.long)
        mask[0, hidden] = 0
        with pytest.raises(ArgumentError, match="has holes in its attention_mask"):
            model(ids[:, 100:], attention_mask=mask, **given)
        with pytest.raises(ArgumentError, match=f"for {rows} tokens, and there are {100 + rows}"):
            model(ids[:, 100:], attention_mask=torch.ones(1, rows, dtype=torch.long), **given)
        assert cache.get_seq_length() == 100
        got = model(ids[:, 100:], attention_mask=torch.ones_like(mask), **given).logits
        wanted = model_of("cpu")(ids).logits[:, 100:]
    assert relative(got, wanted) < 0.03


def test_dropout_is_refused() -> None:
    model, ids = model_of("cpu", attention_dropout=0.5), random_ids(60)
    with torch.no_grad(), swapped(model, 200, **ROOM) as cache:
        given = {cache_name(model): cache}
        with pytest.raises(ArgumentError, match=r"dropout=0\.5.*call model\.eval\(\) first"):
            model.train()(ids, **given)
        assert cache.get_seq_length() == 0
        model.eval()(ids, **given)
        assert cache.get_seq_length() == 60


def test_packed_sequences_are_refused() -> None:
    model, ids = model_of("cpu"), random_ids(60)
    with torch.no_grad(), swapped(model, 200, **ROOM) as cache:
        ends = torch.tensor([0, 30, 60], dtype=torch.int32)
        with pytest.raises(ArgumentError, match="the sequences are packed"):
            model(ids, cu_seq_lens_q=ends, cu_seq_lens_k=ends, **{cache_name(model): cache})
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("device", PLACES)
def test_gradients_are_refused_where_they_would_be_missing(device: str) -> None:
    model, ids = model_of(device), random_ids(60).to(device)
    with swapped(model, 200, **ROOM) as cache:
        given = {cache_name(model): cache}
        logits = model(ids, **given).logits  # who forgets no_grad is none the worse
        with torch.no_grad():
            cache.reset()
            assert torch.equal(logits, model(ids, **given).logits)
        with pytest.raises(ArgumentError, match=r"no gradients.*torch\.no_grad"):
            logits.float().sum().backward()
        assert model.model.layers[0].self_attn.k_proj.weight.grad is None
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
        cache.reset()
        model(ids, **given).logits.float().sum().backward()  # of what comes after all attention
        assert model.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("device", PLACES)
def test_crop(device: str, window: int | None) -> None:
    """To what was there before: the same bits follow, also in blocks that were full, and behind the
    window's beginning.
    """
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256}
    config = transformers.MistralConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
        **sizes,
    )
    torch.manual_seed(1)
    model = transformers.MistralForCausalLM(config).to(device=device, dtype=torch.bfloat16).eval()
    ids, others = random_ids(400).to(device), random_ids(200, seed=3).to(device)
    with torch.no_grad(), swapped(model, 700, **ROOM) as cache:
        given = {cache_name(model): cache}
        model(ids[:, :390], **given)
        wanted = model(ids[:, 390:], **given).logits
        for crop, left in (
            (0, 400),
            (500, 400),
            (-10, 390),
            (torch.tensor(-10), 390),
            (390, 390),
        ):
            cache.crop(crop)
            assert [cache.get_seq_length(layer) for layer in (0, 1)] == [left, left]
            if left < 400:
                assert torch.equal(model(ids[:, 390:], **given).logits, wanted)
        cache.crop(-10)
        model(others, **given)
        cache.crop(-200)
        assert torch.equal(model(ids[:, 390:], **given).logits, wanted)
        for crop in (1.5, None, "3"):
            with pytest.raises(ArgumentError, match="minus the tokens to remove"):
                cache.crop(crop)
        assert cache.get_seq_length() == 400
        cache.crop(-1000)
        assert cache.get_seq_length() == 0


def test_drafts_are_cut_off_again() -> None:
    model, ids = model_of("cpu"), random_ids(100).repeat(1, 2)  # n-grams that come again
    asked = {"max_new_tokens": 12, "do_sample": False}
    with torch.no_grad():
        plain = model.generate(ids, **asked)
        with swapped(model, 300, **ROOM) as cache:
            given = {cache_name(model): cache}
            made = model.generate(ids, prompt_lookup_num_tokens=3, **asked, **given)
    assert made.tolist() == plain.tolist()


def test_calls_for_beams_are_refused() -> None:
    model, ids = model_of("cpu"), random_ids(60)
    with torch.no_grad(), swapped(model, 200, **ROOM) as cache:
        model(ids, **{cache_name(model): cache})
        for call, asked in (
            (cache.reorder_cache, torch.tensor([0])),
            (cache.batch_select_indices, torch.tensor([0])),
            (cache.batch_repeat_interleave, 2),
        ):
            with pytest.raises(ArgumentError, match=r"one sequence.*num_beams=1"):
                call(asked)
        assert cache.get_seq_length() == 60


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    config = transformers.FalconConfig(
        vocab_size=128,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_key_value_heads=2,
    )
    model = transformers.FalconForCausalLM(config).to(torch.bfloat16).eval()
    before = model.config._attn_implementation
    with (
        pytest.raises(ArgumentError, match="FalconForCausalLM takes no attention but its own"),
        swapped(model, 200, **ROOM),
    ):
        pass
    assert model.config._attn_implementation == before


def test_attention_of_others_is_refused() -> None:
    """It would see the new rows alone: of another model, and after the block."""
    model, ids = model_of("cpu"), random_ids(60)
    with torch.no_grad():
        with swapped(model, 200, **ROOM) as cache:
            given = {cache_name(model): cache}
            model(ids[:, :59], **given)
            with pytest.raises(ArgumentError, match="not attended by hsswap's attention"):
                model_of("cpu")(ids[:, 59:], **given)
            assert cache.get_seq_length() == 59
            got = model(ids[:, 59:], **given).logits
            assert relative(got, model_of("cpu")(ids).logits[:, 59:]) < 0.03
        with pytest.raises(ClosedError, match=r"swapped\(\) has ended"):
            model(ids[:, 59:], **given)


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
