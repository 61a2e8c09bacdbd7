import numpy
import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.prompts.sampling import NUM_PERMUTATIONS, demonstration_orders, shuffled, switched_labels
from fairseq_icl.settings import Settings


def orders(k: int, seed: int, permutation: int, reading: str = "authors", **changes: str) -> tuple[list, list]:
    settings = {"num_demonstrations": k, "seed": seed, "permutation": permutation}
    return demonstration_orders(Settings.of(reading, **settings, **changes))


def test_shuffle_is_that_of_hugging_face_datasets() -> None:
    assert shuffled(10, 3) == numpy.random.default_rng(3).permutation(10).tolist()
    assert sorted(shuffled(10, 3)) == list(range(10))


def test_index_zero_is_no_permutation_for_the_authors_and_the_first_draw_in_the_paper() -> None:
    assert orders(8, 5, 0) == (list(range(8)), list(range(8)))
    first = numpy.random.RandomState(5).permutation(8).tolist()
    assert orders(8, 5, 0, "paper") == (first, first)


def test_negative_index_is_never_a_permutation() -> None:
    assert orders(4, 5, -1, "paper") == orders(4, 5, -1) == ([0, 1, 2, 3], [0, 1, 2, 3])


def test_index_one_uses_the_second_draw_for_icl_and_the_seventh_for_finetuning() -> None:
    generator = numpy.random.RandomState(5)
    draws = [generator.permutation(8).tolist() for _ in range(10)]
    assert orders(8, 5, 1) == (draws[1], draws[6])
    assert orders(8, 5, 1, finetuning_order="icl") == (draws[1], draws[1])


def test_the_global_generator_is_left_alone() -> None:
    before = numpy.random.get_state()[1].tolist()
    orders(8, 5, 1)
    assert numpy.random.get_state()[1].tolist() == before


def test_permutations_beyond_the_authors_five_are_drawn_after_theirs() -> None:
    generator = numpy.random.RandomState(5)
    draws = [generator.permutation(8).tolist() for _ in range(14)]
    assert orders(8, 5, NUM_PERMUTATIONS) == (draws[10], draws[11])
    assert orders(8, 5, NUM_PERMUTATIONS + 1) == (draws[12], draws[13])
    assert orders(8, 5, NUM_PERMUTATIONS + 1, finetuning_order="icl") == (draws[12], draws[12])
    with pytest.raises(UserError, match="permutation=1000: must be at most 999"):
        orders(8, 5, 1000)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range_is_an_error(seed: int) -> None:
    for name in ("seed", "switch_seed"):
        with pytest.raises(UserError, match=f"^{name}={seed}: must be at (least 0|most 4.29497e\\+09)"):
            Settings(**{name: seed})


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0])
def test_switching_changes_the_given_fraction_and_never_to_the_true_label(fraction: float) -> None:
    golds = [i % 3 for i in range(40)]
    labels = switched_labels(golds, [3] * 40, fraction, seed=1)
    assert sum(a != b for a, b in zip(golds, labels, strict=True)) == 40 * fraction
    assert set(labels) <= {0, 1, 2}


def test_switching_depends_on_its_seed_only() -> None:
    golds = [i % 3 for i in range(40)]
    assert switched_labels(golds, [3] * 40, 0.5, 1) == switched_labels(golds, [3] * 40, 0.5, 1)
    assert switched_labels(golds, [3] * 40, 0.5, 1) != switched_labels(golds, [3] * 40, 0.5, 2)


def test_two_classes_are_flipped() -> None:
    assert switched_labels([0, 1, 1], [2, 2, 2], 1.0, 9) == [1, 0, 0]


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_fraction_out_of_range_is_an_error(fraction: float) -> None:
    with pytest.raises(UserError, match=f"switch_fraction={fraction}: must be"):
        Settings(switch_fraction=fraction)
