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

**How it is computed.** Every value follows from products of z and the updates, which are formed once. With u's part
across the zero-shot state, u' = u - (u.e) e, the normalised update is

    (z + u) / |z + u| - e = u' / |z + u| - t e,   t = 1 - cos(z, z + u)

so two of them have the product u'.v' / (|z + u| |z + v|) + t_u t_v, and u'.v' = u.v - (u.e)(v.e). States are fp32 and
products float64, so what cancels there leaves more digits than the states have.
"""

from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_icl.metrics import Observation, Similarity, metric, vectors
from fairseq_icl.metrics.vectors import cosine_of, dots, in_parts, remembered, rounding_of, where_defined

OUTPUT = "attention_output"
Draw = Callable[[Tensor, tuple[int, ...], str], Tensor]
BESIDE_RANDOM: dict[str, Any] = {"conditions": ("zsl", "icl"), "needs": ("example",), "unit": "cosine"}


class Update(NamedTuple):
    """What is known of updates u of zero-shot states; (n, L) each."""

    across: Tensor  # |u'|^2
    scale: Tensor  # 1 / |z + u|, 0 for a state of zero
    turned: Tensor  # t = 1 - cos(z, z + u)
    square: Tensor  # of the normalised update's length


@metric("sim_aou_norm", title="SimAOU_norm", unit="cosine", normalize=True)
@metric("sim_aou", title="SimAOU", unit="cosine")
def sim_aou(zsl: Observation, icl: Observation, ft: Observation, normalize: bool = False) -> Similarity:
    """cos(h_icl - h_zsl, h_ft - h_zsl); with `normalize`, every h is divided by its norm before subtracting.

    `sim_aou_norm`, with h/|h| in place of h, is the first paper's SimAOU. So it is with the random versions.
    """
    *products, noise = _two_updates(zsl, icl, ft, OUTPUT)
    return where_defined(_cosine(normalize, *products), noise)


@metric("sim_aou_projected", title="SimAOU_projected", unit="cosine")
def sim_aou_projected(zsl: Observation, icl: Observation, ft: Observation) -> Similarity:
    """cos(P h_icl, P h_ft), P x = x - (x.e) e, e = h_zsl/|h_zsl|: what is left of SimAOU across the zero-shot state.

    Exactly 0 for updates that are orthogonal to each other and to the zero-shot state, whatever their lengths, where
    the normalised version gives up to 1/2.
    """
    before, along_u, square_u, along_v, square_v, product, noise = _two_updates(zsl, icl, ft, OUTPUT)
    u, v = _update(before, along_u, square_u), _update(before, along_v, square_v)
    return where_defined(cosine_of(product - along_u * along_v * _inverse(before), u.across, v.across), noise)


@metric("sim_aou_heads", reads=("head_output",), title="SimAOU of heads", unit="cosine")
def sim_aou_heads(zsl: Observation, icl: Observation, ft: Observation) -> Similarity:
    """cos(a_icl - a_zsl, a_ft - a_zsl), a what one head puts out, before the output projection: (n, L, H)

    What the output projection makes of these updates adds up to the updates of SimAOU where fine-tuning leaves this
    projection as it is. Recorded with `head_outputs=recorded` only. The table has the mean over heads, and the mean of
    every head h, by layer, as `sim_aou_heads_h`.
    """

    *products, noise = _two_updates(zsl, icl, ft, "head_output")
    return where_defined(_cosine(False, *products), noise)


@metric("sim_aou_norm_random_gaussian", **BESIDE_RANDOM, normal=True, normalize=True)
@metric("sim_aou_random_gaussian", **BESIDE_RANDOM, normal=True)
@metric("sim_aou_norm_random_uniform", **BESIDE_RANDOM, normalize=True)
@metric("sim_aou_random_uniform", **BESIDE_RANDOM)
def sim_aou_random(
    zsl: Observation, icl: Observation, example: Tensor, normalize: bool = False, normal: bool = False
) -> Similarity:
    """cos(h_icl - h_zsl, r), r uniform on [0, 1): the authors' baseline, all positive and so near (1, ..., 1).

    The `_gaussian` versions have r standard normal (`normal`): a direction without preference, expectation 0.
    """
    return beside_drawn(zsl, icl, example, vectors.uniform_float32, vectors.gaussian)[normal][normalize]


@metric("sim_aou_norm_random_matched", needs=("example",), unit="cosine", normalize=True)
@metric("sim_aou_random_matched", needs=("example",), unit="cosine")
def sim_aou_random_matched(
    zsl: Observation, icl: Observation, ft: Observation, example: Tensor, normalize: bool = False
) -> Similarity:
    """cos(u, v), two unrelated updates as long as the true ones: u = |h_icl - h_zsl| g/|g|, v = |h_ft - h_zsl| g'/|g'|.

    g and g' are independent standard normal vectors. This is what remains of a similarity when the lengths of the
    updates are kept and their directions are random.
    """
    square_g, square_h, along_g, along_h, between = _random_pair(zsl, example)
    before, _, square_u, _, square_v, _, _ = _two_updates(zsl, icl, ft, OUTPUT)
    scale_u, scale_v = square_u.sqrt() / square_g.sqrt(), square_v.sqrt() / square_h.sqrt()
    product = between * scale_u * scale_v
    cosines = _cosine(normalize, before, along_g * scale_u, square_u, along_h * scale_v, square_v, product)
    return cosines._replace(lengths=None)


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 for 0."""
    return torch.where(x == 0, 0.0, 1 / torch.where(x == 0, 1.0, x))


def _update(before: Tensor, along: Tensor, square: Tensor) -> Update:
    """From |z|^2, z.u and |u|^2."""
    across = (square - along**2 * _inverse(before)).clamp_min(0)
    after = (before + 2 * along + square).clamp_min(0)  # |z + u|^2
    scale = _inverse(after.sqrt())
    cosine = (before + along) * _inverse(before.sqrt()) * scale
    turned = torch.where(cosine > 0, across * scale**2 / (1 + cosine.clamp_min(0)), 1 - cosine)
    turned = torch.where(before == 0, 0.0, turned)
    return Update(across, scale, turned, across * scale**2 + turned**2)


def _products(*states: Tensor) -> tuple[Tensor, ...]:
    """Of states z, z + u and, if given, z + v: |z|^2, z.u, |u|^2, z.v, |v|^2, u.v"""
    z, *after = (state.double() for state in states)
    updates = [state - z for state in after]
    return dots((z, z), *((vector, u) for u in updates for vector in (z, u)), *combinations(updates, 2))


def _cosine(normalize: bool, *products: Tensor) -> Similarity:
    """cos(u, v), or that of the normalised updates, from `_products` of two: (n, L) each"""
    before, along_u, square_u, along_v, square_v, product = products
    if not normalize:
        return cosine_of(product, square_u, square_v)
    u, v = _update(before, along_u, square_u), _update(before, along_v, square_v)
    across = product - along_u * along_v * _inverse(before)  # u'.v'
    return cosine_of(across * u.scale * v.scale + u.turned * v.turned, u.square, v.square)


@remembered(2)
def _two_updates(zsl: Observation, icl: Observation, ft: Observation, of: str) -> tuple[Tensor, ...]:
    """`_products` of the updates of ICL and FT, and where one of them is nothing but rounding: (n, L) each"""
    products = in_parts(_products, *(getattr(seen, of) for seen in (zsl, icl, ft)))
    if of == OUTPUT:
        _one_update.keep((zsl, icl), products[:3])
    before, _, square_u, _, square_v, _ = products
    limit = rounding_of(zsl, icl, ft) * before.sqrt()
    return *products, (square_u.sqrt() <= limit) | (square_v.sqrt() <= limit)


@remembered(1)
def _one_update(zsl: Observation, icl: Observation) -> tuple[Tensor, ...]:
    """|z|^2, z.u and |u|^2 of ICL's update"""
    return in_parts(_products, zsl.attention_output, icl.attention_output)


@remembered(1)
def beside_drawn(
    zsl: Observation, icl: Observation, example: Tensor, *draws: Draw
) -> list[tuple[Similarity, Similarity]]:
    """Cosines of ICL's update with the vectors r that each of `draws` makes, without and with normalised states."""

    def products(before: Tensor, after: Tensor, numbers: Tensor) -> tuple[Tensor, ...]:
        drawn = [draw(numbers, tuple(before.shape[1:]), "update") for draw in draws]
        before = before.to(drawn[0].dtype)  # fp32 will do for random ones
        update = after.to(before.dtype) - before
        return tuple(part.double() for part in dots(*((vector, r) for r in drawn for vector in (update, before, r))))

    of_u = _one_update(zsl, icl)
    u, (before, along, square_u) = _update(*of_u), of_u
    found = in_parts(products, zsl.attention_output, icl.attention_output, example)
    cosines = []
    for start in range(0, len(found), 3):
        product, to_before, square_r = found[start : start + 3]
        across = product - along * _inverse(before) * to_before  # u'.r
        normalised = across * u.scale - u.turned * to_before * _inverse(before.sqrt())
        both = cosine_of(product, square_u, square_r), cosine_of(normalised, u.square, square_r)
        cosines.append((both[0]._replace(lengths=None), both[1]._replace(lengths=None)))
    return cosines


@remembered(1)
def _random_pair(zsl: Observation, example: Tensor) -> tuple[Tensor, ...]:
    """|g|^2, |g'|^2, z.g, z.g' and g.g' of two independent normal vectors: (n, L) each"""

    def products(state: Tensor, numbers: Tensor) -> tuple[Tensor, ...]:
        z = state.float()
        g, other = (vectors.gaussian(numbers, tuple(z.shape[1:]), f"matched {name}") for name in ("icl", "ft"))
        return tuple(part.double() for part in dots((g, g), (other, other), (z, g), (z, other), (g, other)))

    return in_parts(products, zsl.attention_output, example)
