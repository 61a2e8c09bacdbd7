"""The matrices that ICL and FT add, against their definition."""

import torch

from fairseq_icl.metrics.weight_space import sim_weights
from fairseq_icl.models import Model
from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.observing import Observer
from fairseq_icl.observing.prefix import Prefix
from fairseq_icl.observing.probe import attention_inputs, attention_modules
from fairseq_icl.observing.weight_updates import observe_weight_updates
from tests.observing.tiny import as_model, make_prompts, make_queries, tiny_model


def trained_model() -> tuple[Model, Model, Prefix]:
    """(base, fine-tuned model, prefix under the base weights)"""
    lm = tiny_model()
    torch.manual_seed(1)
    weights = {
        name: parameter.detach() + 0.1 * torch.randn_like(parameter)
        for name, parameter in lm.named_parameters()
        if "k_proj" in name or "v_proj" in name
    }
    base = as_model(lm)
    return base, base.under(weights, "gd"), Observer(base, make_prompts(), in_context=True).prefix


@torch.no_grad()
def test_updates_are_sums_of_outer_products() -> None:
    base, tuned, prefix = trained_model()
    queries = make_queries("single", count=3)
    updates = observe_weight_updates(base, tuned, queries, prefix, (0,), "option0")
    decoder = base.lm.decoder
    tokens = torch.tensor([(0, *queries[1].inputs[0], *queries[1].labels[0])])
    with attention_inputs(decoder) as inputs:
        decoder(tokens)

    def matrix(layer: int) -> torch.Tensor:
        module, x = attention_modules(decoder)[layer], inputs[layer][1:, 0]  # without BOS
        return module.v_proj(x)[:, 4:8].T @ module.k_proj(x)[:, 4:8]  # head 1 of width 4

    for layer in range(3):
        change = tuned.evaluate(lambda layer=layer: matrix(layer)) - matrix(layer)
        torch.testing.assert_close(updates.ft[1, layer, 1], change, rtol=1e-4, atol=1e-4)
        keys, values = prefix.keys[layer], prefix.values[layer]
        icl = values[1, 1:].T @ keys[1, 1:]
        torch.testing.assert_close(updates.icl[layer, 1], icl, rtol=1e-4, atol=1e-4)
    assert sim_weights(updates).value.shape == (3, 3)


@torch.no_grad()
def test_linearized_updates_are_first_order() -> None:
    base, tuned, prefix = trained_model()
    queries = make_queries("single", count=3)
    names = list(tuned.weights)
    deltas = {name: tuned.weights[name] - base.lm.get_parameter(name) for name in names}
    linearized = as_model(LinearizedLM(tiny_model().decoder, names).eval())
    zero = linearized.under({name: torch.zeros_like(delta) for name, delta in deltas.items()})
    seen = observe_weight_updates(zero, linearized.under(deltas), queries, prefix, (0,), "option0").ft
    step = 1e-2
    ends = []
    for sign in (step, -step):
        weights = {name: base.lm.get_parameter(name) + sign * delta for name, delta in deltas.items()}
        ends.append(observe_weight_updates(base, base.under(weights), queries, prefix, (0,), "option0").ft)
    torch.testing.assert_close(seen, (ends[0] - ends[1]) / (2 * step), rtol=1e-2, atol=1e-3)
