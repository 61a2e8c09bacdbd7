"""SimAOU: do ICL and FT move the attention output in the same direction? With three random baselines.

h = output of a layer's attention block at the observed position, (n, L, d). An *update* is a difference to zero-shot:
h_icl - h_zsl, h_ft - h_zsl. Everything here is per example and layer: (n, L).

**Why the normalised version is not 0 for unrelated updates.** Let z = h_zsl, and let the updates u and v be orthogonal
to z and to each other, as independent random vectors nearly are in high dimension. The states z + u and z + v have
the cosines c_u = |z| / |z + u| and c_v = |z| / |z + v| to z, and c_u c_v to each other. With a, b, e the unit vectors
of z + u, z + v and z:

    (a - e).(b - e) = c_u c_v - c_u - c_v + 1 = (1 - c_u)(1 - c_v)        |a - e|^2 = 2 (1 - c_u)

so SimAOU_norm = sqrt((1 - c_u)(1 - c_v)) / 2. Both differences contain -e: what they share is z itself. When both
updates double the norm of the state, c_u = c_v = 1/2 and the value is 1/4 (the second paper, section 3.1); it tends to
0 for small updates and to 1/2 for large ones. Without normalising, cos(u, v) = 0 whatever the norms.
"""

import torch
from torch import Tensor

from fairseq_icl.metrics import Observation, Similarity, metric
from fairseq_icl.metrics.vectors import cosine, gaussian, uniform, unit


@metric("sim_aou")
def sim_aou(zsl: Observation, icl: Observation, ft: Observation, normalize: bool = False) -> Similarity:
    """cos(h_icl - h_zsl, h_ft - h_zsl); with `normalize`, every h is divided by its norm before subtracting."""
    before = _state(zsl, normalize)  # (n, L, d)
    return cosine(_state(icl, normalize) - before, _state(ft, normalize) - before)


@metric("sim_aou_norm")
def sim_aou_norm(zsl: Observation, icl: Observation, ft: Observation) -> Similarity:
    """cos(h_icl/|h_icl| - h_zsl/|h_zsl|, h_ft/|h_ft| - h_zsl/|h_zsl|): the first paper's SimAOU."""
    return sim_aou(zsl, icl, ft, normalize=True)


def sim_aou_of_update(zsl: Observation, icl: Observation, update: Tensor, normalize: bool = False) -> Similarity:
    """cos(h_icl - h_zsl, update) for a given update (n, L, d) in place of the fine-tuning one, used as it is."""
    return cosine(_state(icl, normalize) - _state(zsl, normalize), update)._replace(lengths=None)


@metric("sim_aou_random_uniform", settings=("zsl", "icl"), needs=("example",))
def sim_aou_random_uniform(zsl: Observation, icl: Observation, example: Tensor, normalize: bool = False) -> Similarity:
    """cos(h_icl - h_zsl, r), r uniform on [0, 1): the authors' baseline, all positive and so near (1, ..., 1)."""
    return sim_aou_of_update(zsl, icl, uniform(example, _shape(zsl), "update"), normalize)


@metric("sim_aou_norm_random_uniform", settings=("zsl", "icl"), needs=("example",))
def sim_aou_norm_random_uniform(zsl: Observation, icl: Observation, example: Tensor) -> Similarity:
    """`sim_aou_random_uniform` on normalised states."""
    return sim_aou_random_uniform(zsl, icl, example, normalize=True)


@metric("sim_aou_random_gaussian", settings=("zsl", "icl"), needs=("example",))
def sim_aou_random_gaussian(zsl: Observation, icl: Observation, example: Tensor, normalize: bool = False) -> Similarity:
    """cos(h_icl - h_zsl, g), g standard normal: a direction without preference, expectation 0."""
    return sim_aou_of_update(zsl, icl, gaussian(example, _shape(zsl), "update"), normalize)


@metric("sim_aou_norm_random_gaussian", settings=("zsl", "icl"), needs=("example",))
def sim_aou_norm_random_gaussian(zsl: Observation, icl: Observation, example: Tensor) -> Similarity:
    """`sim_aou_random_gaussian` on normalised states."""
    return sim_aou_random_gaussian(zsl, icl, example, normalize=True)


@metric("sim_aou_random_matched", needs=("example",))
def sim_aou_random_matched(
    zsl: Observation, icl: Observation, ft: Observation, example: Tensor, normalize: bool = False
) -> Similarity:
    """cos(u, v), two unrelated updates as long as the true ones: u = |h_icl - h_zsl| g/|g|, v = |h_ft - h_zsl| g'/|g'|.

    g and g' are independent standard normal vectors. This is what remains of a similarity when the lengths of the
    updates are kept and their directions are random.
    """
    before = zsl.attention_output.double()  # (n, L, d)
    u = _length(icl.attention_output - before) * unit(gaussian(example, _shape(zsl), "matched icl"))
    v = _length(ft.attention_output - before) * unit(gaussian(example, _shape(zsl), "matched ft"))
    if not normalize:
        return cosine(u, v)._replace(lengths=None)
    return cosine(unit(before + u) - unit(before), unit(before + v) - unit(before))._replace(lengths=None)


@metric("sim_aou_norm_random_matched", needs=("example",))
def sim_aou_norm_random_matched(zsl: Observation, icl: Observation, ft: Observation, example: Tensor) -> Similarity:
    """`sim_aou_random_matched` on normalised states: 1/4 where both updates double the norm of the state."""
    return sim_aou_random_matched(zsl, icl, ft, example, normalize=True)


def _state(observation: Observation, normalize: bool) -> Tensor:
    state = observation.attention_output.double()  # (n, L, d)
    return unit(state) if normalize else state


def _length(update: Tensor) -> Tensor:
    return torch.linalg.vector_norm(update, dim=-1, keepdim=True)  # (n, L, 1)


def _shape(observation: Observation) -> tuple[int, ...]:
    return tuple(observation.attention_output.shape[1:])
