"""`fairseq-icl doctor FOLDER`: what is in a model folder, whether it fits together, and what to do if it does not.

With --data DATA: which datasets of the catalogue are there, and whether they are, row for row, those of the papers.
"""

from fairseq_icl import compat  # noqa: F401 - before anything imports fairseq

# isort: split
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqDecoder
from torch import Tensor

from fairseq_icl.commands.command_line import doctor
from fairseq_icl.devices import choose_device, within_memory
from fairseq_icl.errors import EXIT_CODE, UserError
from fairseq_icl.files import DEMO_MODEL
from fairseq_icl.metrics.vectors import relative_error
from fairseq_icl.models.checkpoints import base_reference, is_hugging_face, language_model_config, read_checkpoint
from fairseq_icl.models.files import TOKENIZER_FILES, line_encoder, load_bpe, load_dictionary
from fairseq_icl.models.hugging_face import HFModel, read_folder
from fairseq_icl.models.pretrained_lm import load_decoder
from fairseq_icl.models.transformers_lm import TOLERANCE, difference_from_transformers
from fairseq_icl.observing.layout import Packed
from fairseq_icl.observing.prefix import features_on_prefix, run_prefix
from fairseq_icl.prompts.catalogue import dataset_names, find_spec
from fairseq_icl.prompts.readers import SPLITS, compare_rows, has_files, read_split

TEXT = "The movie was a great surprise."
EXAMPLE_LABEL = " Positive"
HEADROOM = 1.1  # memory that weights and one prompt need, in units of the weights


class Stop(Exception):
    """What comes next cannot be judged without what is wrong."""


@dataclass
class Findings:
    """Lines to print, and how many of them are problems."""

    problems: int = 0
    lines: list[str] = field(default_factory=list)

    def say(self, subject: str, text: str, kind: str = "ok") -> None:
        """A line about the subject: ok, a WARNING or a PROBLEM."""
        self.problems += kind == "PROBLEM"
        self.lines.append(f"  {kind:<8} {subject:<14} {text}")

    @contextmanager
    def about(self, subject: str) -> Iterator[None]:
        """An error inside is a problem of the subject, and ends what depends on it."""
        try:
            yield
        except UserError as error:
            self.say(subject, str(error), "PROBLEM")
            raise Stop from error


def main(argv: list[str]) -> int:
    """Entry of the command; exit code 0 if the folder can be used as it is."""
    parser = doctor(__doc__, TEXT)
    arguments = parser.parse_args(argv)
    if arguments.data is not None:
        findings = examine_data(arguments.data)
        print("\n".join([str(arguments.data), *findings.lines]))
        if arguments.folder is None or findings.problems:
            return EXIT_CODE if findings.problems else 0
    if arguments.folder is None:
        parser.error("give a model's folder, or --data DATA")
    if str(arguments.folder) == "demo":  # the name that `load_model` and `model=` know
        arguments.folder = DEMO_MODEL.parent
    if arguments.reference and (not is_hugging_face(arguments.folder) or arguments.no_continuation):
        raise UserError("--reference: compares the weights of a Hugging Face folder; leave out --no-continuation")
    continuation, reference = not arguments.no_continuation, arguments.reference
    findings = examine(arguments.folder, arguments.text, continuation=continuation, reference=reference)
    print("\n".join([str(arguments.folder), *findings.lines]))
    if findings.problems:
        print(f"{findings.problems} problem(s): mend them in the order shown and run the doctor again")
        return EXIT_CODE
    flags = "--user-dir fairseq_icl --task demonstration_prompting --arch pretrained_lm --pretrained …"
    print(f"ready: fairseq-train {flags}")
    return 0


def examine_data(folder: Path) -> Findings:
    """The datasets of the catalogue that have files in `folder`: can they be read, and are they the papers' rows?"""
    findings = Findings()
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder that holds the data files")
    for spec in (find_spec(name, folder) for name in dataset_names(folder) if has_files(folder, name)):
        for split in SPLITS:
            with suppress(Stop), findings.about(spec.name):
                rows = read_split(folder, spec, split)
                compared = compare_rows(folder, spec, split, rows)
                text = f"{split}: {len(rows):,} rows, {compared.text if compared else 'none published to compare with'}"
                findings.say(spec.name, text, "WARNING" if compared is not None and compared.is_doubtful else "ok")
    if not findings.lines:
        missing = "none of the catalogue is there; fairseq-icl fetch data --to DATA brings them"
        findings.say("datasets", missing, "PROBLEM")
    return findings


def examine(place: Path, text: str = TEXT, *, continuation: bool = True, reference: bool = False) -> Findings:
    """Look at everything in turn; a part that cannot be judged without an earlier one is left out."""
    findings = Findings()
    with suppress(Stop):
        if is_hugging_face(place):
            _examine_folder(findings, place, text, continuation=continuation, reference=reference)
        else:
            checkpoint = place if place.is_file() else place / "model.pt"
            _examine_checkpoint(findings, checkpoint, text, continuation=continuation)
    return findings


def _examine_checkpoint(findings: Findings, path: Path, text: str, *, continuation: bool) -> None:
    """A checkpoint of fairseq: options, dictionary, tokenizer, weights."""
    with findings.about("checkpoint"):
        state = read_checkpoint(path)
        base = base_reference(state)
    if base:
        findings.say("checkpoint", f"fine-tuned: {len(state['model'])} trained tensors over {base['path']}")
        return
    with suppress(Stop), findings.about("architecture"):
        _describe_model(findings, state, path)
    with findings.about("dictionary"):
        dictionary = load_dictionary(path.parent / "dict.txt")
    table = state["model"].get("decoder.embed_tokens.weight")
    rows = len(table) if table is not None and table.dim() else 0
    if rows == len(dictionary):
        findings.say("vocabulary", f"{rows:,} embeddings, {len(dictionary):,} symbols in dict.txt")
    else:
        symbols = f"{len(dictionary):,} symbols in dict.txt (4 special ones included)"
        remedy = "take the dict.txt out of the same archive as the checkpoint"
        findings.say("vocabulary", f"{rows:,} embeddings but {symbols}: {remedy}", "PROBLEM")
    bpe = _find_tokenizer(findings, path.parent, dictionary, text)
    if continuation and bpe is not None and not findings.problems:
        with findings.about("weights"):
            decoder = load_decoder(path, dictionary)
        findings.say("weights", "complete and finite")
        ids = line_encoder(dictionary, bpe)(text)
        following = dictionary.string(list(next_tokens(decoder.eval(), dictionary, ids)))
        findings.say("continuation", repr(bpe.decode(following)))
        compare_devices(findings, decoder, [dictionary.bos(), *ids])


def _describe_model(findings: Findings, state: dict[str, Any], path: Path) -> None:
    config, weights = language_model_config(state, path), state["model"]
    unique = {tensor.data_ptr(): tensor.numel() for tensor in weights.values()}
    precisions = sorted({str(t.dtype).removeprefix("torch.") for t in weights.values() if t.is_floating_point()})
    kind = "args" if state.get("args") is not None else "cfg"
    positions = "learned" if config.decoder_learned_pos else "sinusoidal"
    norm = "with" if "decoder.layer_norm.weight" in weights else "without"
    findings.say("checkpoint", f"{path.name}, {path.stat().st_size / 2**20:,.1f} MiB, options in '{kind}'")
    findings.say(
        "architecture",
        f"{config.decoder_layers} layers of width {config.decoder_embed_dim}, {config.decoder_attention_heads} heads, "
        f"{positions} positions up to {config.max_target_positions}, {norm} final layer norm",
    )
    findings.say("parameters", f"{sum(unique.values()):,} in {', '.join(precisions)}")


def _find_tokenizer(findings: Findings, folder: Path, dictionary: Dictionary, text: str) -> Any | None:
    """The tokenizer whose files are there, tried on `text`."""
    for name, files in TOKENIZER_FILES.items():
        if not any((folder / file).is_file() for file in files.values()):
            continue
        with findings.about("tokenizer"):
            bpe: Any = load_bpe(name, **{flag: str(folder / file) for flag, file in files.items()})
            ids = line_encoder(dictionary, bpe)(text)
        if not ids:
            return None
        back, unknown = bpe.decode(dictionary.string(ids)), ids.count(dictionary.unk())
        if unknown > len(ids) / 2 or (not unknown and back.strip() != text.strip()):
            findings.say("tokenizer", f"--bpe {name} turns {text!r} into {back!r}: files of another model?", "PROBLEM")
            return None
        returned = f"{unknown} of them unknown" if unknown else "which come back as the same text"
        findings.say("tokenizer", f"--bpe {name}: {text!r} is {len(ids)} tokens, {returned}")
        return bpe
    wanted = " or ".join(f"{' + '.join(files.values())} (--bpe {name})" for name, files in TOKENIZER_FILES.items())
    findings.say("tokenizer", f"no tokenizer files in {folder}: put {wanted} there", "PROBLEM")
    return None


def _examine_folder(findings: Findings, folder: Path, text: str, *, continuation: bool, reference: bool) -> None:
    """A Hugging Face folder: config.json, tokenizer, how prompts are written, weights."""
    with findings.about("config.json"):
        model = read_folder(folder)
    shape, code = model.shape, "fairseq's decoder" if model.fairseq_config else "transformers' own code"
    findings.say("config.json", f"{model.family}, up to {model.positions:,} positions, run by {code}")
    size = f"{shape['layers']} layers of width {shape['width']}, {shape['heads']} heads"
    findings.say("architecture", f"{size}, vocabulary {shape['vocabulary']:,}")
    with findings.about("tokenizer"):
        _ = model.vocabulary
    _describe_writing(findings, model, text)
    with findings.about("weights"):
        model.weight_files()
        if not continuation:
            return
        decoder = load_decoder(model, model.dictionary)
    total = sum(parameter.numel() for parameter in decoder.parameters())
    biased = any(name.endswith("k_proj.bias") for name, _ in decoder.named_parameters())
    biases = "with" if biased else "without"
    findings.say("weights", f"complete and finite: {total:,} parameters, {biases} key and value biases")
    following = next_tokens(decoder.eval(), model.dictionary, model.encode_line(text))
    findings.say("continuation", repr(model.decode(following)))
    compare_devices(findings, decoder, [model.bos, *model.encode_line(text)])
    if reference:
        with findings.about("reference"):
            difference, made_by = difference_from_transformers(model, decoder)
        text = f"log-probabilities differ by at most {difference:.1e} from those of {made_by}"
        if difference <= TOLERANCE:
            findings.say("reference", text)
        else:
            wrong = f"more than {TOLERANCE:g}: do not use this model, and report it"
            findings.say("reference", f"{text}, {wrong}", "PROBLEM")


def _describe_writing(findings: Findings, model: HFModel, text: str) -> None:
    """The tokenizer's round trip, special tokens, and one rendered prompt."""
    ids = model.encode_line(text)
    back = model.decode(ids)
    if back.strip() != text.strip():
        findings.say("tokenizer", f"turns {text!r} into {back!r}: files of another model?", "PROBLEM")
        raise Stop
    findings.say("tokenizer", f"{text!r} is {len(ids)} tokens, which come back as the same text")
    symbols = model.dictionary
    shown = " ".join(f"{symbols[row]!r} ({row})" for row in model.separator)
    findings.say("begins with", f"{symbols[model.bos]!r} ({model.bos})")
    findings.say("separator", f"{shown}; --separator changes it")
    demonstration = [*ids, *model.encode_line(EXAMPLE_LABEL)]
    findings.say("prompt", repr(model.decode([model.bos, *demonstration, *model.separator, *ids])))
    if model.encode_line(text + EXAMPLE_LABEL) != demonstration:
        findings.say("label words", "input and label together are other tokens than one after the other (as run here)")


def compare_devices(findings: Findings, decoder: FairseqDecoder, rows: Sequence[int], other: str | None = None) -> None:
    """Whether one prompt (`rows`, BOS first) has the same numbers on the CPU and on the `other` device: a GPU.

    Log-probabilities of the whole prompt and of its second half on the first one's keys and values, as it is observed;
    the gradient that a training step would have; and the same in fp16. What does not fit into its memory is left out.
    """
    if other is None and not torch.cuda.is_available():
        findings.say("gpu", "none here: numbers of CPU and GPU were not compared")
        return
    device = choose_device(other or "cuda")
    name = torch.cuda.get_device_name(device) if other is None else other
    size = sum(parameter.nbytes for parameter in decoder.parameters())
    free = torch.cuda.mem_get_info(device)[0] if other is None else size * 2
    expected = devices_numbers(decoder, rows, torch.device("cpu"))
    needed = f"{name}: {size / 2**30:.1f} GiB of weights in fp32, {free / 2**30:.1f} GiB free"

    def differences(doing: str, precision: torch.dtype | None = None) -> tuple[float, float]:
        with within_memory(doing):
            found = devices_numbers(decoder, rows, device, precision)
        return float((found[0] - expected[0]).abs().max()), relative_error(found[1], expected[1])

    if size * HEADROOM > free:
        findings.say("gpu", f"{needed}; not compared in fp32, and precision=fp16 or bf16 is needed", "WARNING")
    else:
        difference, of_gradient = differences("comparing CPU and GPU")
        text = (
            f"{name}: log-probabilities of the text differ by at most {difference:.1e} from those of the CPU, "
            f"the gradient of a training step by {of_gradient:.1e} of its length"
        )
        if difference <= TOLERANCE and of_gradient <= TOLERANCE:
            findings.say("gpu", text)
        else:
            wrong = f"more than {TOLERANCE:g}: switch off TF32 or other shortcuts, or do not use it"
            findings.say("gpu", f"{text}, {wrong}", "PROBLEM")
    if size / 2 * HEADROOM > free:
        text = f"{needed}; not even half of it fits: take a smaller model or device=cpu"
        findings.say("gpu fp16", text, "WARNING")
        return
    difference, of_gradient = differences("comparing CPU and GPU in fp16", torch.float16)
    text = f"log-probabilities differ by at most {difference:.1e} from fp32, gradients by"
    text += f" {of_gradient:.1e} of their length"
    if difference <= 0.1:
        findings.say("gpu fp16", text)
    else:
        wrong = "numbers overflow or lose too many digits; take precision=bf16 or fp32"
        findings.say("gpu fp16", f"{text}: {wrong}", "WARNING")


def devices_numbers(
    decoder: FairseqDecoder, rows: Sequence[int], device: torch.device, precision: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, gradient of the first layer's weights by the prompt's loss), (N,) fp32 on the CPU each.

    The decoder ends where it was, with the weights that it had.
    """
    home, half = next(decoder.parameters()).device, len(rows) // 2
    before = {parameter: parameter.data for parameter in decoder.parameters()}
    learning = {parameter: parameter.requires_grad for parameter in decoder.layers[0].parameters()}
    try:
        if precision is not None:
            for parameter in before:
                parameter.data = parameter.data.to(precision)
        decoder.to(device)
        for parameter in learning:
            parameter.requires_grad_(True)
        tokens = torch.tensor([list(rows)], device=device)
        of_next = decoder(tokens)[0][0, :-1].float().log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]  # (T - 1,)
        gradients = torch.autograd.grad(-of_next.mean(), list(learning), allow_unused=True)
        with torch.no_grad():
            prefix = run_prefix(decoder, tuple(rows[:half]))
            features = features_on_prefix(decoder, Packed.of([tuple(rows[half:])]), prefix)  # (N, 1, d)
            logits = decoder.output_layer(features)[:-1, 0].float().log_softmax(-1)
            on_prefix = logits.gather(1, tokens[0, half + 1 :, None])[:, 0]
        parts = [gradient.float().flatten() for gradient in gradients if gradient is not None]
        return torch.cat([of_next.detach(), on_prefix]).cpu(), torch.cat(parts).cpu()
    finally:
        for parameter, learns in learning.items():
            parameter.requires_grad_(learns)
        decoder.to(home)
        if precision is not None:
            for parameter, data in before.items():
                parameter.data = data


@torch.no_grad()
def next_tokens(decoder: FairseqDecoder, dictionary: Dictionary, ids: list[int]) -> Iterator[int]:
    """The most likely tokens after BOS and `ids`, one after the other, until EOS."""
    tokens = [dictionary.bos(), *ids]
    for _ in range(8):
        features = decoder(torch.tensor([tokens]), features_only=True)[0][:, -1]  # (1, dim)
        tokens.append(int(decoder.output_layer(features).argmax()))
        if tokens[-1] == dictionary.eos():
            return
        yield tokens[-1]
