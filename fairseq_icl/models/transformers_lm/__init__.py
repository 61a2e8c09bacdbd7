"""Any decoder-only model that transformers knows, by its own code: `load_folder` makes a `TransformersDecoder` of it.

The library is imported when such a folder is opened, and never before. No code of a folder is run, nothing is fetched.
"""

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqDecoder

from fairseq_icl.errors import UserError
from fairseq_icl.models.checkpoints import is_finite
from fairseq_icl.models.hugging_face import HFModel
from fairseq_icl.models.hugging_face.weights import MASKS
from fairseq_icl.models.transformers_lm.attention import NAME, attention_function, mask_function
from fairseq_icl.models.transformers_lm.decoder import TransformersDecoder
from fairseq_icl.models.transformers_lm.examination import agree, examine, linear_of, positions_of

__all__ = ["TransformersDecoder", "adapted", "import_transformers", "load_folder", "positions_of", "read_config"]

TOLERANCE = 1e-3
"""In nats. Two ways of transformers itself to compute attention (eager, sdpa) differ by 1e-4 on long prompts."""


def import_transformers(wanted_by: str | Path = "this") -> Any:
    """The library, or how to get it."""
    try:
        import transformers
        import transformers.utils
    except ImportError as error:
        remedy = "pip install 'fairseq-icl[hf]'"
        raise UserError(f"{wanted_by}: a model of this family needs transformers; {remedy}") from error
    # Where fairseq's torchaudio is not made for the installed torch, transformers fails on it; no model needs it.
    transformers.utils.is_torchaudio_available = lambda: False
    transformers.utils.logging.disable_progress_bar()
    transformers.AttentionInterface.register(NAME, attention_function)
    transformers.AttentionMaskInterface.register(NAME, mask_function)
    return transformers


def read_config(folder: Path) -> Any:
    """What config.json says, by the library's own class for it."""
    transformers = import_transformers(folder)
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds, for many reasons
        raise _refusal(folder, error) from error


def load_folder(
    folder: Path,
    dictionary: Dictionary,
    init: str,
    final_norm: str,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> TransformersDecoder:
    """The decoder in a folder; `init`, `final_norm`, `seed` and `device` as in `pretrained_lm.load_decoder`."""
    config = read_config(folder)
    for part in (config, config.get_text_config()):  # dropout and noise are off in everything this package runs
        for key, value in vars(part).items():
            if ("drop" in key or "jitter" in key) and isinstance(value, float):
                setattr(part, key, 0.0)
    if init == "untrained":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            automatic = import_transformers(folder).AutoModelForCausalLM
            model = automatic.from_config(config, attn_implementation="eager")
    else:
        model = _pretrained(folder, config, dtype, device)
    decoder = adapted(model.eval().requires_grad_(False), dictionary, str(folder))
    decoder.requires_grad_(True)
    if init in ("layer-norms", "trained-embeddings"):
        _forget(decoder, model, init, seed)
        if final_norm == "lost":
            decoder.lose_final_norm()
    return decoder


def adapted(model: Any, dictionary: Dictionary, name: str) -> TransformersDecoder:
    """A causal language model of transformers, which must be eager, as a decoder; the model itself is used up."""
    for owner in list(model.modules()):
        for part, child in list(owner._modules.items()):
            if type(child).__name__ == "Conv1D":  # GPT-2's, which stores (inputs, outputs)
                owner._modules[part] = linear_of(child.weight.detach().t().contiguous(), child.bias.detach())
    model.set_experts_implementation("eager")  # others have no forward derivative; ignored where there are no experts
    anatomy = examine(model, name)
    decoder = TransformersDecoder(model, dictionary, anatomy)
    with torch.no_grad():
        found = decoder(anatomy.tokens)[0]
    if not agree(found, anatomy.logits):
        raise UserError(f"{name}: the model runs otherwise here than in transformers; use a model of another family")
    return decoder


def _pretrained(folder: Path, config: Any, dtype: torch.dtype, device: torch.device | str) -> Any:
    transformers = import_transformers(folder)
    place = {"device_map": {"": str(device)}} if torch.device(device).type == "cuda" else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, attn_implementation="eager",
                local_files_only=True, trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True,
                **place,
            )  # fmt: skip
    except Exception as error:  # of many kinds, for many reasons
        raise _refusal(folder, error) from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = sorted(str(key) for key in info.get(problem, ()) if not re.fullmatch(MASKS, str(key)))
        if found:
            what = f"{problem.replace('_', ' ')}: {found[0][:120]}"
            raise UserError(f"{folder}: its weights do not fit its config.json ({what}); use files of one model")
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            raise UserError(f"{folder}: {name} holds NaN or infinite weights; get a sound copy of the model")
    return model


def _forget(decoder: TransformersDecoder, model: Any, init: str, seed: int) -> None:
    """Draw weights anew by the family's own rule, but those of norms (queries' and keys' aside) and as `init` says."""
    kept = {"layer_norm"} | ({"embed_tokens", "output_projection", "body"} if init == "trained-embeddings" else set())
    for name, module in decoder.layers.named_modules(prefix="layers"):
        # A norm is a module whose own parameters are vectors.
        if ".self_attn." not in name and {parameter.dim() for parameter in module.parameters(recurse=False)} == {1}:
            kept.add(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, module in decoder.named_modules():
            if not any(name == one or name.startswith(f"{one}.") for one in kept):
                for parameter in module.parameters(recurse=False):
                    parameter._is_hf_initialized = False
                model._init_weights(module)


def _refusal(folder: Path, error: Exception) -> UserError:
    if isinstance(error, UserError):
        return error
    reason = " ".join(str(error).split())[:200]
    if "trust_remote_code" in str(error):
        return UserError(f"{folder}: the folder brings its own code, which is not run; use a model of a known family")
    return UserError(f"{folder}: transformers cannot read it ({reason}); download it again, or use another model")


@torch.no_grad()
def difference_from_transformers(model: HFModel, decoder: FairseqDecoder) -> tuple[float, str]:
    """(largest difference, in nats, of a token's log-probability in a long text, which transformers it was)."""
    transformers = import_transformers(model.folder)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        model.folder, config=read_config(model.folder), dtype=torch.float32, local_files_only=True,
        trust_remote_code=False, attn_implementation="eager",
    ).eval()  # fmt: skip
    text = [f"Review {n}: the film of {1900 + 7 * n} was {('dull', 'great', 'long')[n % 3]}." for n in range(24)]
    rows = [model.bos, *model.encode_line(" ".join(text))][: model.positions]
    tokens = torch.tensor([[model.vocabulary.order[row] for row in rows]])
    runs = ((decoder(torch.tensor([rows]))[0], torch.tensor([rows])), (other(tokens).logits, tokens))
    own, expected = (x[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None]) for x, ids in runs)  # (T - 1, 1)
    return float((own - expected).abs().max()), f"transformers {transformers.__version__}"
