from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant_eval import metrics
from kvquant_eval.metrics import Comparison, Reference, bootstrap_delta_pct, compare


def scores(x: torch.Tensor, y: torch.Tensor, targets: torch.Tensor) -> tuple[Reference, Comparison]:
    reference = Reference.of(x, targets)
    return reference, compare(reference, y)


def plain(x: torch.Tensor, y: torch.Tensor, targets: torch.Tensor) -> tuple[list[float], list[float], list[float]]:
    """NLL of x and y and KL(x ‖ y), token by token, in Python's own floats."""
    nll_x, nll_y, kl = [], [], []
    for row, target in enumerate(targets.tolist()):
        a, b = x[row].double().tolist(), y[row].double().tolist()
        log_a = [value - max(a) - math.log(math.fsum(math.exp(v - max(a)) for v in a)) for value in a]
        log_b = [value - max(b) - math.log(math.fsum(math.exp(v - max(b)) for v in b)) for value in b]
        nll_x.append(-log_a[target])
        nll_y.append(-log_b[target])
        kl.append(math.fsum(math.exp(p) * (p - q) for p, q in zip(log_a, log_b, strict=True)))
    return nll_x, nll_y, kl


@settings(deadline=None, max_examples=20)
@given(
    rows=st.integers(0, 9),
    vocabulary=st.integers(1, 120),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    noise=st.sampled_from([1e-6, 1e-2, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    slice_elements=st.sampled_from([1, 500, 1 << 18]),
)
def test_scores_equal_a_plain_computation(
    rows: int, vocabulary: int, scale: float, noise: float, dtype: torch.dtype, slice_elements: int
) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + vocabulary)
    x = (torch.randn(rows, vocabulary, generator=generator) * scale).to(dtype)
    y = (x.float() + torch.randn(rows, vocabulary, generator=generator) * noise).to(dtype)
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "_SLICE_ELEMENTS", slice_elements)
        reference, comparison = scores(x, y, targets)
    nll_x, nll_y, kl = plain(x, y, targets)
    np.testing.assert_allclose(reference.nll(), nll_x, rtol=1e-12, atol=1e-10)
    np.testing.assert_allclose(comparison.nll, nll_y, rtol=1e-12, atol=1e-10)
    np.testing.assert_allclose(comparison.kl, kl, rtol=1e-9, atol=1e-10)
    assert comparison.agree.tolist() == (x.argmax(-1) == y.argmax(-1)).tolist()
    assert comparison.kl.dtype == comparison.nll.dtype == torch.float64


def test_equal_logits_have_no_kl_at_all() -> None:
    x = torch.randn(200, 5000) * 5
    reference, comparison = scores(x, x.clone(), torch.randint(5000, (200,)))
    assert comparison.kl.eq(0).all()
    assert torch.equal(comparison.nll, reference.nll())
    assert comparison.agree.all()


def test_tiny_divergences_are_resolved() -> None:
    # A shift changes nothing; one logit moved by e gives KL = p (1 - p) e² / 2 for small e.
    x = torch.zeros(1, 2, dtype=torch.float64)
    _, shifted = scores(x, x + 123.0, torch.tensor([0]))
    assert shifted.kl.item() < 1e-15
    _, moved = scores(x, torch.tensor([[1e-4, 0.0]], dtype=torch.float64), torch.tensor([0]))
    assert moved.kl.item() == pytest.approx(0.25 * 1e-8 / 2, rel=1e-6)


def test_masked_vocabulary_and_certain_losses() -> None:
    masked = torch.tensor([[1.0, -math.inf, 0.0]])
    _, both = scores(masked, masked + torch.tensor([[0.5, 0.0, 0.0]]), torch.tensor([0]))
    assert math.isfinite(both.kl.item())
    _, policy_only = scores(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, -math.inf]]), torch.tensor([1]))
    assert policy_only.kl.item() == policy_only.nll.item() == math.inf
    _, broken = scores(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, math.nan]]), torch.tensor([0]))
    assert broken.kl.isnan().all()


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for seed in range(100):
        low, high = bootstrap_delta_pct(generator.normal(0.003, 0.05, 400), seed) or (1.0, 0.0)
        covered += low <= 100 * math.expm1(0.003) <= high
    assert 88 <= covered <= 100


def test_interval_is_seeded_paired_and_bounded_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    difference = np.random.default_rng(1).normal(0, 0.1, 1000)
    assert bootstrap_delta_pct(difference, 5) == bootstrap_delta_pct(difference, 5)
    assert bootstrap_delta_pct(difference, 5) != bootstrap_delta_pct(difference, 6)
    assert bootstrap_delta_pct(np.zeros(10), 0) == (0.0, 0.0)
    assert bootstrap_delta_pct(np.array([800.0]), 0) is None
    monkeypatch.setattr(metrics, "_RESAMPLE_ELEMENTS", 1)  # one resample at a time
    low, high = bootstrap_delta_pct(difference, 5) or (0.0, 0.0)
    assert low < 100 * math.expm1(difference.mean()) < high
