"""layer_causal_ce computes the formula it stands for, in every variant, and fits into fairseq's training."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.logging import metrics
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fairseq_icl.criterions.layer_causal_ce import LayerCausalCrossEntropy
from fairseq_icl.errors import UserError
from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.settings import Settings
from tests.criterions.tiny_model import PAD, build_model, criterion, gradients, sample_of, task
from tests.models.tiny_linearized import keys_and_values, random_deltas, set_deltas

TOKENS = [[0, 5, 7, 4, 9, 11], [0, 8, 6, 10, 2, 5]]


def by_definition(model: PretrainedLM, sample: dict, point: str) -> list[Tensor]:
    """The loss of each layer, written out: run the layers one by one on detached inputs and read every state by U."""
    decoder, losses = model.decoder, []
    tokens = sample["net_input"]["src_tokens"]
    x = (decoder.embed_scale * decoder.embed_tokens(tokens) + decoder.embed_positions(tokens)).transpose(0, 1)
    for layer in decoder.layers:
        x, residual = x.detach(), x.detach()
        mask = decoder.buffered_future_mask(x)
        y = layer.self_attn_layer_norm(x) if layer.normalize_before else x
        attended = layer.self_attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        x = residual + attended
        x = after_attention = x if layer.normalize_before else layer.self_attn_layer_norm(x)
        y = layer.final_layer_norm(x) if layer.normalize_before else x
        x = x + layer.fc2(layer.activation_fn(layer.fc1(y)))
        x = x if layer.normalize_before else layer.final_layer_norm(x)
        state = {"layer": x, "attention": after_attention, "attention_output": attended}[point]
        state = decoder.layer_norm(state) if decoder.layer_norm is not None else state
        logits = decoder.output_projection(state.transpose(0, 1)).flatten(0, 1)
        losses.append(cross_entropy(logits, sample["target"].flatten(), ignore_index=PAD, reduction="sum"))
    return losses


@pytest.mark.parametrize("point", ["layer", "attention", "attention_output"])
@pytest.mark.parametrize("options", [{}, {"decoder_normalize_before": False}], ids=["pre-norm", "post-norm"])
def test_loss_and_gradients_follow_the_definition(point: str, options: dict):
    sample, model = sample_of(TOKENS), build_model(**options)
    expected = by_definition(model, sample, point)
    expected_gradients = gradients(model, sum(expected))
    loss, sample_size, logs = criterion(layer_causal_point=point)(model, sample)
    torch.testing.assert_close(loss, sum(expected))
    torch.testing.assert_close(gradients(model, loss), expected_gradients)
    assert sample_size == sample["ntokens"] == 10
    for layer, layer_loss in enumerate(expected):
        torch.testing.assert_close(logs[f"loss_layer_{layer}"], layer_loss.detach())


def test_without_a_final_norm_the_states_go_straight_to_the_output_projection():
    sample, model = sample_of(TOKENS), build_model()
    model.decoder.layer_norm = None
    torch.testing.assert_close(criterion()(model, sample)[0], sum(by_definition(model, sample, "layer")))


def test_top_layer_learns_as_in_vanilla_fine_tuning():
    sample, model = sample_of(TOKENS), build_model()
    vanilla = gradients(model, CrossEntropyCriterion(task(), False)(model, sample)[0])
    causal = gradients(model, criterion()(model, sample)[0])
    top = [name for name in vanilla if ".layers.2." in name]
    assert len(top) == 4
    for name in top:
        # fairseq's log-probabilities are fp32 even here
        torch.testing.assert_close(causal[name], vanilla[name], rtol=1e-5, atol=1e-6)


def test_mean_divides_the_sum_by_the_number_of_layers_with_a_loss():
    sample, model = sample_of(TOKENS), build_model()
    for layers, number in ((None, 3), ("1-", 2)):
        added = criterion(layers=layers)(model, sample)[0]
        torch.testing.assert_close(criterion(layers=layers, layer_loss="mean")(model, sample)[0] * number, added)


def test_layers_outside_the_range_get_no_gradient():
    sample, model = sample_of(TOKENS), build_model()
    loss, _, logs = criterion(layers="1")(model, sample)
    assert {name.split(".")[2] for name in gradients(model, loss)} == {"1"}
    assert [name for name in logs if name.startswith("loss_layer_")] == ["loss_layer_1"]


def test_settings_of_the_task_decide_what_no_flag_decides():
    settings = Settings.of("paper", layer_loss="mean")
    paper = SimpleNamespace(target_dictionary=task().target_dictionary, settings=settings)
    chosen = LayerCausalCrossEntropy(paper)
    assert (chosen.point, chosen.layer_loss) == ("attention_output", "mean")
    assert LayerCausalCrossEntropy(paper, layer_causal_point="layer").point == "layer"


def test_head_and_embeddings_get_no_gradient_even_if_trainable():
    sample, model = sample_of(TOKENS), build_model(train_all=True)
    names = gradients(model, criterion()(model, sample)[0])
    assert all(name.startswith("decoder.layers.") for name in names)
    assert "decoder.layers.0.fc1.weight" in names


def test_unscored_and_padded_tokens_do_not_count():
    model = build_model()
    alone, short = criterion()(model, sample_of([TOKENS[0][:4]]))[0], sample_of([TOKENS[0][:4], TOKENS[1]])
    assert short["target"][0].tolist() == [5, 7, 4, PAD, PAD, PAD]
    both, other = criterion()(model, short)[0], criterion()(model, sample_of([TOKENS[1]]))[0]
    torch.testing.assert_close(both, alone + other)


def test_unreduced_loss_has_a_value_for_every_target():
    sample = sample_of([TOKENS[0][:4], TOKENS[1]])
    model = build_model()
    each = criterion()(model, sample, reduce=False)[0]
    assert each.shape == (12,)
    assert each[3:6].tolist() == [0, 0, 0]
    torch.testing.assert_close(each.sum(), criterion()(model, sample)[0])


def test_gradient_is_linear_in_the_loss_scale_and_adds_up_over_batches():
    model, (one, two) = build_model(), (sample_of([tokens]) for tokens in TOKENS)
    plain = gradients(model, criterion()(model, one)[0])
    scaled = gradients(model, 8 * criterion()(model, one)[0])
    torch.testing.assert_close(scaled, {name: 8 * gradient for name, gradient in plain.items()}, rtol=0, atol=0)
    joint = gradients(model, criterion()(model, sample_of(TOKENS))[0])
    torch.testing.assert_close(gradients(model, *(criterion()(model, part)[0] for part in (one, two))), joint)


def test_dummy_batch_gives_zero_gradients_and_keeps_its_log():
    model = build_model()
    loss, _, logs = criterion()(model, sample_of(TOKENS))
    loss *= 0  # what fairseq does
    assert all(not gradient.any() for gradient in gradients(model, loss).values())
    assert logs["loss"] > 0


def test_validation_runs_without_a_graph():
    model = build_model().eval()
    with torch.no_grad():
        loss, _, _ = criterion()(model, sample_of(TOKENS))
    assert not loss.requires_grad
    torch.testing.assert_close(loss, criterion()(model, sample_of(TOKENS))[0].detach())


@pytest.mark.parametrize("mode", ["half", "autocast"])
def test_half_precision_is_close_to_full_precision(mode: str):
    sample, model = sample_of(TOKENS), build_model(dtype=torch.float32)
    exact = gradients(model, criterion()(model, sample)[0])
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        loss, _, _ = criterion()(model.half() if mode == "half" else model, sample)
    assert loss.dtype == torch.float32
    rounded = gradients(model, loss)
    for name in exact:
        if not name.endswith("k_proj.bias"):  # zero but for rounding
            assert (rounded[name].float() - exact[name]).norm() < 0.05 * exact[name].norm(), name


def test_linearized_model_equals_the_ordinary_one_where_it_starts():
    sample, plain = sample_of(TOKENS), build_model()
    expected = gradients(plain, criterion()(plain, sample)[0])
    linearized = linearize(build_model())
    torch.testing.assert_close(gradients(linearized, criterion()(linearized, sample)[0]), expected)


def test_linearized_top_layer_learns_as_in_vanilla_linearized_fine_tuning():
    sample, model = sample_of(TOKENS), linearize(build_model())
    set_deltas(model, random_deltas(model, seed=1))
    logits = model(**sample["net_input"])[0].flatten(0, 1)
    expected = cross_entropy(logits, sample["target"].flatten(), reduction="sum", ignore_index=PAD)
    loss, _, logs = criterion()(model, sample)
    torch.testing.assert_close(logs["loss_layer_2"], expected.detach())
    vanilla, causal = gradients(model, expected), gradients(model, loss)
    for name in vanilla:
        if ".layers.2." in name:
            torch.testing.assert_close(causal[name], vanilla[name])


def linearize(model: PretrainedLM) -> LinearizedLM:
    return LinearizedLM(model.decoder, keys_and_values(model.decoder))


def test_metrics_are_in_bits_per_token():
    sample, model = sample_of(TOKENS), build_model()
    _, _, logs = criterion()(model, sample)
    with metrics.aggregate() as aggregator:
        LayerCausalCrossEntropy.reduce_metrics([logs, logs])
    values = aggregator.get_smoothed_values()
    layers = [values[f"loss_layer_{layer}"] for layer in range(3)]
    assert values["loss"] == pytest.approx(sum(layers), abs=2e-3)
    assert values["nll_loss"] == layers[-1]
    assert values["ppl"] == pytest.approx(2 ** values["nll_loss"], rel=1e-2)
    assert values["loss"] == pytest.approx(float(logs["loss"]) / 10 / torch.log(torch.tensor(2.0)).item(), abs=2e-3)


@pytest.mark.parametrize("text", ["12", "0-12", "5-4", "-3", "a", "", "1,2", "1-2-3"])
def test_bad_layer_range_is_told_in_one_line(text: str):
    with pytest.raises(UserError, match="layers=") as error:
        criterion(layers=text).check_decoder(SimpleNamespace(**plain_head(), layers=nn.ModuleList([None] * 12)))
    assert "\n" not in str(error.value)


def plain_head() -> dict[str, object]:
    return {"adaptive_softmax": None, "output_projection": nn.Linear(2, 2, bias=False)}


def test_model_with_adaptive_softmax_is_refused():
    decoder = SimpleNamespace(**(plain_head() | {"adaptive_softmax": nn.Linear(2, 2)}), layers=nn.ModuleList())
    with pytest.raises(UserError, match="output layer"):
        criterion().check_decoder(decoder)
