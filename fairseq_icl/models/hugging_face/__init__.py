"""Folders in Hugging Face's form: `folder` (config, `HFModel`), `tokenizer`, `weights`."""

from fairseq_icl.models.hugging_face.folder import CONFIG, WEIGHT_FILES, HFModel, read_folder

__all__ = ["CONFIG", "WEIGHT_FILES", "HFModel", "read_folder"]
