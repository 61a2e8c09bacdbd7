"""Random observations for tests of metrics."""

import torch
from hypothesis import strategies as st

from fairseq_icl.observing.observation import Observation


def random_observation(
    seed: int = 0, n: int = 6, layers: int = 3, heads: int = 2, tokens: int = 5, width: int = 8, options: int = 3
) -> Observation:
    """n examples with normal activations; lengths and gold labels are the same for every seed."""
    shared, own = torch.Generator().manual_seed(n), torch.Generator().manual_seed(seed)
    length = torch.randint(1, tokens + 1, (n,), generator=shared)
    gold = torch.randint(options, (n,), generator=shared)
    row = torch.randn(n, layers, heads, tokens, generator=own)
    row *= (torch.arange(tokens) >= tokens - length[:, None])[:, None, None]
    logprobs = torch.randn(n, options, generator=own).log_softmax(-1)
    return Observation(
        row=torch.arange(n),
        gold=gold,
        option_logprobs=logprobs,
        prediction=logprobs.argmax(-1),
        attention_output=torch.randn(n, layers, width, generator=own),
        attention_row=row,
        query_length=length,
        query_vector=torch.randn(n, layers, width, generator=own),
        context_row=torch.randn(n, layers, 12, generator=own),
        label_prior=torch.randn(options, generator=own).log_softmax(-1).repeat(n, 1),
    )


@st.composite
def triples(draw: st.DrawFn) -> tuple[Observation, Observation, Observation]:
    """ZSL, ICL and FT of the same examples; sometimes two conditions are equal, so that an update is zero."""
    n, options = draw(st.integers(1, 12)), draw(st.integers(2, 4))
    seeds = draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))
    zsl, icl, ft = (random_observation(seed, n=n, options=options) for seed in seeds)
    return zsl, icl, ft
