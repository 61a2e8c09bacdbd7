"""The matrices that ICL and FT add, against their definition."""

import torch

from fairseq_icl.metrics.weight_space import sim_weights
from fairseq_icl.observing import PrefixCache, attention_modules
from fairseq_icl.observing.weight_updates import attention_inputs, observe_weight_updates
from tests.observe.tiny import CONTEXT, make_queries, tiny_model


def trained_model() -> tuple:
    model = tiny_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("k_proj" in name or "v_proj" in name)
    model.keep_base()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    with model.base_weights():
        return model, PrefixCache().of(model, CONTEXT)


@torch.no_grad()
def test_updates_are_sums_of_outer_products() -> None:
    model, prefix = trained_model()
    queries = make_queries("single", count=3)
    updates = observe_weight_updates(model, queries, prefix)
    tokens = torch.tensor([(0, *queries[1].inputs[0], *queries[1].labels[0])])
    for layer, module in enumerate(attention_modules(model.decoder)):
        with model.base_weights(), attention_inputs(model.decoder) as inputs:
            model.decoder(tokens)
        x = inputs[layer][0, 1:]  # without BOS
        change = module.v_proj(x)[:, 4:8].T @ module.k_proj(x)[:, 4:8]  # head 1 of width 4
        with model.base_weights():
            change = change - module.v_proj(x)[:, 4:8].T @ module.k_proj(x)[:, 4:8]
        torch.testing.assert_close(updates.ft[1, layer, 1], change, rtol=1e-4, atol=1e-4)
        keys, values = prefix.tokens_of(layer)
        icl = values[1, 1:].T @ keys[1, 1:]
        torch.testing.assert_close(updates.icl[layer, 1], icl, rtol=1e-4, atol=1e-4)
    assert sim_weights(updates).value.shape == (3, 3)
