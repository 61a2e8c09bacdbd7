"""Fine-tune a model in this process as `fairseq-train` would: its Trainer, the plugin's task and criterions."""

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pandas as pd
import torch
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.data import iterators
from fairseq.dataclass.configs import FairseqConfig
from fairseq.optim import OPTIMIZER_DATACLASS_REGISTRY, OPTIMIZER_REGISTRY
from fairseq.optim.lr_scheduler import LR_SCHEDULER_DATACLASS_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY, setup_task
from fairseq.trainer import Trainer
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from fairseq_icl.devices import repeatable, within_memory
from fairseq_icl.errors import UserError
from fairseq_icl.files import give_back_memory
from fairseq_icl.metrics.attention_outputs import sim_aou_heads
from fairseq_icl.models import Model
from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.models.state_edits import StateEdit
from fairseq_icl.observing import observe
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.results.gradient_record import GradientRecorder
from fairseq_icl.settings import OF_TRAINING, SETTINGS, Settings, nearest
from fairseq_icl.training.gradients import choose_what_learns, gradient_control
from fairseq_icl.training.methods import Method, check_precision_of, get_method, method_names, training_options
from fairseq_icl.training.softmax_gradient import stop_softmax_gradient
from fairseq_icl.training.vectors import train_queries

logger = logging.getLogger(__name__)

COMPONENTS = {"task": TASK_DATACLASS_REGISTRY, "criterion": CRITERION_DATACLASS_REGISTRY}
COMPONENTS |= {"optimizer": OPTIMIZER_DATACLASS_REGISTRY, "lr_scheduler": LR_SCHEDULER_DATACLASS_REGISTRY}
Watch = Callable[[int, Model, Model], None]  # (demonstrations learnt from, the model as it is then, the base model)


@contextmanager
def fine_tuned(
    model: Model,
    prompts: Prompts,
    method: str = "gd",
    *,
    limits: pd.DataFrame | None = None,
    record_queries: bool = True,
    after_demonstration: Watch | None = None,
    **settings: Any,
) -> Iterator[Model]:
    """The model fine-tuned on the demonstrations of `prompts`, one pass over them; `model` itself stays what it is.

    Or, by a method that trains nothing (`shallow_gd`, `task_vector`, ...), with its states edited.

    Args:
        model: The base model, of `load_model`.
        prompts: Of `build_prompts`; `prompts.finetuning` are the sequences, in order.
        method: "gd", "lcgd", "lcgd_sequential", "linearized", "linearized_lcgd", "match_icl", "shallow_gd",
            "task_vector", "function_vector", or one that another package brings.
        limits: Gradient record of another run whose norms `layer_clip="norm"` holds each layer to.
        record_queries: Keep the query vectors of the demonstrations, which recall and Kendall need.
        after_demonstration: Called with (count, tuned, base) after every update that ends a demonstration: how many
            were learnt from, the model as it is then (its weights change later), and the base model.
        settings: Of training: `lr` (needed, unless the method has its own), `clip_norm`, `layer_clip`,
            `layer_clip_value`, `layer_step`, `layer_step_size`, `train_parameters`, `biases`, `layers`, `layer_loss`,
            `layer_causal_point`, `softmax_gradient`, `step_per`; by default as in `prompts.settings`.

    Yields:
        The fine-tuned model, with recorded `training_queries` and `gradients` (a table: step, layer, parameter, norm).

    Example:
        ```python
        with fi.fine_tuned(model, prompts, method="lcgd", lr=1.0) as tuned:
            ft = fi.observe(tuned, prompts)
        ```
    """
    for name in settings:
        if name not in OF_TRAINING:
            close = nearest(name, OF_TRAINING)
            raise UserError(f"{name}: not a setting of training (those of prompts go into build_prompts); {close}")
    how = get_method(method)
    chosen = replace(prompts.settings, precision=model.precision, **settings | how.settings)  # type: ignore[arg-type]
    for name, value in how.settings.items():
        if name in settings and SETTINGS[name].check(settings[name]) != value:
            raise UserError(f"{name}={settings[name]}: method {method} has {name}={value}; leave it out")
    chosen = replace(chosen, lr=how.lr if chosen.lr is None else chosen.lr)
    if chosen.lr is None and how.reads(SETTINGS["lr"]):
        raise UserError("lr: no learning rate was given; give lr=RATE (the papers': fairseq-icl datasets NAME)")
    if not prompts.finetuning:
        raise UserError("num_demonstrations=0: there is nothing to fine-tune on; give at least 1, or method=none")
    if model.weights is not None or model.edit is not None or isinstance(model.lm, LinearizedLM):
        raise UserError("fine_tuned: give the base model, not one that is fine-tuned already")
    if chosen.layers == "similar" and how.reads(SETTINGS["layers"]):
        chosen = replace(chosen, layers=similar_layers(model, prompts, method, chosen, limits))
        logger.info("method %s: layers %s", method, chosen.layers)
    if how.edit is not None:
        with within_memory("learning from the demonstrations"), torch.no_grad():
            edit = how.edit(model, prompts, chosen)
        if not isinstance(edit, StateEdit):
            raise UserError(f"method {how.name}: made a {type(edit).__name__}; it has to make a StateEdit")
        yield replace(model.under(None, how.name), edit=edit)
        return
    if not how.trains:
        raise UserError(f"method={method}: trains nothing; choose one of gd, lcgd, linearized ...")
    check_precision_of(how, chosen)
    if chosen.layer_clip != "none" and chosen.layer_clip_value in method_names() and limits is None:
        limiting = get_method(str(chosen.layer_clip_value))
        same = {name: getattr(chosen, name) for name in OF_TRAINING}
        same |= {"layer_clip": "none", "layer_clip_value": None} | limiting.settings
        with fine_tuned(model, prompts, limiting.name, **same) as other:
            limits = other.gradients
    yield _train(model, prompts, how, chosen, limits, record_queries, after_demonstration)


def similar_layers(
    model: Model, prompts: Prompts, method: str, settings: Settings, limits: pd.DataFrame | None = None
) -> str:
    """The layers, such as 2-4, that move most as ICL moves them when the method learns in all of them.

    Those next to each other of the largest sum of `sim_aou_heads`, averaged over heads and rows of the train split.
    """
    own = {name: getattr(settings, name) for name in OF_TRAINING} | {"layers": None}
    rows = train_queries(model, prompts, settings, settings.selection_rows)
    asked = replace(prompts, queries=rows, settings=replace(prompts.settings, head_outputs="recorded"))
    with fine_tuned(model, prompts, method, limits=limits, record_queries=False, **own) as tuned:
        seen = [observe(model, asked), observe(model, asked, in_context=True), observe(tuned, asked)]
    if any(one.head_output is None for one in seen):
        raise UserError(f"layers=similar: a model under method {method} does not show its heads; give layers by number")
    return best_stretch(sim_aou_heads(*seen).value.nanmean((0, 2)).nan_to_num().tolist())  # of (L,)


def best_stretch(values: Sequence[float]) -> str:
    """FIRST-LAST of the values next to each other that have the largest sum: 1-2 of -1, 3, 2, -4."""
    stretches = [(first, last) for first in range(len(values)) for last in range(first, len(values))]
    first, last = max(stretches, key=lambda ends: sum(values[ends[0] : ends[1] + 1]))
    return f"{first}-{last}"


@within_memory("fine-tuning")
def _train(
    model: Model,
    prompts: Prompts,
    method: Method,
    settings: Settings,
    limits: pd.DataFrame | None,
    record_queries: bool,
    after_demonstration: Watch | None = None,
) -> Model:
    """Train and leave the module's own parameters as they were."""
    lm, device = model.lm, next(model.lm.parameters()).device

    def prepared(method: Method, settings: Settings, **own: Any) -> tuple[DictConfig, Any]:
        options = training_options(method, settings, model.files, str(prompts.data), prompts.spec.name)
        # fairseq would take the first GPU, wherever the model is.
        config = fairseq_config(options | {"cpu": device.type != "cuda", **own})
        return config, setup_task(config.task, prompts=prompts, settings=settings, files=model.files)

    config, task = prepared(method, settings, record_queries=record_queries)
    logger.info("method %s trains %s", method.name, choose_what_learns(lm, settings))
    learner: PretrainedLM = LinearizedLM.around(lm) if config.task.linearize else lm
    recorder = GradientRecorder(learner.decoder)
    task.control = gradient_control(learner.decoder, settings, recorder, limits, linearized=learner is not lm)
    base = model if learner is not lm else model.under({name: lm.get_parameter(name).data for name in lm.trained_names})
    now = replace(model.under(None, method.name), lm=learner)

    def after_item(count: int) -> None:
        if after_demonstration is not None and count in ends:
            learner.eval()
            after_demonstration(ends[count], now, base)
            learner.train()

    sizes = [sum(sequence.scored) if settings.step_per == "token" else 1 for sequence in prompts.finetuning]
    ends = {items: number for number, items in enumerate(accumulate(sizes), 1)}  # items trained on -> demonstrations
    with own_copy_of_what_learns(learner) as weights, repeatable(device), ExitStack() as hooks:
        for hook in stop_softmax_gradient(learner.decoder) if settings.softmax_gradient == "stopped" else ():
            hooks.enter_context(hook)
        if device.type == "cuda":
            hooks.enter_context(torch.cuda.device(device))
        if method.first and settings.align_epochs:
            before = get_method(method.first)
            aligned = replace(settings, lr=before.lr)
            first = prepared(before, aligned, record_queries=False, max_epoch=settings.align_epochs)
            first[1].control = gradient_control(learner.decoder, aligned)
            _run(*first, learner, lambda _: None)
        skipped = _run(config, task, learner, after_item)
    give_back_memory()  # of the gradients
    lm.eval()
    recorded = {"training_queries": task.training_queries or None, "gradients": recorder.table()}
    return replace(model.under(weights, method.name), lm=learner, **recorded, skipped_updates=skipped)


@contextmanager
def own_copy_of_what_learns(model: PretrainedLM) -> Iterator[dict[str, Tensor]]:
    """Inside, what learns is a copy; afterwards the old parameters are back and the dictionary has the trained ones."""
    learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.data for name, parameter in learning.items()}
    trained: dict[str, Tensor] = {}
    for parameter in learning.values():
        parameter.data = parameter.data.clone()
    try:
        yield trained
    finally:
        for name, parameter in learning.items():
            trained[name], parameter.data = parameter.data, before[name]
            parameter.grad = None


def _run(config: DictConfig, task: Any, model: PretrainedLM, after_item: Callable[[int], None]) -> int:
    """fairseq's training loop without checkpoints; `after_item` hears of items. Returns the updates skipped in fp16."""
    trainer = Trainer(config, task, model, task.build_criterion(config.criterion))
    updates = 0
    for epoch in range(1, config.optimization.max_epoch + 1):
        batches = trainer.get_train_iterator(epoch=epoch).next_epoch_itr(shuffle=False)
        trainer.begin_epoch(epoch)
        seen = 0
        try:
            for samples in iterators.GroupedIterator(batches, config.optimization.update_freq[0]):
                trainer.train_step(samples)
                updates += 1
                seen += sum(len(sample["rows"]) for sample in samples)
                if epoch == 1:
                    after_item(seen)
        except FloatingPointError as error:
            step = trainer.get_num_updates() + 1
            raise UserError(f"fine-tuning diverged at step {step} ({error}); lower lr") from error
    skipped = updates - trainer.get_num_updates()
    if skipped:
        logger.warning("%d of %d updates were skipped: their gradients overflowed in fp16", skipped, updates)
    if not all(bool(parameter.isfinite().all()) for parameter in model.parameters() if parameter.requires_grad):
        raise UserError("fine-tuning left weights that are NaN or infinite; lower lr")
    return skipped


def fairseq_config(options: Mapping[str, Any]) -> DictConfig:
    """fairseq's configuration with these options of `fairseq-train` (`clip_norm` ...), without a command line."""
    config, rest = OmegaConf.structured(FairseqConfig), dict(options)
    with flag_override(config, ["allow_objects", "struct"], [True, False]):
        for group, registry in COMPONENTS.items():
            name = rest.pop(group)
            if registry.get(name) is not None:
                config[group] = OmegaConf.structured(registry[name])
                config[group]._name = name
            elif group == "optimizer" and name in OPTIMIZER_REGISTRY:
                parser = argparse.ArgumentParser()  # parts older than fairseq's dataclasses, such as SGD: only flags
                OPTIMIZER_REGISTRY[name].add_args(parser)
                config[group] = argparse.Namespace(optimizer=name, lr=[0.0], **vars(parser.parse_args([])))
            else:
                raise UserError(f"--{group.replace('_', '-')} {name}: unknown to fairseq; {nearest(name, registry)}")
        config.model = {"_name": rest.pop("arch")}
        for name, value in rest.items():
            _set_option(config, name, value)
    return config


def _set_option(config: DictConfig, name: str, value: Any) -> None:
    """Put an option into every section that has one of that name."""
    found = False
    for section in [config[title] for title in config]:
        if isinstance(section, argparse.Namespace) and hasattr(section, name):
            setattr(section, name, [value] if isinstance(getattr(section, name), list) else value)
            found = True
        elif isinstance(section, DictConfig) and name in list(section):  # `in section` is False for a missing value
            is_list = not OmegaConf.is_missing(section, name) and OmegaConf.is_list(section[name])
            try:
                section[name] = [value] if is_list and not isinstance(value, list | tuple) else value
            except OmegaConfBaseException as error:
                raise UserError(f"{name}={value}: {str(error).splitlines()[0]}") from error
            found = True
    if not found:
        raise UserError(
            f"--{name.replace('_', '-')}: no option of fairseq-train with this task, criterion and optimizer"
        )
