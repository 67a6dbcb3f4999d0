from __future__ import annotations

from automodel_ckpt.data.batches.micro_batches import _splitmix64, derive_seed, permutation


def test_the_order_is_the_same_for_ever() -> None:
    assert permutation(10, 42, 0, True).tolist() == [7, 6, 0, 3, 9, 8, 4, 1, 5, 2]
    assert derive_seed(1, 2, 3) == 2904650318439132554


def test_the_generator_gives_the_published_values_of_splitmix64() -> None:
    assert _splitmix64(1234567, 2).tolist() == [6457827717110365317, 3203168211198807973]
