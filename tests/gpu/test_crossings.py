"""What goes between host and device while a model is observed: counted, and bounded per query and layer."""

from typing import Any

import pytest

import fairseq_icl as fi
from tests.gpu.conftest import OnGPUs
from tests.world import World


def crossings(world: World, in_context: bool) -> dict[str, Any]:
    """How often, how many bytes, and the peak of memory above the weights, for one batch of queries."""
    from tests.gpu.simulated_gpu import GPU

    model = fi.load_model(world.model, bpe=None)
    prompts = fi.build_prompts(model, str(world.spec), data=world.data, k=6, seed=3, limit=12)
    GPU.reset()
    fi.observe(model, prompts, in_context=in_context)
    return {
        "crossings": sum(GPU.crossings.values()),
        "bytes": sum(GPU.bytes.values()),
        "lines": dict(GPU.crossings),
        "layers": len(model.lm.decoder.layers),
        "queries": len(prompts.queries),
        "peak": GPU.peak - GPU.memory,
    }


@pytest.mark.parametrize("in_context", [False, True])
def test_crossings_do_not_grow_with_layers(on_gpus: OnGPUs, world: World, in_context: bool) -> None:
    found = on_gpus(crossings, world, in_context)
    # Tokens, positions and indices go there, scores and activations come back: once for a batch, twice with the inputs
    # without content; three or four a batch belong to the prefix.
    assert found["crossings"] <= 50, found["lines"]
    # Activations of one token of each query in fp32, nothing of the vocabulary's width.
    per_query_and_layer = found["bytes"] / found["queries"] / found["layers"]
    assert per_query_and_layer <= 1500, found
