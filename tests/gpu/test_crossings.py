"""What goes between host and device while a model is observed: counted, and bounded per query and layer."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fairseq_icl as fi
from fairseq_icl.models.files import find_files
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.settings import Settings
from tests.gpu.conftest import OnGPUs
from tests.models.hf_reference import reference_model, save
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


def loaded(source: Path) -> dict[str, Any]:
    """Where the weights of a model are when its file was read for a GPU in fp16, and the peak of memory there."""
    from tests.gpu.simulated_gpu import GPU

    files, before = find_files(source, bpe=None), GPU.memory
    lm = PretrainedLM.load(files.source, files.load_dictionary(), Settings(precision="fp16"), "cuda:0")
    weights = list(lm.parameters())
    size = sum(weight.nbytes for weight in weights)
    return {"are": {(str(weight.device), weight.dtype) for weight in weights}, "peak": (GPU.peak - before) / size}


@pytest.mark.parametrize("family", ["fairseq", "llama", "xglm"])
def test_weights_are_read_to_the_device_in_the_precision_asked_for(
    on_gpus: OnGPUs, world: World, tmp_path: Path, family: str
) -> None:
    source = world.model if family == "fairseq" else save(reference_model(family), tmp_path)
    found = on_gpus(loaded, source)
    assert found["are"] == {("cuda:0", torch.float16)}
    assert found["peak"] < 2, found  # never the whole model in fp32, nor twice


@pytest.mark.parametrize("in_context", [False, True])
def test_crossings_do_not_grow_with_layers(on_gpus: OnGPUs, world: World, in_context: bool) -> None:
    found = on_gpus(crossings, world, in_context)
    # Tokens, positions and indices go there, scores and activations come back: once for a batch, twice with the inputs
    # without content; three or four a batch belong to the prefix.
    assert found["crossings"] <= 50, found["lines"]
    # Activations of one token of each query in fp32, nothing of the vocabulary's width.
    per_query_and_layer = found["bytes"] / found["queries"] / found["layers"]
    assert per_query_and_layer <= 1500, found
