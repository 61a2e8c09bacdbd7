"""What ICL and FT add to the matrix V^T K that linear attention applies to a query vector, head by head."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_icl.metrics.weight_space import WeightUpdates, head_matrices
from fairseq_icl.models import Model
from fairseq_icl.observing.layout import lay_out
from fairseq_icl.observing.prefix import Prefix
from fairseq_icl.observing.probe import at_least_single, attention_inputs, attention_modules, queries_keys_values
from fairseq_icl.prompts import Tokens
from fairseq_icl.prompts.encoding import Query


@torch.no_grad()
def observe_weight_updates(
    base: Model, tuned: Model, queries: Sequence[Query], prefix: Prefix, start: Tokens, position: str
) -> WeightUpdates:
    """dW_icl (L, H, D, D) of the prefix's demonstrations and dW_ft (n, L, H, D, D) on the tokens of the queries.

    The layer inputs of both are those of the base model, as in the papers' derivation. `start` is BOS.
    """
    layout = lay_out(queries, position)
    tokens = layout.tokens(before=start)[layout.recorded_sequence]  # (n, T)
    place = torch.arange(tokens.size(1))
    decoder, modules, device = base.lm.decoder, attention_modules(base.lm.decoder), prefix.keys[0].device
    is_token = (place >= len(start)) & (place < layout.recorded_position[:, None] + len(start) + 1)  # (n, T)
    is_token = is_token.to(device)

    def matrices(inputs: Sequence[Tensor]) -> Tensor:  # (n, L, H, D, D)
        layers = []
        for module, x in zip(modules, inputs, strict=True):
            _, keys, values = map(at_least_single, queries_keys_values(module, x))
            layers.append(head_matrices(keys, values, is_token))
        return torch.stack(layers, dim=1)

    def run_base() -> tuple[list[Tensor], Tensor]:
        with attention_inputs(decoder) as inputs:
            decoder.extract_features(tokens.to(device), None)
        return inputs, matrices(inputs)

    inputs, before = base.evaluate(run_base)
    after = tuned.evaluate(lambda: matrices(inputs))
    # V'^T K' of the context without its BOS, which the zero-shot prompt has too: L x (G, D, D)
    layers = zip(map(at_least_single, prefix.keys), map(at_least_single, prefix.values), strict=True)
    in_context = [values[:, 1:].transpose(1, 2) @ keys[:, 1:] for keys, values in layers]
    icl = torch.stack(in_context).repeat_interleave(modules[0].num_heads // len(prefix.keys[0]), dim=1)
    return WeightUpdates(icl=icl.cpu(), ft=(after - before).cpu())
