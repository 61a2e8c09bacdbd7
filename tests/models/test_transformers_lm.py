"""Any family of transformers: its own numbers, on whole prompts and packed on a prefix; learning; what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fairseq_icl.errors import UserError
from fairseq_icl.models.attention import Rule, set_rule
from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.models.transformers_lm import adapted
from fairseq_icl.models.transformers_lm.attention import attention_function, window_of
from fairseq_icl.observing.layout import Packed
from fairseq_icl.observing.prefix import features_on_prefix, run_prefix
from fairseq_icl.observing.probe import AttentionProbe, attention_modules, attention_outputs, queries_keys_values
from fairseq_icl.training.layer_causal import layer_losses
from tests.models.tiny_transformers import EXPERTS, FAMILIES, dictionary_of, tiny_decoder, tiny_reference, tokens

PREFIX = tokens(length=30)
QUERIES = [tokens(length=length, seed=length) for length in (5, 9, 12)]
WINDOWED = ("mistral", "gemma2", "gemma3_text", "phi3", "phimoe", "gpt_oss")


def close(found: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest number."""
    size = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found / size, expected / size, rtol=0, atol=1e-5)


def attention_of(model: nn.Module) -> list[nn.Module]:
    """The attention modules of a model of transformers."""
    return [
        module for module in model.modules() if hasattr(module, "layer_idx") and "ttention" in type(module).__name__
    ]


@pytest.mark.parametrize("family", FAMILIES + EXPERTS)
@torch.no_grad()
def test_numbers_are_those_of_transformers(family: str) -> None:
    theirs, seen = tiny_reference(family), list[Tensor]()
    for module in attention_of(theirs):
        module.register_forward_hook(lambda _, __, out: seen.append(out[0][0]))
    expected, outputs = [], []
    for query in QUERIES:
        seen.clear()
        expected.append(theirs(torch.cat([PREFIX, query], dim=1)).logits[0])
        outputs.append(list(seen))
    decoder = tiny_decoder(family)
    for query, logits, attended in zip(QUERIES, expected, outputs, strict=True):
        with attention_outputs(decoder) as own:
            close(decoder(torch.cat([PREFIX, query], dim=1))[0][0], logits)
        for one, other in zip(own, attended, strict=True):
            close(one[:, 0], other)
    prefix, packed = run_prefix(decoder, PREFIX[0].tolist()), Packed.of([query[0].tolist() for query in QUERIES])
    with attention_outputs(decoder) as own:
        found = decoder.output_layer(features_on_prefix(decoder, packed, prefix))[:, 0]
    for number, query in enumerate(QUERIES):
        rows = slice(int(packed.first[number]), int(packed.first[number]) + query.size(1))
        close(found[rows], expected[number][PREFIX.size(1) :])
        for one, other in zip(own, outputs[number], strict=True):
            close(one[0, rows], other[PREFIX.size(1) :])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_heads_that_share_keys_store_them_once(family: str) -> None:
    decoder = tiny_decoder(family)
    prefix = run_prefix(decoder, PREFIX[0].tolist())
    assert {part.shape for part in (*prefix.keys, *prefix.values)} == {(2, PREFIX.size(1), 8)}
    assert prefix.scores(torch.ones(1, 3, 48)).shape == (1, 3, PREFIX.size(1))
    assert prefix.scores_by_head(torch.ones(1, 3, 48), 1).shape == (1, 3, 6, PREFIX.size(1) - 1)


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_are_those_of_the_masks(family: str) -> None:
    windows = {module.seam.window for module in attention_modules(tiny_decoder(family))}
    assert 16 in windows
    assert windows <= {16, None}


def test_a_mask_is_causal_or_a_window_or_refused() -> None:
    def window(_: Any, __: Any, row: Tensor, column: Tensor) -> Tensor:
        return (column <= row) & (row - column < 5)

    assert window_of(lambda b, h, row, column: column <= row, 40) is None
    assert window_of(window, 40) == 5
    with pytest.raises(ValueError, match="neither"):
        window_of(lambda b, h, row, column: (column <= row) & (row // 8 == column // 8), 40)


LEARNERS = [
    "llama",
    "gpt2",
    "gpt_neox",
    "phi3",
    "qwen3",
    "gemma3_text",
    "granite",
    "cohere",
    "opt",
    "olmo2",
    "qwen3_moe",
]
FUSED = {"gpt2": "c_attn", "gpt_neox": "query_key_value", "phi3": "qkv_proj"}


def rows_of(family: str, part: str, rows: int) -> Tensor:
    """Which rows of a fused matrix make the keys or the values."""
    number = "qkv".index(part[0])
    if family == "gpt_neox":  # 6 heads of 8, queries, keys and values of one head after the other
        return torch.arange(rows).view(6, 3, 8)[:, number].flatten()
    sizes = [48, 16, 16] if family == "phi3" else [48, 48, 48]
    return torch.arange(rows).split(sizes)[number]


def gradients_of_transformers(family: str, sequence: Tensor, method: str) -> list[dict[str, Tensor]]:
    """Per layer: gradients of keys' and values' matrices, by autograd on transformers' own model."""
    theirs = tiny_reference(family)
    states: list[Tensor] = []
    blocks = next(m for m in theirs.modules() if isinstance(m, nn.ModuleList) and len(m) == 3)
    body = next(m for m in theirs.modules() if any(child is blocks for child in m.children()))
    if method == "lcgd":
        for block in blocks:
            block.register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))
            block.register_forward_hook(lambda _, __, out: states.append(out if torch.is_tensor(out) else out[0]))
    logits = theirs(sequence).logits
    if method == "lcgd":
        norm = next(m for name, m in body.named_children() if name in ("norm", "ln_f", "final_layer_norm"))
        scale = {"granite": 1 / theirs.config.logits_scaling} if family == "granite" else {"cohere": 0.0625}
        seen = [theirs.get_output_embeddings()(norm(state)) * scale.get(family, 1.0) for state in states]
    else:
        seen = [logits]
    loss = sum(nn.functional.cross_entropy(each[0, :-1], sequence[0, 1:], reduction="sum") for each in seen)
    loss.backward()
    found = []
    for module in attention_of(theirs):
        if family not in FUSED:
            found.append({part: getattr(module, part).weight.grad for part in ("k_proj", "v_proj")})
            continue
        gradient = getattr(module, FUSED[family]).weight.grad
        gradient = gradient.T if family == "gpt2" else gradient
        found.append({part: gradient[rows_of(family, part, len(gradient))] for part in ("k_proj", "v_proj")})
    return found


@pytest.mark.parametrize("method", ["gd", "lcgd"])
@pytest.mark.parametrize("family", LEARNERS)
def test_gradients_are_those_of_autograd_on_transformers(family: str, method: str) -> None:
    sequence = tokens(length=24)
    model = PretrainedLM(tiny_decoder(family)).train()
    model.freeze_all_but("self_attn.k_proj,self_attn.v_proj", biases=False)
    if method == "gd":
        logits = model(sequence)[0]
        loss = nn.functional.cross_entropy(logits[0, :-1], sequence[0, 1:], reduction="sum")
    else:
        target = torch.cat([sequence[:, 1:], torch.tensor([[1]])], dim=1)
        loss = layer_losses(model, model.decoder, range(3), "layer", target, 1, src_tokens=sequence).sum()
    loss.backward()
    names = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert len(names) == 6
    for layer, expected in enumerate(gradients_of_transformers(family, sequence, method)):
        for part, gradient in expected.items():
            own = model.get_parameter(f"decoder.layers.{layer}.self_attn.{part}.weight").grad
            assert float(gradient.norm()) > 0
            assert float((own - gradient).norm() / gradient.norm()) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3", "gemma3_text", "mixtral", "qwen3_moe"])
def test_the_linearized_model_is_the_derivative(family: str) -> None:
    """Plain, fused, with norms of queries and keys, with windows, and of experts."""
    sequence, step = tokens(length=24), 1e-3
    model = PretrainedLM(tiny_decoder(family)).double()
    model.freeze_all_but("self_attn.k_proj,self_attn.v_proj", biases=False)
    linear = LinearizedLM.around(model)
    generator = torch.Generator().manual_seed(2)
    deltas = {
        name: torch.randn(linear.get_parameter(name).shape, generator=generator).double()
        for name in linear.trained_names
    }
    with torch.no_grad():
        here = model(sequence)[0]
        found = linear.evaluate(lambda: linear.decoder(sequence)[0], deltas) - here
        ends = []
        for sign in (1, -1):
            moved = {name: model.get_parameter(name) + sign * step * delta for name, delta in deltas.items()}
            ends.append(model.evaluate(lambda: model.decoder(sequence)[0], moved))
    slope = (ends[0] - ends[1]) / (2 * step)
    assert float((found - slope).norm() / slope.norm()) < 1e-2  # norms of transformers compute in fp32
    torch.testing.assert_close(linear.evaluate(lambda: linear.decoder(sequence)[0]), here, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox", "mistral"])
@torch.no_grad()
def test_linear_attention_has_no_softmax_and_no_scale(family: str) -> None:
    decoder = tiny_decoder(family)
    set_rule(decoder, Rule(linear=True))
    whole = torch.cat([PREFIX, QUERIES[2]], dim=1)
    module = attention_modules(decoder)[0]
    with attention_outputs(decoder) as outputs:
        logits = decoder(whole)[0][0]
    probe = AttentionProbe(decoder, torch.tensor([0]), torch.tensor([20]))
    with probe:
        decoder(whole)
    x: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args: x.append(args[0]))
    decoder(whole)
    hook.remove()
    query, key, value = queries_keys_values(module, x[0])
    scores = (query @ key.transpose(2, 3)).tril()
    scores = scores.triu(-15) if family == "mistral" else scores
    close(module.out_proj((scores @ value).transpose(1, 2).flatten(2))[0], outputs[0][:, 0])
    close(module.q_proj(x[0])[20, 0].norm(), probe.record().query[0, 0].norm())
    packed = Packed.of([QUERIES[2][0].tolist()])
    shared = decoder.output_layer(features_on_prefix(decoder, packed, run_prefix(decoder, PREFIX[0].tolist())))[:, 0]
    close(shared, logits[PREFIX.size(1) :])


REFUSED = {
    "falcon": "not open to other code",
    "bloom": "not open to other code",
    "mpt": "not open to other code",
    "gpt_neo": "not open to other code",
    "minimax": "layers 1 have no attention",
    "jetmoe": "not made by one matrix each",
    "doge": "neither causal nor a window",
}


@pytest.mark.parametrize("family", REFUSED)
def test_families_outside_the_interface_are_refused_by_name(family: str) -> None:
    with pytest.raises(UserError, match=f"{family}: .*{REFUSED[family]}"):
        tiny_decoder(family)


def test_an_unknown_argument_of_attention_is_refused() -> None:
    part = torch.ones(1, 1, 2, 4)
    with pytest.raises(UserError, match=r"hands sparsity=3 to attention, which is unknown here"):
        attention_function(nn.Identity(), part, part, part, None, sparsity=3)
    attention_function(nn.Identity(), part, part, part, None, sparsity=None, use_cache=False)


def test_a_head_that_is_more_than_norm_and_matrix_is_refused() -> None:
    theirs = tiny_reference("llama")
    theirs.lm_head.register_forward_hook(lambda _, __, out: out + out.square() if out.dim() == 3 else out)
    head = theirs.lm_head
    theirs.get_output_embeddings = lambda: nn.Linear(48, 97, bias=False) if head else None
    with pytest.raises(UserError, match="more than a norm and a matrix"):
        adapted(theirs, dictionary_of(), "llama")


def test_without_the_library_one_line_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    code = "import sys; sys.modules['transformers'] = None; from fairseq_icl.commands import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "doctor", str(tmp_path)], capture_output=True, text=True)
    assert "needs transformers; pip install 'fairseq-icl[hf]'" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_library_is_not_imported_for_other_models() -> None:
    code = "import sys, fairseq_icl as fi; fi.load_model('demo'); print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@torch.no_grad()
def test_precision_of_the_probe_and_padding_on_the_right() -> None:
    decoder = tiny_decoder("llama")
    rows = torch.cat([tokens(2, 6), torch.full((2, 2), decoder.padding_idx)], dim=1)
    torch.testing.assert_close(decoder(rows)[0][:, :6], decoder(rows[:, :6])[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="on the right"):
        decoder(rows.flip(1))
    half = tiny_decoder("llama").to(torch.bfloat16)
    assert half(rows)[0].dtype == torch.bfloat16
