"""The masks that kernels compute match drawn ones: probabilities, independence of rows, columns, squares."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from brimful.kernels.dropout import kept_mask_PRC, threshold
from brimful.kernels.forward_context import ForwardContext, current

SIZE = 512


def scores(p: float, seed: int, planes: int = 1, site: int = 0) -> torch.Tensor:
    """Masks as numbers of mean 0 and variance 1, (planes, SIZE, SIZE)."""
    dropped = ~kept_mask_PRC(torch.tensor(seed), planes, SIZE, SIZE, p, site)
    return (dropped.double() - p) / (p * (1 - p)) ** 0.5


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 5, 2**61])
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5])
def test_rows_columns_and_squares_are_independent(p: float, seed: int) -> None:
    z = scores(p, seed)[0]
    assert abs(float(z.mean())) < 5 / SIZE
    for axis in (0, 1):
        sums = z.sum(axis) / SIZE**0.5
        assert 0.8 < float(sums.std()) < 1.2
    for matrix in (z, z.T):
        pairs = (matrix @ matrix.T / SIZE**0.5)[tuple(torch.triu_indices(SIZE, SIZE, 1))]
        assert 0.95 < float(pairs.std()) < 1.05
        assert float(pairs.abs().max()) < (7 if p >= 0.1 else 20)  # a rare event's product has a long tail
    for step in (1, 2, 5, 13, 64):
        one, two, three = z[:, : -2 * step], z[:, step:-step], z[:, 2 * step :]
        for product in (z[:, :-step] * z[:, step:], one * two * three):
            assert abs(float(product.sum())) / product.numel() ** 0.5 < (5 if p >= 0.1 else 100)
        squares = z[:-step, :-step] * z[step:, :-step] * z[:-step, step:] * z[step:, step:]
        assert abs(float(squares.sum())) / (SIZE - step) < (5 if p >= 0.1 else 100)


def test_planes_sites_and_seeds_draw_other_masks() -> None:
    masks = [*scores(0.1, 3, planes=3), scores(0.1, 4)[0], scores(0.1, 3, site=1)[0]]
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert abs(float((one * other).mean())) < 5 / SIZE


def test_a_forward_pass_draws_one_seed_and_numbers_its_sites() -> None:
    like = torch.zeros(3)
    torch.manual_seed(0)
    one, other = ForwardContext(), ForwardContext()
    first, second, fewer = (one.dropout_site(like, rows, 0.1) for rows in (3, 3, 2))
    third = other.dropout_site(like, 3, 0.1)
    assert first[0] is second[0]
    assert (first[1], second[1], fewer[1], third[1]) == (0, 1, 2, 0)
    assert torch.equal(first[0][1:], torch.arange(3))
    assert torch.equal(fewer[0], first[0][:3])
    assert first[0][0] != third[0][0]


def test_seeds_of_rows_are_a_steps_and_its_tokens_places() -> None:
    """Of those that a layer goes on with, too; other rows have a seed drawn from torch's generator."""
    like, seed, places = torch.zeros(3), torch.tensor(5), torch.tensor([7, 8, 2, 3])
    context = ForwardContext(seed=seed, places_X=places).layer(1)
    torch.manual_seed(0)
    assert context.dropout_site(like, 4, 0.1)[0].tolist() == [5, 7, 8, 2, 3]
    context.rows.choose(torch.tensor([2, 0]))
    assert context.dropout_site(like, 2, 0.1)[0].tolist() == [5, 2, 7]
    assert context.layer(2).dropout_site(like, 4, 0.1)[0].tolist() == [5, 7, 8, 2, 3]
    others = context.dropout_site(like, 3, 0.1)[0]
    assert others[0] != seed
    assert others[1:].tolist() == [0, 1, 2]


def test_rows_of_one_place_have_one_mask() -> None:
    by_number = kept_mask_PRC(torch.tensor(3), 2, 8, SIZE, 0.3)
    places = torch.tensor([6, 0, 7])
    by_place = kept_mask_PRC(torch.cat([torch.tensor([3]), places]), 2, 3, SIZE, 0.3)
    assert torch.equal(by_place, by_number[:, places])
    with pytest.raises(ValueError, match="a mask of 4 rows has seeds of 3"):
        kept_mask_PRC(torch.cat([torch.tensor([3]), places]), 2, 4, SIZE, 0.3)


def test_a_layer_that_is_run_again_has_the_sites_that_it_had() -> None:
    like, context = torch.zeros(3), ForwardContext()
    assert context.dropout_site(like, 3, 0.1)[1] == 0
    sites = {}
    for layer in (0, 1, 1, 0):
        with context.layer(layer).active():
            sites.setdefault(layer, []).append([current().dropout_site(like, 3, 0.1)[1] for _ in range(3)])
    assert sites == {0: [[1, 2, 3]] * 2, 1: [[4, 5, 6]] * 2}
    assert context.dropout_site(like, 3, 0.1)[1] == 7


def test_thresholds_span_32_bits() -> None:
    assert threshold(0.0) == -(2**31)
    assert threshold(0.5) == 0


def test_without_dropout_there_is_no_seed_to_make() -> None:
    like = torch.zeros(3)
    seed, site = ForwardContext().dropout_site(like, 3, 0.0)
    assert seed is like
    assert site == 0
