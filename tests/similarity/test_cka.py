"""CKA: the slow formula, what it must not see, and that noise is like nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hydralens.errors import InputError
from hydralens.similarity import cka, debiased_cka
from hydralens.similarity.cka import MinibatchCKA
from tests.similarity.reference import naive_cka


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def related(n: int = 12, items: int = 3, width: int = 5, seed: int = 0) -> torch.Tensor:
    """Items that share a part, with a mean far from zero."""
    return random(n, 1, width, seed=seed) + 0.7 * random(n, items, width, seed=seed + 1) + 3


@given(st.integers(4, 9), st.integers(1, 3), st.integers(1, 6), st.integers(0, 1000))
def test_equals_the_formula_term_by_term(n, items, width, seed):
    vectors = related(n, items, width, seed)
    expected, found = naive_cka(vectors), debiased_cka(vectors)
    sure = expected.abs() < 20  # with a handful of tokens HSIC of an item with itself can come near zero, and rounding is all there is
    assert torch.allclose(found[sure].double(), expected[sure], atol=1e-2, rtol=1e-2)


def test_equals_the_formula_closely_where_it_is_well_conditioned():
    vectors = related(10, 4, 6)
    torch.testing.assert_close(debiased_cka(vectors).double(), naive_cka(vectors), atol=1e-5, rtol=0)


def test_turning_mirroring_scaling_and_moving_an_items_space_change_nothing():
    vectors = related(20, 3, 6)
    turned = vectors.clone()
    turned[:, 1] = 40 * vectors[:, 1] @ torch.linalg.qr(random(6, 6))[0] - 7
    turned[:, 2] = -0.01 * vectors[:, 2].flip(-1)
    before = debiased_cka(vectors)
    torch.testing.assert_close(debiased_cka(turned), before, atol=1e-4, rtol=0)
    stretched = vectors.clone()
    stretched[:, 1] *= torch.tensor([10, 1, 1, 1, 1, 1])  # no such map: the test above could not pass by seeing nothing
    assert (debiased_cka(stretched) - before).abs().max() > 0.05


def test_an_item_is_like_itself_and_like_its_image():
    vectors = random(30, 1, 8)
    image = vectors @ torch.linalg.qr(random(8, 8, seed=1))[0]
    torch.testing.assert_close(debiased_cka(torch.cat((vectors, image), 1)), torch.ones(2, 2), atol=1e-5, rtol=0)


def test_independent_noise_is_like_nothing_at_few_tokens_and_the_biased_estimate_calls_it_alike():
    n_draws = 200
    draws = torch.stack([debiased_cka(random(16, 2, 256, seed=seed))[0, 1] for seed in range(n_draws)]).double()
    assert abs(float(draws.mean())) < 3 * float(draws.std()) / n_draws**0.5 and float(draws.std()) < 0.2
    assert naive_cka(random(16, 2, 256), biased=True)[0, 1] > 0.9


@pytest.mark.parametrize("sizes", [[96], [40, 3, 53], [1] * 96])
def test_minibatches_are_the_mean_of_their_hsic_whatever_pieces_tokens_come_in(sizes, monkeypatch):
    monkeypatch.setattr(cka, "BATCH", 12)
    vectors = related(96, 3, 5)
    stream = MinibatchCKA(3, 5)
    for piece in vectors.split(sizes):
        stream.add(piece)
    assert stream.n_tokens + sum(map(len, stream.waiting)) == 96
    torch.testing.assert_close(stream.matrix(), debiased_cka(vectors), atol=0.12, rtol=0)  # two estimates of one quantity
    assert stream.n_tokens == 96


def test_one_batch_is_the_plain_estimate_and_neighbours_are_dealt_to_different_batches(monkeypatch):
    vectors = related(11)
    stream = MinibatchCKA(3, 5)
    stream.add(vectors)
    assert torch.equal(stream.matrix(), debiased_cka(vectors))
    monkeypatch.setattr(cka, "BATCH", 4)
    seen, hsic = [], cka.hsic
    monkeypatch.setattr(cka, "hsic", lambda batch: seen.append(batch[:, 0, 0].tolist()) or hsic(batch))
    stream = MinibatchCKA(2, 5)
    stream.add(torch.arange(16.0)[:, None, None] + related(16, 2) * 0)
    assert seen == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


@given(st.integers(1, 9000), st.integers(1, 8192))
def test_no_batch_takes_more_than_its_share(n_items, width):
    size = cka.batch_size(n_items, width)
    assert cka.FEWEST <= size <= cka.BATCH
    if size > cka.FEWEST:
        assert size**2 * n_items <= cka.VALUES_AT_ONCE and cka.DEALT * size * n_items * width <= cka.VALUES_AT_ONCE


def test_the_same_vector_at_every_token_has_nothing_to_compare():
    vectors = related(8, 2, 3)
    vectors[:, 0] = 1.0
    found = debiased_cka(vectors)
    assert found[0].isnan().all() and float(found[1, 1]) == pytest.approx(1)


def test_too_few_tokens_are_refused():
    with pytest.raises(InputError, match="at least 4 tokens; there are 3"):
        debiased_cka(related(3))
    stream = MinibatchCKA(3, 5)
    stream.add(related(3))
    with pytest.raises(InputError, match="at least 4 tokens"):
        stream.matrix()
