"""A folder of golden numbers, whatever its tasks, sizes, k, seeds and class counts are.

Templates and label words are not read from anywhere: they are found by comparing the stored token sequences with the
rows' texts, so that a folder with tasks of any name can be tested.
"""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from fairseq.data import Dictionary

from fairseq_icl.models.files import line_encoder
from fairseq_icl.prompts import EOS, Writing
from fairseq_icl.prompts.build import Prompts, build_prompts
from fairseq_icl.prompts.catalogue import load_spec
from fairseq_icl.settings import Settings


@dataclass(frozen=True)
class Golden:
    """One golden folder."""

    root: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        return json.loads((self.root / "model" / "config.json").read_text())

    @cached_property
    def tasks(self) -> list[str]:
        return sorted(path.name.removesuffix("_train.jsonl") for path in (self.root / "data").glob("*_train.jsonl"))

    def permutations(self, task: str) -> list[int]:
        names = (path.name for path in (self.root / "tokens").glob(f"{task}_p*.json"))
        return sorted(
            int(found[1]) for name in names if (found := re.fullmatch(re.escape(task) + r"_p(\d+)\.json", name))
        )

    @property
    def cases(self) -> list[tuple[str, int]]:
        """All (task, permutation index) pairs."""
        return [(task, p) for task in self.tasks for p in self.permutations(task)]

    def setting(self, key: str, task: str) -> Any:
        """A value of config.json, which may be given once or per task."""
        value = self.config[key]
        return value[task] if isinstance(value, dict) else value

    def tokens(self, task: str, p: int) -> dict[str, Any]:
        return json.loads((self.root / "tokens" / f"{task}_p{p}.json").read_text())

    def rows(self, task: str, split: str) -> list[dict[str, Any]]:
        lines = (self.root / "data" / f"{task}_{split}.jsonl").read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line.strip()]

    @cached_property
    def dictionary(self) -> Dictionary:
        return Dictionary.load(str(self.root / "model" / "dict.txt"))

    @cached_property
    def writing(self) -> Writing:
        return Writing(line_encoder(self.dictionary, None))

    def prompts(self, task: str, permutation: int, spec: Path) -> Prompts:
        """The prompts of a case, as the authors' settings ask for them."""
        settings = Settings(
            num_demonstrations=len(self.tokens(task, permutation)["ft"]["src_tokens"]),
            seed=self.setting("seed", task),
            permutation=permutation,
        )
        return build_prompts(load_spec(str(spec)), self.root / "data", self.writing, settings)

    def write_spec(self, task: str, folder: Path) -> Path:
        """A dataset YAML for the task, with the template and label words found in its token sequences."""
        zero_shot = self.tokens(task, self.permutations(task)[0])["zs"]
        num_valid = len(self.rows(task, "valid"))
        num_classes = len(zero_shot["src_tokens"]) // min(num_valid, 2000)
        inputs, labels = [], []
        for tokens, mask in zip(zero_shot["src_tokens"], zero_shot["loss_mask"], strict=True):
            label_start = mask.index(True)
            inputs.append(tokens[1:label_start])
            labels.append(tokens[label_start:])
        before, after = self._around_texts(task, inputs[::num_classes])
        spec = {
            "version": 1,
            "source": "golden numbers",
            "fields": ["text"],
            "template": f"{self._words(before)} {{text}} {self._words(after)}".strip(),
            "label_words": [self._words(label) for label in labels[:num_classes]],
        }
        path = folder / f"{task}.yaml"
        path.write_text(yaml.safe_dump(spec), encoding="utf-8")
        return path

    def _around_texts(self, task: str, inputs: list[list[int]]) -> tuple[list[int], list[int]]:
        """The tokens before and after the text, which are the same in every row's input."""
        rows = self.rows(task, "valid")
        order = self.tokens(task, self.permutations(task)[0])["shuffled_valid_idx"]
        texts = [list(self.writing.tokens(rows[i]["text"])) for i in order[: len(inputs)]]
        for start in range(len(inputs[0])):
            before, after = inputs[0][:start], inputs[0][start + len(texts[0]) :]
            if all(before + text + after == tokens for text, tokens in zip(texts, inputs, strict=True)):
                return before, after
        raise ValueError(f"{self.root}: the inputs of {task} are not its texts inside one template")

    def _words(self, tokens: list[int]) -> str:
        """Text that the white-space tokenizer turns into these tokens."""
        return " ".join("\n" if token == EOS else self.dictionary[token] for token in tokens)
